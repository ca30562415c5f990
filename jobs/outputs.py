"""Rows to part files: rows come in any order, parts are committed whole and in their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import pyarrow as pa

from .. import __version__
from .counts import RowCounts
from .ledger import Ledger
from .parts import FailedRow, Part, part_name, write_part
from .retry import Retry
from .schema import OutputRow, output_schema, result_schema, source_schema
from .spill import PartSpill, ResultCodec


class OutputWriter:
    """Writes a shard's rows under an open ledger.

    The reader calls expect() for each batch of rows that range_done() did not let it skip; whoever finishes rows calls
    write() with those that is_done() does not know yet. A part is committed by the call that completes it. Calls may
    come from several threads. OSErrors come out as StorageError; what is written until then is kept.

    schema: the passthrough columns, as in the batches that expect() gets.
    metadata: what the footer of each part says besides its own.
    """

    def __init__(
        self,
        ledger: Ledger,
        schema: pa.Schema,
        token_ids: bool = False,
        logprobs: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if schema.names[:1] == ["row_index"] and schema.names[-1:] == ["error_message"]:
            raise ValueError("schema is that of the passthrough columns, not of the output")
        self.schema = output_schema(schema, token_ids, logprobs)
        self._ledger = ledger
        self._ranges = ledger.ranges
        self._source_schema = source_schema(schema)
        self._results = result_schema(token_ids, logprobs).names
        self._codec = ResultCodec(token_ids, logprobs)
        self._metadata = {**(metadata or {}), "specrun.version": __version__}
        self._mutex = threading.RLock()
        self._open: dict[int, PartSpill] = {}
        self._committed = RowCounts()
        for part in ledger.parts.values():
            self._committed.update(part.counts)
        self._take_up_spill()

    @property
    def counts(self) -> RowCounts:
        """Rows that are done in this and earlier attempts, as they stand on disk."""
        with self._mutex:
            counts = RowCounts()
            counts.update(self._committed)
            for spill in self._open.values():
                counts.update(spill.counts)
            for sequence, part in self._ledger.reopened.items():
                if sequence not in self._open:
                    counts.update(part.counts)
            return counts

    def is_done(self, row_index: int) -> bool:
        """Whether a row has its result, in a committed part or in the spill, and need not run."""
        sequence = self._ranges.sequence(row_index)
        spill = self._open.get(sequence)
        if spill is None and sequence in self._ledger.reopened:
            with self._mutex:
                spill = self._spill(sequence)
        return spill.is_done(row_index) if spill is not None else sequence in self._ledger.parts

    def range_done(self, start: int, stop: int) -> bool:
        """Whether all rows [start, stop) are in committed parts, so that the reader may skip them.

        Rows in the spill do not count: their passthrough columns are read again.
        """
        if start >= stop:
            return True
        first, last = self._ranges.sequence(start), self._ranges.sequence(stop - 1)
        return all(sequence in self._ledger.parts for sequence in range(first, last + 1))

    def expect(self, batch_start: int, ids: Sequence[str | None], passthrough: pa.RecordBatch) -> None:
        """Announces rows [batch_start, batch_start + len(ids)) in input order, before any of them is written.

        passthrough: one row an id, the columns of `schema`. Raises ValueError for rows that are not the shard's.
        """
        if batch_start < self._ranges.start or batch_start + len(ids) > self._ranges.stop:
            raise ValueError(
                f"rows {batch_start} to {batch_start + len(ids) - 1} are not all in the shard's "
                f"{self._ranges.start} to {self._ranges.stop - 1}"
            )
        columns = [_string_array(ids), *passthrough.columns]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._source_schema)
        with self._mutex:
            offset = 0
            while offset < len(ids):
                row = batch_start + offset
                sequence = self._ranges.sequence(row)
                start, stop = self._ranges.rows(sequence)
                piece = batch.slice(offset, stop - row)
                self._expect_in_part(sequence, row - start, piece)
                offset += piece.num_rows

    def _expect_in_part(self, sequence: int, position: int, batch: pa.RecordBatch) -> None:
        if sequence in self._ledger.parts:
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
        sequence_of = self._ranges.sequence
        with self._mutex:
            rows = sorted(rows, key=lambda row: row.row_index)
            for sequence, group in groupby(rows, key=lambda row: sequence_of(row.row_index)):
                if sequence in self._ledger.parts:
                    raise ValueError(f"a row of {self._name(sequence)} is written after its commit")
                spill = self._open.get(sequence)
                if spill is None:
                    raise ValueError(f"a row of {self._name(sequence)} was never read")
                spill.append(list(group))
                self._commit_if_full(spill)

    def checkpoint(self) -> None:
        """Makes every row written so far survive a power cut. TemporaryError when another process has taken over."""
        with self._mutex:
            self._ledger.check()
            for spill in self._open.values():
                spill.sync()

    def secure(self) -> None:
        """As checkpoint(), at the end of an attempt: on an object store the spill goes there too."""
        with self._mutex:
            self.checkpoint()
            self._ledger.folder.save_spill()

    def finish(self) -> None:
        """Makes sure that every row is in a committed part; RuntimeError when one is missing.

        The ledger's complete() then declares the shard done.
        """
        with self._mutex:
            if self._ranges.start == self._ranges.stop and self._ranges.num_parts and not self._ledger.parts:
                self._commit(self._spill(0))  # a job without rows: one part that has the columns
            for sequence, spill in sorted(self._open.items()):
                missing = spill.missing()
                raise RuntimeError(
                    f"{self._name(sequence)} is not whole: {spill.num_expected} rows read, {spill.num_done} done, "
                    f"{len(missing)} without result ({', '.join(map(str, missing[:5]))})"
                )

    def failed_rows(self) -> Iterator[FailedRow]:
        """Each row that has failed so far, in input order; rows of open parts come without their id."""
        parts, store = self._ledger.parts, self._ledger.output.store
        committed = {**parts, **self._ledger.reopened}
        for sequence in sorted({*committed, *self._open}):
            if sequence in self._open:
                yield from ((index, None, code, message) for index, code, message in self._open[sequence].failed())
            else:
                yield from committed[sequence].failed_rows(store)

    def _name(self, sequence: int) -> str:
        return part_name(sequence, self._ledger.shard.index)

    def _spill(self, sequence: int) -> PartSpill:
        spill = self._open.get(sequence)
        if spill is None:
            spill = PartSpill(self._ledger.folder.spill, sequence, self._ranges.rows(sequence), self._codec)
            if (part := self._ledger.reopened.get(sequence)) is not None and self._ledger.retry is not None:
                self._restore(spill, part, self._ledger.retry)
            self._open[sequence] = spill
        return spill

    def _commit_if_full(self, spill: PartSpill) -> None:
        if spill.is_full:
            self._commit(spill)

    def _commit(self, spill: PartSpill) -> None:
        part = Part(
            shard=self._ledger.shard.index,
            sequence=spill.sequence,
            row_start=spill.row_start,
            row_stop=spill.row_stop,
            fingerprint=self._ledger.index.fingerprint_hash,
            attempt=self._ledger.attempt,
            counts=spill.counts,
        )
        tmp = self._ledger.folder.tmp / part.name
        part = write_part(tmp, part, self.schema, self._metadata, spill.tables(self.schema))
        self._ledger.commit(part, tmp)
        self._committed.update(part.counts)
        del self._open[spill.sequence]
        spill.remove()

    def _take_up_spill(self) -> None:
        """Rows that an earlier attempt finished in parts that it did not commit."""
        for path in sorted(self._ledger.folder.spill.glob("part-*.jsonl")):
            sequence = int(path.stem.removeprefix("part-"))
            if sequence in self._ledger.parts:  # a crash between commit and removal
                PartSpill(self._ledger.folder.spill, sequence, self._ranges.rows(sequence), self._codec).remove()
            else:
                self._spill(sequence)

    def _restore(self, spill: PartSpill, part: Part, retry: Retry) -> None:
        """Takes the rows that need not run again over from the part that stands in data/."""
        for batch in part.batches(self._ledger.output.store, ["row_index", *self._results]):
            rows = [OutputRow(id=None, **values) for values in batch.to_pylist()]
            kept = [row for row in rows if not retry.chooses(row.error_code) and not spill.is_done(row.row_index)]
            if kept:
                spill.restore(kept)


def _string_array(values: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:  # lone surrogates of a broken source
        return pa.array([v if v is None else v.encode("utf-8", "replace").decode() for v in values], pa.string())
