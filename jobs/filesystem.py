"""Where a location lies: the local disk, S3 or GCS through pyarrow.fs, and what their errors mean."""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

from pyarrow import fs

from .errors import ConfigError, StorageError
from .fields import REMOTE_SCHEMES, check_location

MAX_TRIES = 5
FIRST_PAUSE_S = 0.5
"""Before the second try; doubled before each further one."""
REQUEST_TRIES = 3
"""Of one request, by the S3 client itself; reads from an open file have no others."""
_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 60.0
"""Without a byte for so long a request is given up; completing a large upload is silent for a while."""
_S3_OPTIONS = ("region", "scheme", "endpoint_override")

_TRANSIENT = re.compile(
    "SLOW_DOWN|NETWORK_CONNECTION|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT|THROTTLING|TooManyRequests"
    r"|UNAVAILABLE|HTTP status (429|50[0234])"
)
_DENIED = re.compile(
    "ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT"
    r"|MISSING_AUTHENTICATION_TOKEN|ExpiredToken|PERMISSION_DENIED|UNAUTHENTICATED|HTTP status (401|403)"
)

T = TypeVar("T")


def is_remote(location: str) -> bool:
    """Whether a location is an object store's (s3://, gs://)."""
    return location.partition("://")[0] in REMOTE_SCHEMES and "://" in location


def open_filesystem(location: str) -> tuple[fs.FileSystem, str]:
    """The file system of a location and the path inside it, bucket/key for an object store.

    No file is looked at, so a location that cannot be reached opens. Raises ConfigError for a broken URI.
    """
    if not is_remote(location):
        return fs.LocalFileSystem(), os.path.expanduser(location)
    try:
        check_location(location)
    except ValueError as exc:
        raise ConfigError(f"{location.partition('://')[0]}://...: {exc}") from None
    uri = urlsplit(location, allow_fragments=False)
    if not uri.netloc or "//" in uri.path:
        raise ConfigError(f"{location}: is no path in a bucket; write {uri.scheme}://BUCKET/PATH with single slashes")
    try:
        options = dict(parse_qsl(uri.query, strict_parsing=True)) if uri.query else {}
    except ValueError:
        raise ConfigError(f"{location}: options follow a ? as NAME=VALUE; a ? cannot stand in a path") from None
    if uri.scheme == "s3":
        options = _s3_options(location, uri.netloc, options)
    try:
        filesystem = _remote(uri.scheme, tuple(sorted(options.items())))
    except ValueError as error:
        raise ConfigError(f"{location}: {error}") from error
    return filesystem, (uri.netloc + uri.path).rstrip("/")


def used_object_store() -> bool:
    """Whether this process has opened an object store, whose threads may outlive the end of the program."""
    return _remote.cache_info().currsize > 0


def _s3_options(location: str, bucket: str, options: dict[str, str]) -> dict[str, str]:
    unknown = sorted(options.keys() - set(_S3_OPTIONS))
    if unknown:
        raise ConfigError(f"{location}: unknown option {unknown[0]}; there are {', '.join(_S3_OPTIONS)}")
    environment = os.environ.get
    endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
    region = environment("AWS_REGION") or environment("AWS_DEFAULT_REGION")
    if endpoint:
        options.setdefault("endpoint_override", endpoint)
    if region:
        options.setdefault("region", region)
    elif "region" not in options and "endpoint_override" not in options:
        options["region"] = _region(bucket)
    return options


@lru_cache
def _region(bucket: str) -> str:
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError:
        return ""  # no such bucket or no network: the first request says so, with the location in its text


@lru_cache
def _remote(scheme: str, options: tuple[tuple[str, str], ...]) -> fs.FileSystem:
    if scheme == "gs":
        query = "&".join(f"{name}={value}" for name, value in {"retry_limit_seconds": "60", **dict(options)}.items())
        return fs.FileSystem.from_uri(f"gs://bucket?{query}")[0]
    return fs.S3FileSystem(
        **{name: value for name, value in options if value},
        connect_timeout=_CONNECT_TIMEOUT_S,
        request_timeout=_REQUEST_TIMEOUT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=REQUEST_TRIES),
        background_writes=False,
        allow_delayed_open=True,  # small objects go in one request, with nothing to abort
    )


def transient(error: OSError) -> bool:
    """Whether another try may succeed: the store is busy, or the network dropped the request."""
    return error.errno is None and bool(_TRANSIENT.search(str(error)))


def retrying(work: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Does `work`, again after transient errors, in MAX_TRIES tries with growing pauses; the last error comes out."""
    for attempt in range(MAX_TRIES - 1):
        try:
            return work()
        except OSError as error:
            if not transient(error):
                raise
        # Shards that were slowed down together must not come back together.
        sleep(FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0))
    return work()


def explain(error: OSError, location: str) -> tuple[str, str]:
    """What an error on a location means and what to do about it, both without a full stop."""
    if error.errno or not is_remote(location):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = os.strerror(error.errno) if error.errno else str(error).splitlines()[0]
        return reason, "free some space" if full else "check the disk"
    text = str(error).splitlines()[0]
    bucket = urlsplit(location).netloc
    if "NO_SUCH_BUCKET" in text or "NOT_FOUND" in text:
        return f"there is no bucket {bucket}", "create it or correct its name"
    if _DENIED.search(text):
        return (
            f"access to bucket {bucket} is denied",
            "check the credentials in the environment (as AWS_ACCESS_KEY_ID, AWS_PROFILE or the machine's role) and "
            "their rights to list, read, write and delete there",
        )
    if "NETWORK_CONNECTION" in text:
        detail = text.rpartition("Details: ")[2].rpartition("operation: ")[2]
        return f"bucket {bucket} cannot be reached ({detail})", "check the network and AWS_ENDPOINT_URL"
    return text, "wait a while" if transient(error) else f"check bucket {bucket}"


@contextmanager
def storage_errors(path: Path | str) -> Iterator[None]:
    """Turns an OSError within (disk full, I/O error, denied) into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        reason, mend = explain(error, str(path))
        raise StorageError(f"{path}: {reason}; {mend} and submit again, finished rows are kept") from error
