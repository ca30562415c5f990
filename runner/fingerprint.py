"""What a job's outputs depend on, found out in well under a second and without loading anything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from ..engine.checkpoint import Checkpoint
from ..jobs.fingerprint import Fingerprint
from ..jobs.spec import JobSpec

LARGE_BYTES = 64 << 20
"""Larger files are weights, or what lies beside them such as an optimizer's state, and are sampled:"""
HEAD_BYTES = 1 << 20
"""the first ones, where a GGUF or safetensors header names every tensor,"""
NUM_SAMPLES = 64
SAMPLE_BYTES = 1 << 14
"""and samples spread evenly to the end, since a tuned model may differ in some layers only."""


Identity = Mapping[str, Any]
"""Of a checkpoint: its revision and, under other keys, what its content is known by. JSON values."""


def job_fingerprint(
    spec: JobSpec, inputs: Sequence[Mapping[str, Any]], model: Identity, draft: Identity | None = None
) -> Fingerprint:
    """Of the job's own keys, the input's content (PromptSource.identity()), the model's files and those of the draft
    model, where the job has one.

    Paths are not part of it: the same rows are the same rows wherever they lie.
    """
    files = [{key: file[key] for key in ("size", "hash")} for file in inputs]
    labels = {f"files[{i}].": f"input file {file['path']} " for i, file in enumerate(inputs)}
    values = {**spec.fingerprint_fields(), "files": files, "weights": dict(model)}
    if draft is not None:
        values["draft"] = dict(draft)
    return Fingerprint(values, spec.secret_keys, labels)


def pin(spec: JobSpec, model: Identity, draft: Identity | None = None) -> JobSpec:
    """The job bound to these very models, by revision and content_hash; ConfigError where it is bound to others."""
    found = {"model": model} if draft is None else {"model": model, "speculation": draft}
    return spec.pinned(
        {name: {"revision": i.get("revision"), "content_hash": content_hash(i)} for name, i in found.items()}
    )


def content_hash(identity: Identity) -> str:
    """One hash over the names and the hashes of a checkpoint's files, wherever they came from."""
    content = {key: value for key, value in identity.items() if key != "revision"}
    return f"sha256:{hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()}"


def checkpoint_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """The revision and a hash of each file that decides what the model says.

    Files up to LARGE_BYTES (configuration, tokenizer, chat template) are hashed whole; of larger ones the size and
    samples.
    """
    if checkpoint.gguf_file:
        files = [checkpoint.folder / checkpoint.gguf_file]
    else:
        files = [f for f in checkpoint.folder.iterdir() if f.is_file() and f.suffix != ".md" and f.name[0] != "."]
    hashes = {file.name: _file_hash(file) for file in sorted(files)}
    return {"revision": checkpoint.revision, "files": hashes}


def _file_hash(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    size = file.stat().st_size
    with file.open("rb") as stream:
        for piece in _pieces(stream, size):
            digest.update(piece)
    return f"{size}:{digest.hexdigest()}"


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The whole file, or its head and its samples."""
    if size <= LARGE_BYTES:
        while piece := stream.read(HEAD_BYTES):
            yield piece
        return
    yield stream.read(HEAD_BYTES)
    for sample in range(1, NUM_SAMPLES + 1):
        stream.seek((size - SAMPLE_BYTES) * sample // NUM_SAMPLES)
        yield stream.read(SAMPLE_BYTES)
