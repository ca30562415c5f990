"""A pipeline on the stub engine, with prompts from memory and rows kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from specrun.engine.testing import StubEngine, WordTokenizer
from specrun.engine.trace import StepRecord
from specrun.jobs.prompts import PromptBatch, PromptRow
from specrun.jobs.schema import OutputRow
from specrun.jobs.spec import JobSpec
from specrun.runner.conversation import PromptText
from specrun.runner.outputs import OutputText
from specrun.runner.pipeline import Ending, Pipeline
from specrun.runner.requests import RequestBuilder
from specrun.runner.sampling import RowSampling
from specrun.runner.stop import StopRequest

BATCH_ROWS = 512


class Rows:
    """In place of the writer: rows in the order in which they were written."""

    def __init__(self) -> None:
        self.written: list[OutputRow] = []
        self.num_expected = 0

    def expect(self, start: int, ids: Sequence[str | None], passthrough: pa.RecordBatch) -> None:
        assert start == self.num_expected
        self.num_expected += len(ids)

    def write(self, rows: Sequence[OutputRow]) -> None:
        self.written += rows

    @property
    def order(self) -> list[int]:
        """Row indexes in the order in which the rows were written."""
        return [row.row_index for row in self.written]

    def by_index(self) -> list[OutputRow]:
        """The rows in input order."""
        return sorted(self.written, key=lambda row: row.row_index)


class StubPipeline:
    """Runs prompts; `options` are StubEngine's, with words in place of token ids for fail_on, raise_on and slow_on."""

    def __init__(self, order: str = "auto", abort_after: int = 100, max_tokens: int = 16, **options: Any) -> None:
        self.tokenizer = WordTokenizer()
        for name in ("fail_on", "raise_on", "slow_on"):
            if name in options:
                options[name] = self.tokenizer.token_id(options[name])
        self.engine = StubEngine(**options)
        self.rows = Rows()
        self.num_read = 0
        self.on_step: Callable[[StepRecord], None] = lambda record: None
        self.stop = StopRequest(0.0, None, lambda: 0.0)
        self._order, self._abort_after, self._max_tokens = order, abort_after, max_tokens

    def run(self, prompts: Sequence[str | None], is_done: Callable[[int], bool] | None = None) -> Ending:
        """Row i has prompts[i]; None is a row that cannot be read."""
        spec = JobSpec.model_validate({"model": {"path": "m"}, "input": {"path": "i"}, "output": {"path": "o"}})
        requests = RequestBuilder(
            self.tokenizer,
            PromptText(spec, self.tokenizer),
            RowSampling({"max_tokens": self._max_tokens}),
            "error",
            self.engine.max_model_len,
            is_done,
        )
        text = OutputText(self.tokenizer, token_ids=True)
        writer: Any = self.rows
        pipeline = Pipeline(
            requests, self.engine, text, writer, self.stop, self._abort_after, self.on_step, self._order
        )
        return pipeline.run(self._batches(prompts))

    def _batches(self, prompts: Sequence[str | None]) -> Iterator[PromptBatch]:
        for start in range(0, len(prompts), BATCH_ROWS):
            texts = prompts[start : start + BATCH_ROWS]
            rows = [
                PromptRow(i, None, text, None, {}, *(("null_prompt", "null") if text is None else (None, None)))
                for i, text in enumerate(texts, start)
            ]
            self.num_read += len(rows)
            yield PromptBatch(start, rows, pa.RecordBatch.from_pylist([{}] * len(rows)))
