"""All shards of a job together: whether nothing is missing, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from .. import __version__
from .counts import RowCounts
from .errors import InputMissing, OutputError, TemporaryError
from .folder import DATA, INDEX, OutputFolder
from .index import JobIndex
from .manifest import MANIFEST_VERSION, ShardManifest
from .metrics import read_report
from .parts import FailedRow, Part
from .shard import Shard


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job of which every row is in a committed part."""

    index: JobIndex
    parts: list[Part]
    """In the order of their rows."""
    terms: ShardManifest
    """What the last attempt of all says about the job."""
    reports: list[dict[str, Any]]
    """read_report() of each shard; empty where a crash left none."""

    @classmethod
    def gather(cls, output: OutputFolder) -> FinishedJob:
        """Reads the shards' manifests and holds them against data/.

        Raises InputMissing (no job here), TemporaryError (shards that are not done), OutputError (a part is missing,
        has another size, or belongs to none of the shards).
        """
        index = JobIndex.read(output)
        if index is None:
            raise InputMissing(f"{output.location} holds no job ({INDEX} is missing); give a job's output.path")
        folders = [output.shard(Shard(i, index.num_shards)) for i in range(index.num_shards)]
        manifests = [ShardManifest.read(folder) for folder in folders]
        done = {
            i: manifest
            for i, manifest in enumerate(manifests)
            if manifest is not None and manifest.is_done and manifest.fingerprint == index.fingerprint_hash
        }
        if missing := [i for i in range(index.num_shards) if i not in done]:
            raise TemporaryError(
                f"{output.location}: {len(done)} of {index.num_shards} shards are done, missing {_ranges(missing)}; "
                "run those, then finalize again"
            )
        parts = [part for manifest in done.values() for part in manifest.parts]
        parts.sort(key=lambda part: (part.row_start, part.sequence))
        _check(output, index, parts)
        reports = [read_report(output.store, folder.report) or {} for folder in folders]
        return cls(index, parts, max(done.values(), key=lambda manifest: manifest.saved_at), reports)

    @property
    def counts(self) -> RowCounts:
        """How the rows ended."""
        counts = RowCounts()
        for part in self.parts:
            counts.update(part.counts)
        return counts

    def manifest(self, state: str) -> dict[str, Any]:
        """Content of manifest.json."""
        files = [{k: v for k, v in file.items() if k != "offsets"} for file in self.index.scan.get("files", [])]
        return {
            "version": MANIFEST_VERSION,
            "specrun": __version__,
            "state": state,
            "num_rows": self.index.num_rows,
            "num_shards": self.index.num_shards,
            "fingerprint": self.index.fingerprint,
            "fingerprint_hash": self.index.fingerprint_hash,
            "inputs": files,
            "parts": [part.to_json() for part in self.parts],
        }

    def failed_rows(self, output: OutputFolder) -> Iterator[FailedRow]:
        """Each failed row, in input order."""
        for part in self.parts:
            yield from part.failed_rows(output.store)

    def has_column(self, output: OutputFolder, name: str) -> bool:
        """Whether the parts have it; all of them have the same ones."""
        return bool(self.parts) and name in self.parts[0].schema(output.store).names

    def batches(self, output: OutputFolder) -> Iterator[pa.RecordBatch]:
        """All rows of data/, in input order and in pieces of bounded size."""
        for part in self.parts:
            yield from part.batches(output.store)


def error_line(failed: FailedRow) -> bytes:
    """A failed row as a line of errors.jsonl."""
    row_index, row_id, code, message = failed
    row = {"row_index": row_index, "id": row_id, "error_code": code, "error_message": message}
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _check(output: OutputFolder, index: JobIndex, parts: list[Part]) -> None:
    found = output.store.list(DATA)
    for part in parts:
        if found.pop(part.name, None) != part.num_bytes:
            raise OutputError(
                f"{output.store.path(part.path)} is missing or has changed; submit its shard "
                f"({part.shard}/{index.num_shards}) again"
            )
    if found:
        raise OutputError(
            f"{output.store.path(DATA)} holds files that are not of this job ({', '.join(list(found)[:3])}); "
            "move them away"
        )
    row = 0
    for part in parts:
        if part.row_start != row:
            first, stop = sorted((row, part.row_start))
            where = "no part" if row < part.row_start else "two parts"
            raise OutputError(f"{output.location}: rows {first} to {stop - 1} are in {where}; submit again")
        row = part.row_stop
    if row != index.num_rows:
        raise OutputError(f"{output.location}: rows {row} to {index.num_rows - 1} are in no part; submit again")


def _ranges(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:10]))
    return shown if len(numbers) <= 10 else f"{shown}, ... ({len(numbers)} in all)"
