"""Rows to requests: chat template, token ids, sampling parameters and what to do with prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from ..engine.grammar import Grammar
from ..engine.request import InvalidParameter, Request, SamplingParams
from ..jobs.prompts import PromptBatch, PromptRow
from ..jobs.row_errors import (
    EMPTY_PROMPT,
    ENCODING_ERROR,
    INVALID_PARAMS,
    PROMPT_TOO_LONG,
    TEMPLATE_ERROR,
    UNSUPPORTED_PARAMETER,
    RowFailure,
)
from ..jobs.schema import OutputRow
from .conversation import PromptText
from .grammar import FormatGrammar
from .grouping import RequestGroups
from .sampling import Compile, RowSampling, UnsupportedParameter
from .tokenizer import TextTokenizer


@dataclass(slots=True)
class RequestBatch:
    """A batch of rows on its way to the engine: requests for the good ones, output rows for the bad ones."""

    start: int
    """Global index of the first row."""
    ids: list[str | None]
    passthrough: pa.RecordBatch
    requests: list[Request]
    errors: list[OutputRow]
    """In input order."""


class RequestBuilder:
    """Turns whole batches of rows into requests, with one call of the tokenizer each."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        text: PromptText,
        sampling: RowSampling,
        overflow: str,
        max_model_len: int,
        is_done: Callable[[int], bool] | None = None,
        compile: Compile | None = None,
        groups: RequestGroups | None = None,
    ) -> None:
        """`is_done` tells of rows that an earlier attempt finished; None when there are none.

        `compile` makes the grammar of a response format, for each request one of its own; without it a row that asks
        for a format fails. `groups` tells the group of each request; without it there is one group.
        """
        self._tokenizer = tokenizer
        self._text = text
        self._sampling = sampling
        self._overflow = overflow
        self._max_model_len = max_model_len
        self._is_done = is_done
        self._compile = compile
        self._groups = groups

    def build(self, batch: PromptBatch) -> RequestBatch:
        """Requests and error rows for those rows of a batch that are not done yet."""
        result = RequestBatch(batch.start, [row.id for row in batch.rows], batch.passthrough, [], [])
        rows: list[PromptRow] = []
        texts: list[str] = []
        for row in batch.rows:
            if self._is_done is not None and self._is_done(row.row_index):
                continue
            if row.error_code is not None:
                result.errors.append(error_row(row, row.error_code, row.error_message or row.error_code))
                continue
            try:
                texts.append(self._text.render(row))
                rows.append(row)
            except RowFailure as exc:
                result.errors.append(error_row(row, exc.code, str(exc)))
            except Exception as exc:  # a template is the user's code and raises what it likes
                result.errors.append(error_row(row, TEMPLATE_ERROR, f"{type(exc).__name__}: {exc}"))
        for row, ids in zip(rows, self._encode(rows, texts), strict=True):
            try:
                result.requests.append(self._request(row, ids))
            except RowFailure as exc:
                result.errors.append(error_row(row, exc.code, str(exc), len(ids or ())))
        if self._groups is not None:
            self._groups.assign(result.requests, {row.row_index: row.group for row in rows})
        return result

    def _encode(self, rows: list[PromptRow], texts: list[str]) -> list[list[int] | None]:
        """Token ids of each text; None for one that cannot be encoded."""
        is_chat = [self._text.is_chat(row) for row in rows]
        if len(set(is_chat)) < 2:
            return self._encode_alike(texts, not any(is_chat))
        chats = iter(self._encode_alike([text for text, chat in zip(texts, is_chat, strict=True) if chat], False))
        others = iter(self._encode_alike([text for text, chat in zip(texts, is_chat, strict=True) if not chat], True))
        return [next(chats if chat else others) for chat in is_chat]

    def _encode_alike(self, texts: list[str], add_special_tokens: bool) -> list[list[int] | None]:
        try:
            return list(self._tokenizer.encode_batch(texts, add_special_tokens))
        except Exception:  # one bad text fails the whole batch, so look for it one by one
            found: list[list[int] | None] = []
            for text in texts:
                try:
                    found += self._tokenizer.encode_batch([text], add_special_tokens)
                except Exception:
                    found.append(None)
            return found

    def _request(self, row: PromptRow, ids: list[int] | None) -> Request:
        if ids is None:
            raise RowFailure(ENCODING_ERROR, "the prompt is not valid Unicode text")
        if not ids:
            raise RowFailure(EMPTY_PROMPT, "the prompt has no tokens")
        try:
            params = self._sampling.params(row.row_index, row.id, row.params)
        except UnsupportedParameter as exc:
            raise RowFailure(UNSUPPORTED_PARAMETER, str(exc)) from exc
        except (InvalidParameter, OverflowError) as exc:  # OverflowError: a whole number that no float holds
            raise RowFailure(INVALID_PARAMS, str(exc)) from exc
        if len(ids) + params.max_tokens > self._max_model_len:
            ids, params = self._fit(ids, params)
        return Request(row.row_index, ids, params, grammar=self._grammar(row, params))

    def _grammar(self, row: PromptRow, params: SamplingParams) -> Grammar | None:
        """What the output must follow; RowFailure where that cannot be."""
        found = self._sampling.response_format(row.params, params)
        if found is None:
            return None
        if self._compile is None:
            raise RowFailure(UNSUPPORTED_PARAMETER, "response_format: outputs cannot be held to a form here; remove it")
        return self._compile(found)

    def _fit(self, ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """Make prompt and output fit max_model_len as prompt.overflow says; RowFailure when they cannot."""
        limit, overflow = self._max_model_len, self._overflow
        if overflow == "error" or (overflow == "clamp" and len(ids) >= limit):
            room = f"with max_tokens {params.max_tokens} " if overflow == "error" else ""
            raise RowFailure(
                PROMPT_TOO_LONG,
                f"the prompt has {len(ids)} tokens, {room}more than the model's {limit}; "
                "shorten it, lower sampling.max_tokens or set prompt.overflow",
            )
        if overflow == "clamp":
            max_tokens = limit - len(ids)
            return ids, replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        keep = limit - params.max_tokens
        if keep < 1:
            raise RowFailure(
                PROMPT_TOO_LONG,
                f"max_tokens {params.max_tokens} leaves no room for a prompt in the model's {limit} tokens; "
                "lower sampling.max_tokens or set prompt.overflow: clamp",
            )
        return (ids[-keep:] if overflow == "truncate_left" else ids[:keep]), params


def error_row(row: PromptRow, code: str, message: str, prompt_tokens: int = 0) -> OutputRow:
    """The output row of a row that failed before it reached the engine."""
    return OutputRow(
        row.row_index,
        row.id,
        finish_reason="error",
        prompt_tokens=prompt_tokens,
        error_code=code,
        error_message=" ".join(message.split()),
    )


def fresh_request(request: Request) -> Request:
    """The same request as it was before any engine saw it: a grammar advances, so the copy has its own."""
    grammar = request.grammar.anew() if isinstance(request.grammar, FormatGrammar) else None
    return Request(request.request_id, request.prompt_token_ids, request.sampling_params, request.group, grammar)
