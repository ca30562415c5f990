"""What ends an output: end-of-sequence, stop ids, stop strings, length. Asked after every single token."""

from __future__ import annotations

from collections.abc import Sequence

from .request import FinishReason, Request


class StopChecker:
    """Decides after each appended token whether its request is done. Tokens after a stop are dropped by the caller."""

    def __init__(self, eos_token_ids: frozenset[int], token_bytes: Sequence[bytes] | None, max_model_len: int) -> None:
        """token_bytes maps token id -> bytes of text, empty for special tokens; None refuses stop strings."""
        self.eos_token_ids = eos_token_ids
        self.token_bytes = token_bytes
        self.max_model_len = max_model_len

    def check(self, request: Request) -> FinishReason | None:
        """Why the request ends with its last token, and its stop_reason set; None when it goes on."""
        params = request.sampling_params
        num_output = len(request.output_token_ids)
        token = request.output_token_ids[-1]
        is_eos = token in self.eos_token_ids and not params.ignore_eos
        if is_eos and request.grammar is not None:  # which has nothing else to say, whatever min_tokens asks for
            return FinishReason.STOP
        if num_output >= params.min_tokens:
            if is_eos:
                return FinishReason.STOP
            if token in params.stop_token_ids:
                request.stop_reason = str(token)
                return FinishReason.STOP
            if params.stop and (found := self._stop_string(request.output_token_ids, params.stop)) is not None:
                request.stop_reason = found
                return FinishReason.STOP
        if num_output >= params.max_tokens or request.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _stop_string(self, output: list[int], stops: tuple[str, ...]) -> str | None:
        """The stop string that the last token completes; the earliest in the text when it completes several."""
        patterns = [stop.encode() for stop in stops]
        newest = self._bytes(output[-1])
        reach = len(newest) + max(map(len, patterns)) - 1
        tail = newest
        for token in reversed(output[:-1]):
            if len(tail) >= reach:
                break
            tail = self._bytes(token) + tail
        found = []
        for stop, pattern in zip(stops, patterns, strict=True):
            # One that ended before the newest token was passed over on purpose: it came within min_tokens.
            start = max(0, len(tail) - len(newest) - len(pattern) + 1)
            if (at := tail.find(pattern, start)) >= 0:
                found.append((at, stop))
        return min(found, key=lambda hit: hit[0])[1] if found else None

    def _bytes(self, token: int) -> bytes:
        """Empty for ids past the tokenizer's: a model's vocabulary may be padded."""
        assert self.token_bytes is not None
        return self.token_bytes[token] if token < len(self.token_bytes) else b""
