"""Running failed rows again: which parts, since which attempt. Survives a crash in the middle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import orjson

from .errors import StorageError
from .folder import ShardFolder
from .parts import Part


@dataclass(frozen=True, slots=True)
class Retry:
    """A retry under way. A part of it is through once an attempt from `attempt` on has committed it again.

    Until then the part stays in data/ as it was: readers see the old rows or the new ones.
    """

    attempt: int
    sequences: list[int]
    codes: list[str]
    """Only rows with these error codes; empty: all failed rows."""

    @classmethod
    def begin(cls, folder: ShardFolder, parts: Iterable[Part], attempt: int, codes: Iterable[str]) -> Retry:
        """Chooses the parts that hold such rows and writes it down."""
        codes = sorted(codes)
        sequences = [part.sequence for part in parts if _num_failed(part, codes)]
        retry = cls(attempt, sorted(sequences), codes)
        folder.write_json(folder.retry, asdict(retry))
        return retry

    @classmethod
    def read(cls, folder: ShardFolder) -> Retry | None:
        """None where none is under way."""
        content = folder.store.read(folder.retry)
        if content is None:
            return None
        try:
            return cls(**orjson.loads(content))
        except (ValueError, TypeError) as error:
            path = folder.store.path(folder.retry)
            raise StorageError(f"{path} is damaged ({error}); remove it and run `specrun retry` again") from error

    def reopens(self, part: Part) -> bool:
        """Whether the part is still to be done again."""
        return part.sequence in self.sequences and part.attempt < self.attempt

    def chooses(self, error_code: str | None) -> bool:
        """Whether a row with this outcome runs again."""
        return error_code is not None and (not self.codes or error_code in self.codes)

    def end(self, folder: ShardFolder) -> None:
        """Every part is through."""
        folder.store.delete(folder.retry)


def _num_failed(part: Part, codes: list[str]) -> int:
    if not codes:
        return part.counts.num_failed
    return sum(part.counts.error_codes.get(code, 0) for code in codes)
