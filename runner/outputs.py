"""Engine outputs to output rows: text, cut before a stop string, and the counts and reasons that go with it."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.request import FinishReason, Request, RequestOutput
from ..jobs.row_errors import ENGINE_ERROR, TIMEOUT
from ..jobs.schema import OutputRow
from .tokenizer import TextTokenizer

RowKey = tuple[str | None, tuple[str, ...]]
"""What an output needs to know of its row: the id and the stop strings."""

FAILED = {FinishReason.ERROR: ENGINE_ERROR, FinishReason.TIMEOUT: TIMEOUT}
"""Reasons that fail a row, and its error_code."""
MENDS = {ENGINE_ERROR: "", TIMEOUT: "; raise run.timeout_s or lower max_tokens"}
REASONS = {reason: "error" if reason in FAILED else reason.value for reason in FinishReason}


class OutputText:
    """Turns finished requests into rows. It remembers the rows under way, so memory is bounded by what is in flight.

    One thread calls `expect`, another `rows`.
    """

    def __init__(self, tokenizer: TextTokenizer, token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._under_way: dict[int, RowKey] = {}

    def expect(self, requests: Sequence[Request], ids: Sequence[str | None], start: int) -> None:
        """Hear of requests before they go to the engine; ids[i] is the id of row start + i."""
        under_way = self._under_way
        for request in requests:
            index = request.request_id
            under_way[index] = (ids[index - start], request.sampling_params.stop)

    def rows(self, outputs: Sequence[RequestOutput]) -> list[OutputRow]:
        """A row for each output, in the same order."""
        texts = self._tokenizer.decode_batch([output.token_ids for output in outputs])
        return [self._row(output, text) for output, text in zip(outputs, texts, strict=True)]

    def _row(self, output: RequestOutput, text: str) -> OutputRow:
        row_id, stops = self._under_way.pop(output.request_id)
        code = FAILED.get(output.finish_reason)
        if code is not None:
            return self._failed_row(output, row_id, code)
        if output.stop_reason is not None and output.stop_reason in stops:
            text = self._cut(text, output.stop_reason, output.token_ids)
        return OutputRow(
            output.request_id,
            row_id,
            text,
            REASONS[output.finish_reason],
            output.stop_reason,
            output.num_prompt_tokens,
            len(output.token_ids),
            output.token_ids if self._token_ids else None,
            output.logprobs,
        )

    def _failed_row(self, output: RequestOutput, row_id: str | None, code: str) -> OutputRow:
        """Without the text: what a row has when its time is over depends on the machine."""
        reason = " ".join((output.error or "the engine gave no reason").split())
        return OutputRow(
            output.request_id,
            row_id,
            finish_reason=REASONS[output.finish_reason],
            prompt_tokens=output.num_prompt_tokens,
            output_tokens=len(output.token_ids),
            error_code=code,
            error_message=reason + MENDS[code],
        )

    def _cut(self, text: str, stop: str, token_ids: Sequence[int]) -> str:
        """The text before the stop string that the last token completed; earlier ones did not count (min_tokens)."""
        before = self._tokenizer.decode_batch([token_ids[:-1]])[0].rstrip("\ufffd")
        at = text.find(stop, max(0, len(before) - len(stop) + 1))
        return text if at < 0 else text[:at]
