"""Rows to part files: rows come in any order, parts are committed whole and in their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby

import pyarrow as pa

from .. import __version__
from .counts import RowCounts
from .errors import OutputError
from .ledger import Ledger
from .parts import Part, part_name, write_part
from .schema import OutputRow, output_schema, source_schema
from .spill import PartSpill, ResultCodec


class OutputWriter:
    """Writes a job's rows under an open ledger.

    The reader calls expect() for each batch of rows that range_done() did not let it skip; whoever finishes rows calls
    write() with those that is_done() does not know yet. A part is committed by the call that completes it. Calls may
    come from several threads. OSErrors come out as StorageError; what is written until then is kept.

    schema: the passthrough columns, as in the batches that expect() gets.
    """

    def __init__(
        self,
        ledger: Ledger,
        schema: pa.Schema,
        rows_per_part: int,
        token_ids: bool = False,
        logprobs: bool = False,
        *,
        job: str = "",
        model: str = "",
    ) -> None:
        if schema.names[:1] == ["row_index"] and schema.names[-1:] == ["error_message"]:
            raise ValueError("schema is that of the passthrough columns, not of the output")
        self.schema = output_schema(schema, token_ids, logprobs)
        self._ledger = ledger
        self._rows_per_part = rows_per_part
        self._source_schema = source_schema(schema)
        self._codec = ResultCodec(token_ids, logprobs)
        self._metadata = {"specrun.job": job, "specrun.model": model, "specrun.version": __version__}
        self._mutex = threading.RLock()
        self._open: dict[int, PartSpill] = {}
        self._committed = RowCounts()
        self._check_parts()
        self._take_up_spill()

    @property
    def counts(self) -> RowCounts:
        """Rows that are done in this and earlier attempts, as they stand on disk."""
        with self._mutex:
            counts = RowCounts()
            for each in (self._committed, *(spill.counts for spill in self._open.values())):
                counts.update(each)
            return counts

    @property
    def num_committed(self) -> int:
        """Rows in committed parts."""
        return self._committed.num_rows

    def is_done(self, row_index: int) -> bool:
        """Whether a row has its result, in a committed part or in the spill, and need not run."""
        sequence = row_index // self._rows_per_part
        spill = self._open.get(sequence)
        if spill is not None:
            return spill.is_done(row_index)
        part = self._ledger.parts.get(sequence)
        return part is not None and row_index < part.row_stop

    def range_done(self, start: int, stop: int) -> bool:
        """Whether all rows [start, stop) are in committed parts, so that the reader may skip them.

        Rows in the spill do not count: their passthrough columns are read again.
        """
        if start >= stop:
            return True
        parts = self._ledger.parts
        first, last = start // self._rows_per_part, (stop - 1) // self._rows_per_part
        return all(sequence in parts for sequence in range(first, last + 1)) and stop <= parts[last].row_stop

    def expect(self, batch_start: int, ids: Sequence[str | None], passthrough: pa.RecordBatch) -> None:
        """Announces rows [batch_start, batch_start + len(ids)) in input order, before any of them is written.

        passthrough: one row an id, the columns of `schema`.
        """
        columns = [_string_array(ids), *passthrough.columns]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._source_schema)
        with self._mutex:
            offset = 0
            while offset < len(ids):
                sequence, position = divmod(batch_start + offset, self._rows_per_part)
                piece = batch.slice(offset, self._rows_per_part - position)
                self._expect_in_part(sequence, position, piece)
                offset += piece.num_rows

    def _expect_in_part(self, sequence: int, position: int, batch: pa.RecordBatch) -> None:
        part = self._ledger.parts.get(sequence)
        if part is not None:
            if position + batch.num_rows > part.num_rows:
                raise OutputError(
                    f"{part.name} ends at row {part.row_stop} and the input goes on; set output.if_exists: overwrite"
                )
            return
        spill = self._spill(sequence)
        if position != spill.num_expected:
            raise ValueError(
                f"expected row {spill.row_start + spill.num_expected} next, got {spill.row_start + position}"
            )
        spill.expect(batch)
        self._commit_if_full(spill)

    def write(self, rows: Sequence[OutputRow]) -> None:
        """Takes finished rows in any order. The id in the output is the one that expect() got."""
        per_part = self._rows_per_part
        with self._mutex:
            rows = sorted(rows, key=lambda row: row.row_index)
            for sequence, group in groupby(rows, key=lambda row: row.row_index // per_part):
                if sequence in self._ledger.parts:
                    raise ValueError(f"a row of {part_name(sequence)} is written after its commit")
                spill = self._open.get(sequence)
                if spill is None:
                    raise ValueError(f"a row of {part_name(sequence)} was never read")
                spill.append(list(group))
                self._commit_if_full(spill)

    def checkpoint(self) -> None:
        """Makes every row written so far survive a power cut. TemporaryError when another process has taken over."""
        with self._mutex:
            self._ledger.check()
            for spill in self._open.values():
                spill.sync()

    def finish(self, num_rows: int) -> None:
        """Commits the last, short part once the input is known to have `num_rows` rows and all are written.

        Raises RuntimeError when a row is missing. The ledger's complete() then declares the job done.
        """
        with self._mutex:
            count, rest = divmod(num_rows, self._rows_per_part)
            if (rest or not num_rows) and count not in self._ledger.parts:
                spill = self._spill(count)
                if spill.num_expected == spill.num_done == rest:
                    self._commit(spill)
            self._check_all_there(num_rows)

    def close(self) -> None:
        """Gives up the lock; always safe. Rows of open parts stay in the spill for the next attempt."""
        self._ledger.close()

    def _check_all_there(self, num_rows: int) -> None:
        for sequence, spill in sorted(self._open.items()):
            missing = spill.missing(max(0, min(self._rows_per_part, num_rows - spill.row_start)))
            raise RuntimeError(
                f"{part_name(sequence)} is not whole: {spill.num_expected} rows read, {spill.num_done} done, "
                f"{len(missing)} without result ({', '.join(map(str, missing[:5]))})"
            )
        written = sum(part.num_rows for part in self._ledger.parts.values())
        if written != num_rows:
            raise RuntimeError(f"{written} rows are in data/, the input has {num_rows}")

    def _spill(self, sequence: int) -> PartSpill:
        spill = self._open.get(sequence)
        if spill is None:
            spill = PartSpill(self._ledger.folder.spill, sequence, self._rows_per_part, self._codec)
            self._open[sequence] = spill
        return spill

    def _commit_if_full(self, spill: PartSpill) -> None:
        if spill.num_expected == spill.num_done == self._rows_per_part:
            self._commit(spill)

    def _commit(self, spill: PartSpill) -> None:
        num_rows = spill.num_done
        part = Part(
            sequence=spill.sequence,
            row_start=spill.row_start,
            row_stop=spill.row_start + num_rows,
            num_bytes=0,
            fingerprint=self._ledger.fingerprint_hash,
            counts=spill.counts,
        )
        tmp = self._ledger.folder.tmp / part.name
        part = write_part(tmp, part, self.schema, self._metadata, spill.tables(self.schema, num_rows))
        self._ledger.commit(part, tmp)
        self._committed.update(part.counts)
        del self._open[spill.sequence]
        spill.remove()

    def _check_parts(self) -> None:
        last = max(self._ledger.parts, default=0)
        for sequence, part in self._ledger.parts.items():
            short = part.num_rows < self._rows_per_part
            if part.row_start != sequence * self._rows_per_part or part.num_rows > self._rows_per_part:
                raise OutputError(
                    f"{part.name} holds rows {part.row_start}..{part.row_stop}, which is not its range; "
                    "set output.if_exists: overwrite, or choose another output.path"
                )
            if short and sequence != last:
                raise OutputError(f"{part.name} is short but not the last part; set output.if_exists: overwrite")
            self._committed.update(part.counts)

    def _take_up_spill(self) -> None:
        """Rows that an earlier attempt finished in parts that it did not commit."""
        for path in sorted(self._ledger.folder.spill.glob("part-*.jsonl")):
            sequence = int(path.stem.removeprefix("part-"))
            spill = PartSpill(self._ledger.folder.spill, sequence, self._rows_per_part, self._codec)
            if sequence in self._ledger.parts:  # a crash between commit and removal
                spill.remove()
            else:
                self._open[sequence] = spill


def _string_array(values: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:  # lone surrogates of a broken source
        return pa.array([v if v is None else v.encode("utf-8", "replace").decode() for v in values], pa.string())
