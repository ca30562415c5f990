"""An S3 server on loopback (moto, over real HTTP) that fails when told to."""

import ctypes
import logging
import re
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pyarrow import fs

from specrun.jobs import filesystem, object_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>told to fail</Message></Error>'
_ANSWERS = {"slow": ("503 Slow Down", "SlowDown"), "denied": ("403 Forbidden", "AccessDenied")}


@dataclass
class Fault:
    """Of the requests that match, the first `times` after `skip` go wrong, by `kind`."""

    kind: str
    method: str
    target: str
    """A regular expression that is searched in path?query."""
    times: float
    skip: int
    hits: int = 0

    def takes(self, method: str, target: str) -> bool:
        if self.times <= 0 or not re.fullmatch(self.method, method) or not re.search(self.target, target):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        self.hits += 1
        return True


class ObjectServer:
    """Serves until close(). `requests` holds (method, path?query) of all that came."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.needs_credentials = False
        self._healed = threading.Event()
        self._app = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fail(
        self, kind: str, method: str = ".*", target: str = "", times: float = float("inf"), skip: int = 0
    ) -> Fault:
        """Makes requests go wrong from now on; kinds: slow (503), denied (403), drop, hang until heal()."""
        self._healed.clear()
        fault = Fault(kind, method, target, times, skip)
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        self.faults.clear()
        self.needs_credentials = False
        self._healed.set()

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        method = environ["REQUEST_METHOD"]
        target = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append((method, target))
        if self.needs_credentials and "HTTP_AUTHORIZATION" not in environ:
            return self._answer("denied", environ, start_response)
        for fault in list(self.faults):
            if fault.takes(method, target):
                if fault.kind != "hang":
                    return self._answer(fault.kind, environ, start_response)
                self._healed.wait(60)
        return self._app(environ, start_response)

    def _answer(self, kind: str, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if kind == "drop":
            connection = environ["werkzeug.socket"]
            connection.shutdown(socket.SHUT_RDWR)
            start_response("500 Dropped", [])
            return []
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code = _ANSWERS[kind]
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" else _ERROR.format(code).encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


class Bucket:
    """A bucket of its own for a test, and what lies in it."""

    def __init__(self, server: ObjectServer, name: str) -> None:
        self.server = server
        self.name = name
        self.url = f"s3://{name}"
        self.fs = fs.S3FileSystem(endpoint_override=server.url, region="us-east-1", allow_bucket_creation=True)
        self.fs.create_dir(name)

    def names(self, folder: str = "") -> list[str]:
        """Names of all objects under a folder, within the bucket."""
        selector = fs.FileSelector(f"{self.name}/{folder}".rstrip("/"), allow_not_found=True, recursive=True)
        infos = self.fs.get_file_info(selector)
        return sorted(info.path.partition("/")[2] for info in infos if info.type == fs.FileType.File)

    def read(self, name: str) -> bytes:
        with self.fs.open_input_file(f"{self.name}/{name}") as file:
            content: bytes = file.read()
            return content

    def put(self, name: str, content: bytes) -> None:
        with self.fs.open_output_stream(f"{self.name}/{name}") as stream:
            stream.write(content)


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """A server for a session of tests."""
    server = ObjectServer()
    yield server
    server.close()
    for stream in object_store._unfinished:  # pyarrow prints a line for each that goes at the end of the process
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))


_count = iter(range(10**6))


@contextmanager
def object_bucket(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A new bucket; the environment leads there, and no time is spent between tries."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(filesystem, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(filesystem, "REQUEST_TRIES", 1)
    filesystem._remote.cache_clear()
    yield Bucket(server, f"bucket-{next(_count)}")
    server.heal()
    server.requests.clear()
    filesystem._remote.cache_clear()


def environment(server: ObjectServer) -> dict[str, str]:
    """The variables that lead a process to the server."""
    return {
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_ENDPOINT_URL": server.url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent/config",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
    }
