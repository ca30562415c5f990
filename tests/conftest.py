"""What all tests share: an S3 server on loopback, and one thread a process.

Two pytest workers on two cores would otherwise wait for each other at every product.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.jobs.object_store import Bucket, ObjectServer

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def server() -> "Iterator[ObjectServer]":
    """An S3 server that fails when it is told to."""
    from tests.jobs.object_store import object_server

    with object_server() as server:
        yield server


@pytest.fixture
def bucket(server: "ObjectServer", monkeypatch: pytest.MonkeyPatch) -> "Iterator[Bucket]":
    """An empty bucket on it, and the environment that leads there."""
    from tests.jobs.object_store import object_bucket

    with object_bucket(server, monkeypatch) as bucket:
        yield bucket
