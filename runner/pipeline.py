"""The three threads of a running job: one reads and tokenises, the main one runs the engine, one writes.

Lists of rows move between them through bounded channels, never single rows. When one of them fails the others end:
at once where the writer fails, after what was read has run where the reader does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from ..engine.request import Request, RequestOutput
from ..engine.trace import EngineStats, StepRecord
from ..jobs.outputs import OutputWriter
from ..jobs.prompts import PromptBatch
from .channel import Channel, Closed
from .ordering import RequestWindow
from .outputs import FAILED, OutputText
from .requests import RequestBatch, RequestBuilder
from .row_lengths import RowLengths
from .stop import GraceOver, StopRequest

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter

READ_AHEAD_BATCHES = 4
UNWRITTEN_ITEMS = 16
OUTPUT_ROWS = 512
"""Outputs go to the writer in lists of this many, or"""
OUTPUT_INTERVAL_S = 0.5
"""what has come since then."""
MAX_FAILURE_RUNS = 1 << 16
"""Ends of runs of failed rows that are kept in mind; the oldest are forgotten first."""
POLL_S = 0.002
"""How long the engine may wait for the reader in a step."""


class JobEngine(Protocol):
    """What a job needs of an engine."""

    stats: EngineStats
    on_step: Callable[[StepRecord], None] | None
    max_model_len: int
    device_name: str
    dtype_name: str
    max_num_seqs: int

    @property
    def drafter(self) -> Drafter | None:
        """Where its drafts come from; None where it has none."""
        ...

    def run(self, requests: Iterable[Request | None]) -> Iterator[RequestOutput]:
        """Outputs as they finish; draws requests as capacity frees up. None: nothing is ready yet."""
        ...


class Ending(StrEnum):
    """How a run of the pipeline ended, short of an error."""

    DONE = "done"
    ABORTED = "aborted"
    PREEMPTED = "preempted"


class _Aborted(Exception):
    """Too many failed rows one after another."""


class FailureRun:
    """Looks for failed rows that follow one another in the input, in whatever order and thread they are told.

    Running order would not do: rows that fail for the same reason, such as their length, run side by side.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._length: OrderedDict[int, int] = OrderedDict()  # first and last row of each run of failures -> rows in it
        self._mutex = threading.Lock()

    def add(self, row_index: int) -> None:
        """One more failed row; raises _Aborted when it makes a run as long as the limit."""
        with self._mutex:
            before, after = self._length.pop(row_index - 1, 0), self._length.pop(row_index + 1, 0)
            length = before + 1 + after
            self._length[row_index - before] = self._length[row_index + after] = length
            while len(self._length) > MAX_FAILURE_RUNS:
                self._length.popitem(last=False)
        if length >= self._limit:
            raise _Aborted


class Pipeline:
    """Runs prompt batches through an engine into a writer, once."""

    def __init__(
        self,
        builder: RequestBuilder,
        engine: JobEngine,
        text: OutputText,
        writer: OutputWriter,
        stop: StopRequest,
        abort_after: int,
        on_step: Callable[[StepRecord], None],
        order: str = "input",
        by_group: bool = False,
    ) -> None:
        """order: `run.order` of the job, auto or input. by_group: auto runs the rows of a group together."""
        self._builder = builder
        self._engine = engine
        self._text = text
        self._writer = writer
        self._stop = stop
        self._failures = FailureRun(abort_after)
        self._on_step = on_step
        self.lengths = RowLengths()
        """Of the rows that this run has read and finished."""
        self._window = RequestWindow(by_group, self.lengths) if order == "auto" else None
        self._requests: Channel[Sequence[Request]] = Channel(READ_AHEAD_BATCHES)
        self._unwritten: Channel[RequestBatch | list[RequestOutput]] = Channel(UNWRITTEN_ITEMS)
        self._errors: list[BaseException] = []
        self._is_writing = True
        self._aborted = False
        self._all_read = False
        """The reader came to the end of the input."""
        self._all_admitted = False
        """The engine has drawn every request of it."""
        self._all_answered = False
        """And has finished them."""

    def run(self, batches: Iterable[PromptBatch]) -> Ending:
        """Run to the end of the batches or until the stop request; raises the first error of any thread.

        Whatever ends it, everything that the engine finished has been handed to the writer.
        """
        reader = threading.Thread(target=self._guard, args=(lambda: self._read(batches),), name="specrun-reader")
        writer = threading.Thread(target=self._guard, args=(self._write,), name="specrun-writer")
        reader.start()
        writer.start()
        try:
            self._drive()
        except (GraceOver, Closed):
            pass  # stopped, which is told below; or the writer failed and left its error
        except _Aborted:
            self._aborted = True
        finally:
            self._requests.cancel()
            reader.join()
            self._unwritten.close()
            writer.join()
        if self._errors:
            raise self._errors[0]
        if self._aborted:
            return Ending.ABORTED
        return Ending.DONE if self._all_answered else Ending.PREEMPTED

    def _drive(self) -> None:
        """The engine's side, in the caller's thread."""
        outputs: list[RequestOutput] = []
        flushed = monotonic()
        self._engine.on_step = self._after_step
        try:
            for output in self._engine.run(self._admit()):
                outputs.append(output)
                self.lengths.add(output)
                if output.finish_reason in FAILED:
                    self._failures.add(output.request_id)
                if len(outputs) >= OUTPUT_ROWS or monotonic() - flushed > OUTPUT_INTERVAL_S:
                    self._unwritten.put(outputs)
                    outputs, flushed = [], monotonic()
            self._all_answered = self._all_admitted
        finally:
            self._engine.on_step = None
            if outputs:
                self._unwritten.put(outputs)

    def _admit(self) -> Iterator[Request | None]:
        """Requests for the engine to draw, until the reader is through or a stop is asked for.

        None where the reader has nothing ready: the engine then goes on with what it has.
        """
        stop = self._stop
        while not stop.poll():
            try:
                requests = self._requests.get(POLL_S)
            except TimeoutError:
                yield None
                continue
            except Closed:
                self._all_admitted = self._all_read
                return
            for request in requests:
                if stop.reason is not None:
                    return
                yield request

    def _after_step(self, record: StepRecord) -> None:
        if not self._is_writing:
            raise Closed
        self._on_step(record)
        self._stop.check()

    def _read(self, batches: Iterable[PromptBatch]) -> None:
        try:
            for batch in batches:
                if self._requests.is_closed:
                    return
                prepared = self._builder.build(batch)
                self._text.expect(prepared.requests, prepared.ids, prepared.start)
                self.lengths.expect(prepared.requests, len(prepared.errors))
                self._unwritten.put(prepared)
                self._hand_on([prepared.requests] if self._window is None else self._window.add(prepared.requests))
                for row in prepared.errors:
                    self._failures.add(row.row_index)
            self._all_read = True
        except _Aborted:
            self._aborted = True
        finally:
            try:  # whatever ended the reading, what was read is run
                self._hand_on([] if self._window is None else self._window.flush())
            finally:
                self._requests.close()

    def _hand_on(self, lists: Iterable[Sequence[Request]]) -> None:
        for requests in lists:
            self._requests.put(requests)

    def _write(self) -> None:
        try:
            while True:
                item = self._unwritten.get()
                if isinstance(item, RequestBatch):
                    self._writer.expect(item.start, item.ids, item.passthrough)
                    self._writer.write(item.errors)
                else:
                    self._writer.write(self._text.rows(item))
        finally:
            # After the last item this changes nothing; after an error it ends those who wait to hand over more.
            self._is_writing = False
            self._unwritten.cancel()

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work and keep its error for the main thread."""
        try:
            work()
        except Closed:
            pass
        except BaseException as exc:
            self._errors.append(exc)
