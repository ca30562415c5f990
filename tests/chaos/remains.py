"""What an attempt left behind in its output folder, found by looking at the files alone."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

PART_NAME = re.compile(r"part-\d{5}-\d{6}")
"""A part of data/: shard, sequence. Step metrics have another number in between."""


def work_files(out: Path, pattern: str) -> list[Path]:
    """Files of .specrun that match, in the folders of shards too."""
    for _ in range(100):
        with suppress(FileNotFoundError):  # a folder went while it was looked into, as another shard cleaned up
            return sorted((out / ".specrun").glob(f"**/{pattern}"))
    raise RuntimeError(f"{out} does not hold still")


def is_whole(path: Path) -> bool:
    """Whether a file is a Parquet file with its footer."""
    try:
        pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError):
        return False
    return True


def torn_parts(out: Path) -> list[Path]:
    """Parts that were being written and end before their footer does."""
    return [path for path in _parts_in_work(out) if not is_whole(path)]


def unnamed_parts(out: Path) -> list[Path]:
    """Parts that were closed and did not get their name in data/."""
    return [path for path in _parts_in_work(out) if is_whole(path)]


def _parts_in_work(out: Path) -> list[Path]:
    return [path for path in work_files(out, "tmp/part-*") if PART_NAME.match(path.name)]


def journaled(out: Path) -> set[str]:
    """Names of parts in the whole lines of all journals."""
    names = set()
    for journal in work_files(out, "journal.jsonl"):
        for line in _content(journal).split(b"\n"):
            try:
                names.add(orjson.loads(line)["name"])
            except (ValueError, KeyError, TypeError):
                continue
    return names


def unjournaled_parts(out: Path) -> list[str]:
    """Names in data/ that no journal knows."""
    return sorted({path.name for path in (out / "data").glob("*")} - journaled(out))


def torn_journals(out: Path) -> list[Path]:
    """Journals whose last line is cut."""
    return [path for path in work_files(out, "journal.jsonl") if not _is_json(_content(path).split(b"\n")[-1])]


def torn_spills(out: Path) -> list[Path]:
    """Spills whose last line is cut."""
    return [path for path in work_files(out, "spill/*.jsonl") if _content(path)[-1:] not in (b"", b"\n")]


def _content(path: Path) -> bytes:
    """The bytes of a file; none where another shard has removed it meanwhile."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line or b"{}")
    except ValueError:
        return False
    return True


def spilled_rows(out: Path) -> set[int]:
    """Rows that have a whole line in the spill of a part that is not committed."""
    rows: set[int] = set()
    for path in work_files(out, "spill/*.jsonl"):
        with suppress(ValueError):  # what follows a torn line is void
            for line in _content(path).split(b"\n")[:-1]:
                rows.add(orjson.loads(line)[0])
    return rows


def committed_rows(out: Path) -> set[int]:
    """Rows in data/."""
    rows: set[int] = set()
    for path in (out / "data").glob("*.parquet"):
        rows.update(pq.read_table(path, columns=["row_index"]).column(0).to_pylist())
    return rows


def shows(out: Path, point: str, path: Path) -> bool:
    """Whether the files show that a process died at the point (see AuditPoint) with `path` in hand."""
    if point == "part_write":
        return path in torn_parts(out)
    if point == "rename":
        return path in unnamed_parts(out) and not (out / "data" / path.name).exists()
    if point == "named":
        return path.name in unjournaled_parts(out)
    if point == "journal":
        return path in torn_journals(out)
    if point == "spill":
        return path in torn_spills(out)
    return True
