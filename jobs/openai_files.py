"""Rows of data/ parts as the lines of the two files that the OpenAI batch API hands back: results and errors.

Every line is `{"id", "custom_id", "response", "error"}`. A failure stands where the API itself puts it and its clients
look for it:

- A request that was answered has a `response`: status 200 and the completion, or a 4xx or 5xx status and a body
  `{"error": {"message", "type", "param", "code"}}`. `error` is null. So it is with all that a request can do wrong, and
  with a failure of the engine (500, server_error), which a client takes for worth another try.
- A request that got no answer has `response` null and an `error` of code and message. Among the API's codes for this
  (batch_expired, batch_cancelled, request_timeout) is that of a row that ran out of its time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from . import row_errors
from .openai_body import COMPLETIONS_URL

_CHUNK_ROWS = 256
_COLUMNS = (
    "row_index",
    "id",
    "url",
    "text",
    "finish_reason",
    "prompt_tokens",
    "output_tokens",
    "token_ids",
    "logprobs",
    "error_code",
    "error_message",
)
"""What is read of a part, as far as it is there; other passthrough columns may be large."""

_STATUS = {
    row_errors.NULL_PROMPT: 400,
    row_errors.EMPTY_PROMPT: 400,
    row_errors.TEMPLATE_ERROR: 400,
    row_errors.PARSE_ERROR: 400,
    row_errors.INVALID_MESSAGES: 400,
    row_errors.ENCODING_ERROR: 400,
    row_errors.INVALID_PARAMS: 400,
    row_errors.UNSUPPORTED_PARAMETER: 400,
    row_errors.INVALID_RESPONSE_FORMAT: 400,
    row_errors.PROMPT_TOO_LONG: 400,
    row_errors.MODEL_NOT_FOUND: 404,
    row_errors.ENGINE_ERROR: 500,
}
"""Of the failures that are answers; TIMEOUT is none."""

_API_CODES = {row_errors.PROMPT_TOO_LONG: "context_length_exceeded", row_errors.TIMEOUT: "request_timeout"}
"""Where the API has a name of its own that clients know; the other codes are ours."""

# Errors whose message begins with the key at fault. That of a template_error begins with the name of an exception.
_NAMING_CODES = frozenset(_STATUS) - {
    row_errors.TEMPLATE_ERROR,
    row_errors.ENCODING_ERROR,
    row_errors.PROMPT_TOO_LONG,
    row_errors.ENGINE_ERROR,
}
_LEADING_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_.\[\]]*): ")

_LOWEST_LOGPROB = -9999.0
"""The API's stand-in for very unlikely; JSON has no infinity."""

# str.splitlines, which many clients read JSONL with, ends a line at these too; JSON escapes the others by itself.
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def result_lines(
    batches: Iterable[pa.RecordBatch], model: str, created: int, token_bytes: Sequence[bytes] | None = None
) -> Iterator[tuple[bool, bytes]]:
    """(is a result, line with its newline) of each row, in order: True for the result file, False for the error file.

    batches: rows of a part, as ParquetFile.iter_batches or Table.to_batches give them; one is held at a time. A row
        is a completion where its column `url` says so and a chat completion otherwise.
    model: the name under which the model is served. created: Unix time in seconds, the same for every line.
    token_bytes: token id -> the bytes that it adds to the text. Without it, or without a column token_ids, a row's
        logprobs are given without the text of their tokens (see `_chat_logprobs`).

    Ids are made of row_index, so the same rows give the same bytes.
    """
    for batch in batches:
        columns = batch.select([name for name in batch.schema.names if name in _COLUMNS])
        for start in range(0, columns.num_rows, _CHUNK_ROWS):
            for row in columns.slice(start, _CHUNK_ROWS).to_pylist():
                line = _line(row, model, created, token_bytes)
                text = json.dumps(line, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
                yield row["error_code"] is None, text.encode() + b"\n"


def _line(row: dict[str, Any], model: str, created: int, token_bytes: Sequence[bytes] | None) -> dict[str, Any]:
    code, message, response, error = row["error_code"], row["error_message"] or "", None, None
    if code is None:
        response = _response(row, 200, _completion(row, model, created, token_bytes))
    elif code == row_errors.TIMEOUT:
        error = {"code": _API_CODES[code], "message": message}
    else:
        status = _STATUS.get(code, 500)
        response = _response(row, status, {"error": _error(code, message, status)})
    return {"id": f"batch_req_{row['row_index']}", "custom_id": row["id"], "response": response, "error": error}


def _response(row: dict[str, Any], status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{row['row_index']}", "body": body}


def _error(code: str, message: str, status: int) -> dict[str, Any]:
    name = _LEADING_NAME.match(message) if code in _NAMING_CODES else None
    return {
        "message": message,
        "type": "server_error" if status >= 500 else "invalid_request_error",
        "param": name.group(1) if name else None,
        "code": _API_CODES.get(code, code),
    }


def _completion(row: dict[str, Any], model: str, created: int, token_bytes: Sequence[bytes] | None) -> dict[str, Any]:
    is_chat = row.get("url") != COMPLETIONS_URL
    logprobs, pieces = row.get("logprobs"), _pieces(row.get("token_ids"), token_bytes)
    choice: dict[str, Any] = {"index": 0}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": row["text"], "refusal": None}
        choice["logprobs"] = None if logprobs is None else _chat_logprobs(logprobs, pieces)
    else:
        choice["text"] = row["text"]
        choice["logprobs"] = None if logprobs is None else _text_logprobs(logprobs, pieces, row["text"])
    choice["finish_reason"] = row["finish_reason"]
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row['row_index']}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": row["prompt_tokens"],
            "completion_tokens": row["output_tokens"],
            "total_tokens": row["prompt_tokens"] + row["output_tokens"],
        },
    }


def _pieces(token_ids: Sequence[int] | None, token_bytes: Sequence[bytes] | None) -> list[bytes] | None:
    """The bytes of each token; None when they are not at hand."""
    if token_ids is None or token_bytes is None:
        return None
    # Ids above the vocabulary exist where a checkpoint's matrix is padded; they add nothing to the text.
    return [token_bytes[token] if token < len(token_bytes) else b"" for token in token_ids]


def _chat_logprobs(logprobs: Sequence[float], pieces: Sequence[bytes] | None) -> dict[str, Any]:
    """The API's `content`, an entry a token; where the tokens are not known, `content` is null and `token_logprobs`
    (a name that the API has for completions) holds the numbers alone: none is lost and none is made up.
    """
    if pieces is None:
        return {"content": None, "refusal": None, "token_logprobs": [_logprob(value) for value in logprobs]}
    content = [
        {"token": _token(piece), "bytes": list(piece), "logprob": _logprob(value), "top_logprobs": []}
        for piece, value in zip(pieces, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(logprobs: Sequence[float], pieces: Sequence[bytes] | None, text: str) -> dict[str, Any]:
    return {
        "tokens": None if pieces is None else [_token(piece) for piece in pieces],
        "token_logprobs": [_logprob(value) for value in logprobs],
        "top_logprobs": None,
        "text_offset": None if pieces is None else _text_offsets(pieces, text),
    }


def _token(piece: bytes) -> str:
    """The text of one token; a torn character shows as U+FFFD."""
    return piece.decode("utf-8", "replace")


def _text_offsets(pieces: Sequence[bytes], text: str) -> list[int] | None:
    """Where each token begins in the text; None when the tokens do not spell it (decoders that drop a first space)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, spelled = [], ""
    for piece in pieces:
        offsets.append(len(spelled))
        spelled += decoder.decode(piece)
    spelled += decoder.decode(b"", True)
    return offsets if spelled.startswith(text) else None  # longer where a stop string was cut off


def _logprob(value: float) -> float | None:
    return None if value != value else max(value, _LOWEST_LOGPROB)
