"""Where a model's files are found, and one clear line where they are not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from specrun.engine import ModelError, resolve_checkpoint

SOURCES = Path(__file__).parents[2] / ".src"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_model(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(json.dumps({"file": name}))
    return folder


def refused(name: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_checkpoint(str(name))
    assert "\n" not in str(caught.value)
    assert str(name) in str(caught.value)
    return str(caught.value)


def test_a_folder_with_safetensors(tmp_path):
    folder = write_model(tmp_path / "m", "config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin")
    found = resolve_checkpoint(str(folder))
    assert found.folder == folder and found.gguf_file is None and found.from_pretrained_kwargs() == {}


def test_pickled_weights_are_refused(tmp_path):
    assert "pickle" in refused(write_model(tmp_path / "m", "config.json", "pytorch_model.bin"))


@pytest.mark.parametrize("beside", [(), ("config.json",), ("config.json", "pytorch_model.bin")])
def test_a_gguf_file_or_a_folder_with_one(tmp_path, beside):
    folder = write_model(tmp_path / "m", "w.gguf", *beside)
    for name in (folder, folder / "w.gguf"):
        found = resolve_checkpoint(str(name))
        assert found.folder == folder and found.from_pretrained_kwargs() == {"gguf_file": "w.gguf"}


def test_several_gguf_files_must_be_named(tmp_path):
    assert "a.gguf, b.gguf" in refused(write_model(tmp_path / "m", "a.gguf", "b.gguf"))


def test_other_files_and_missing_paths(tmp_path):
    assert "no config.json and no .gguf" in refused(write_model(tmp_path / "empty"))
    assert "not a .gguf" in refused(write_model(tmp_path / "m", "config.json") / "config.json")
    for name in (tmp_path / "nowhere", "./nowhere", "~/nowhere-at-all", "a/b/c", "nowhere.gguf"):
        assert "does not exist" in refused(name)


def test_a_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_model(tmp_path / "some_weights", "__init__.py", "w.gguf")
    assert resolve_checkpoint("package:some-weights").from_pretrained_kwargs() == {"gguf_file": "w.gguf"}
    write_model(tmp_path / "other_weights" / "model", "config.json", "model.safetensors")
    write_model(tmp_path / "other_weights", "__init__.py")
    assert resolve_checkpoint("package:other_weights").folder == tmp_path / "other_weights" / "model"
    write_model(tmp_path / "no_weights", "__init__.py")
    assert "neither" in refused("package:no_weights")


@pytest.mark.parametrize(
    "name", ["package:not-there-at-all", "package:", "package:not_there.inner", "package:json.nothing"]
)
def test_a_package_that_is_not_installed(name):
    assert "pip install" in refused(name)


class Hub(BaseHTTPRequestHandler):
    """The part of a model hub that a download needs. Repositories: owner/good and owner/pickled."""

    files: ClassVar[dict[str, dict[str, bytes]]] = {
        "owner/good": {
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors": b"weights" * 100,
            "tokenizer.json": b"{}",
            "pytorch_model.bin": b"pickle",
            "original/consolidated.00.pth": b"pickle",
        },
        "owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    }
    requested: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.requested.append(path)
        for repo, files in self.files.items():
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main", f"/api/models/{repo}/revision/v1"):
                siblings = [{"rfilename": name} for name in files]
                return self.answer(json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
            if path == f"/api/models/{repo}/tree/{COMMIT}":
                tree = [{"type": "file", "path": n, "size": len(b), "oid": etag(b)} for n, b in files.items()]
                return self.answer(json.dumps(tree).encode())
            for name, content in files.items():
                if path == f"/{repo}/resolve/{COMMIT}/{name}":
                    return self.answer(content)
        known = any(path.startswith(f"/api/models/{repo}/") for repo in self.files)
        self.answer(b"", 404, "RevisionNotFound" if known else "RepoNotFound")

    def answer(self, body: bytes, status: int = 200, error: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None


def etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.requested = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_each(home: Path, endpoint: str, *asked: tuple[str, str | None]) -> list[dict[str, str]]:
    """In a process of its own, since the hub's client reads its settings when it is imported."""
    script = """
import json, sys
from specrun.engine import ModelError, resolve_checkpoint
for name, revision in json.loads(sys.argv[1]):
    try:
        found = resolve_checkpoint(name, revision)
        print(json.dumps({"folder": str(found.folder), "revision": found.revision}))
    except ModelError as exc:
        print(json.dumps({"error": str(exc)}))
assert "torch" not in sys.modules
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(SOURCES), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", script, json.dumps(asked)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hub_ids_are_downloaded_once_and_without_pickles(tmp_path, hub):
    asked = [("owner/good", None), ("owner/good", "v1"), ("owner/good", COMMIT)]
    found = resolve_each(tmp_path, hub, *asked)
    assert {f["revision"] for f in found} == {COMMIT}
    assert sorted(p.name for p in Path(found[0]["folder"]).iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert not [path for path in Hub.requested if path.endswith((".bin", ".pth"))]
    assert Path(found[0]["folder"], "model.safetensors").read_bytes() == b"weights" * 100
    offline = resolve_each(tmp_path, "http://127.0.0.1:9", asked[0])
    assert offline[0]["folder"] == found[0]["folder"], "what is in the cache needs no network"


def test_hub_errors_are_one_line(tmp_path, hub):
    asked = [("owner/missing", None), ("owner/pickled", None), ("owner/good", "no-such-branch"), ("bad name!", None)]
    missing, pickled, revision, invalid = (f["error"] for f in resolve_each(tmp_path, hub, *asked))
    assert "'owner/missing' " in missing and "not found on the hub" in missing
    assert "pickle" in pickled
    assert "owner/good" in revision and "no-such-branch" in revision
    assert "bad name!" in invalid
    assert not any("\n" in text for text in (missing, pickled, revision, invalid))


def test_no_network_and_no_cache(tmp_path):
    (found,) = resolve_each(tmp_path, "http://127.0.0.1:9", ("owner/good", None))
    assert "HF_ENDPOINT" in found["error"] and "\n" not in found["error"]
