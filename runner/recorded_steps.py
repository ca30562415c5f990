"""The steps of a job that has run, read back from metrics/steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import lcm

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..jobs.errors import StorageError
from ..jobs.folder import STEPS, STEPS_NAME
from ..jobs.store import Store, storage_errors

Float64 = NDArray[np.float64]

SECONDS = ("policy_s", "draft_s", "verify_s", "other_s")
"""Columns that make up a step's time."""
MAX_BLOCKS = 1_000_000
"""Largest KV cache whose size a share of it still tells exactly."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The N steps of a shard, attempt after attempt."""

    columns: Mapping[str, Float64]
    """Name as in STEP_SCHEMA -> [N]."""

    def __getitem__(self, name: str) -> Float64:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["attempt"])

    @property
    def seconds(self) -> Float64:
        """[N] of whole steps."""
        return sum((self[name] for name in SECONDS), np.zeros(len(self)))

    @property
    def num_attempts(self) -> int:
        """Attempts that took any step."""
        return len(np.unique(self["attempt"]))

    def num_kv_blocks(self) -> int | None:
        """Blocks of the KV cache: the smallest number of which every recorded usage is a whole share; None where no
        share was recorded. Of the attempt with the most steps, since each sizes its cache anew and a short one shows
        few shares."""
        attempts, counts = np.unique(self["attempt"], return_counts=True)
        if not len(attempts):
            return None
        usage = np.unique(self["kv_usage"][self["attempt"] == attempts[counts.argmax()]]).tolist()
        blocks = 1
        for share in [share for share in usage if 0 < share < 1]:
            blocks = lcm(blocks, Fraction(share).limit_denominator(MAX_BLOCKS).denominator)
            if blocks > MAX_BLOCKS:
                return None
        return blocks if blocks > 1 else None


def read_steps(store: Store, names: Sequence[str]) -> Iterator[tuple[int, Steps]]:
    """Each shard that took any step, and its steps in the order in which they ran.

    names: the columns to read, besides attempt; one that an older version did not write, for some parts or all, is 0.
    StorageError where a file cannot be read.
    """
    found = ((match, name) for name in store.list(STEPS) if (match := STEPS_NAME.fullmatch(name)))
    parts = sorted((*map(int, match.groups()), name) for match, name in found)
    for shard, files in groupby(parts, key=lambda part: part[0]):
        tables = [_read_part(store, f"{STEPS}/{file[-1]}", names) for file in files]
        steps = Steps({name: np.concatenate([table[name] for table in tables]) for name in tables[0]})
        if len(steps):
            yield shard, steps


def _read_part(store: Store, name: str, names: Sequence[str]) -> dict[str, Float64]:
    path = store.path(name)
    try:
        with storage_errors(path), store.open(name) as file:
            part = pq.ParquetFile(file)
            known = ["attempt", *(column for column in names if column in part.schema_arrow.names)]
            table = part.read(known, use_threads=False)
        # Without an attempt it is none of ours, and a KeyError.
        found = {column: table[column].to_numpy().astype(np.float64) for column in known}
        return {column: np.zeros(len(table)) for column in names} | found
    except (FileNotFoundError, KeyError, pa.ArrowException) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StorageError(f"{path} cannot be read ({text}); move it away to do without its steps") from error
