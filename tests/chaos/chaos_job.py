"""Jobs that chaos is let loose on, and what must come out of them, worked out from their rows alone."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from specrun.engine.testing import FIRST_WORD

MAX_MODEL_LEN = 64
MAX_TOKENS = 8
FAIL_WORD = "BOOM"
"""A prompt that holds it fails in the engine."""
WORDS = [FAIL_WORD, *(f"word{i}" for i in range(200)), *(f"größe{i}" for i in range(50)), "日本語", "🦊", '"q"', "\\n"]
"""All words there are. Builders give them their token ids in this order, so that ids mean the same in every attempt."""

TYPES: dict[str, pa.DataType] = {
    "count": pa.int64(),
    "small": pa.int8(),
    "flag": pa.bool_(),
    "lang": pa.dictionary(pa.int32(), pa.string()),
    "score": pa.list_(pa.float32()),
    "vec": pa.list_(pa.float32(), 2),
    "price": pa.decimal128(20, 4),
    "at": pa.timestamp("us", tz="Europe/Berlin"),
    "day": pa.date32(),
    "box": pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]),
    "pairs": pa.map_(pa.string(), pa.int64()),
    "blob": pa.binary(),
    "big": pa.large_string(),
}
"""Passthrough columns of Parquet inputs."""

JSON_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
"""What a JSONL column is carried as when its values are all of one type; else it is carried as JSON text."""


@dataclass(frozen=True, slots=True)
class Row:
    """An input row, and the outcome that it must have."""

    id: str | None
    prompt: str | None
    max_tokens: int | None
    """The row's own; None: the job's."""
    carried: dict[str, Any]
    """Values of the passthrough columns."""
    error_code: str | None
    line: bytes | None = None
    """The line of a JSONL file where it is no JSON."""

    @property
    def output(self) -> list[str]:
        """The words that the stub answers with."""
        words = (self.prompt or "").split()
        return [] if self.error_code else words[: self.max_tokens or MAX_TOKENS]

    @property
    def finish_reason(self) -> str:
        if self.error_code:
            return "error"
        return "length" if len(self.output) < len((self.prompt or "").split()) else "stop"


ROW_ERRORS = ("null_prompt", "empty_prompt", "prompt_too_long", "invalid_params", "engine_error")
LINE_ERRORS = ("parse_error", "encoding_error")
"""Those that only lines have."""


def make_rows(rng: random.Random, num_rows: int, is_jsonl: bool) -> list[Row]:
    """Rows, one in ten of which fails in one of the ways there are."""
    codes = ROW_ERRORS + LINE_ERRORS * is_jsonl
    failing = [rng.choice(codes) if rng.random() < 0.1 else None for _ in range(num_rows)]
    return [make_row(rng, index, is_jsonl, code) for index, code in enumerate(failing)]


def make_row(rng: random.Random, index: int, is_jsonl: bool, error_code: str | None) -> Row:
    """A row that must end with the error, or without."""
    words = rng.choices(WORDS[1:], k=rng.choice([1, 2, 5, MAX_TOKENS, MAX_TOKENS + 1, 20]))
    carried = carried_json(rng) if is_jsonl else carried_values(rng)
    if error_code in LINE_ERRORS:
        line = b'{"prompt": "no end' if error_code == "parse_error" else b'{"prompt": "\xff"}'
        return Row(None, None, None, dict.fromkeys(carried), error_code, line)
    prompts = {
        "null_prompt": None,
        "empty_prompt": "",
        "prompt_too_long": " ".join(rng.choices(WORDS[1:], k=MAX_MODEL_LEN)),
        "engine_error": " ".join([*words, FAIL_WORD]),
    }
    max_tokens = -1 if error_code == "invalid_params" else rng.choice([None, None, None, 1, 3, 30])
    return Row(f"id-{index}", prompts.get(error_code or "", " ".join(words)), max_tokens, carried, error_code)


def carried_values(rng: random.Random) -> dict[str, Any]:
    """Values of TYPES, a null here and there."""
    values = {
        "count": rng.randrange(-(1 << 63), 1 << 63),
        "small": rng.randrange(-128, 128),
        "flag": rng.random() < 0.5,
        "lang": rng.choice(["de", "en", "日"]),
        "score": [rng.random() for _ in range(rng.randrange(3))],
        "vec": [rng.random(), float("inf")],
        "price": Decimal(rng.randrange(10**12)).scaleb(-4),
        "at": datetime(2024, 3, 31, tzinfo=UTC) + timedelta(microseconds=rng.randrange(1 << 40)),
        "day": date.fromordinal(rng.randrange(700_000, 740_000)),
        "box": {"a": rng.randrange(9), "b": ["x", None][: rng.randrange(3)]},
        "pairs": [("k", rng.randrange(9))],
        "blob": rng.randbytes(3),
        "big": "line\nline\u2028" * rng.randrange(3),
    }
    return {name: None if rng.random() < 0.1 else value for name, value in values.items()}


def carried_json(rng: random.Random) -> dict[str, Any]:
    """Values of a JSONL line, null here and there; `mixed` is of several types."""
    return {
        "count": rng.randrange(-(1 << 53), 1 << 53),
        "lang": rng.choice(["de", "日\u2028", "", None]),
        "x": rng.random(),
        "flag": rng.choice([True, False, None]),
        "mixed": rng.choice([1, "1", [1, "é"], {"a": None}, None]),
    }


class ChaosJob:
    """A job.yaml with its input in `folder`, and the output that it must have, wherever that goes."""

    def __init__(self, folder: Path, rows: list[Row], is_jsonl: bool, rows_per_part: int, extras: bool = False) -> None:
        """extras: token ids and logprobs in the output."""
        self.rows = rows
        self.rows_per_part = rows_per_part
        self.file = folder / "job.yaml"
        self._is_jsonl = is_jsonl
        self._extras = extras
        folder.mkdir(parents=True)
        path = folder / ("in.jsonl" if is_jsonl else "in.parquet")
        if is_jsonl:
            path.write_bytes(b"".join(_line(row) + b"\n" for row in rows))
        else:
            pq.write_table(self._input(), path, row_group_size=max(1, rows_per_part * 3 // 2))
        config = {
            "version": 1,
            "name": "chaos",
            "model": {"path": "stub"},
            "speculation": {"method": "none", "policy": {"name": "never"}},
            "input": {"path": str(path), "columns": {"id": "id", "prompt": "prompt"}},
            "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0 if extras else None},
            "output": {"path": str(folder / "out"), "rows_per_part": rows_per_part, "token_ids": extras},
            "errors": {"max_failed_fraction": 1.0, "abort_after_consecutive": 1_000_000},
        }
        self.file.write_text(yaml.safe_dump(config), "utf-8")

    @property
    def num_failed(self) -> int:
        """Rows that must fail."""
        return sum(row.error_code is not None for row in self.rows)

    @cached_property
    def expected(self) -> pa.Table:
        """The output in order, but for error_message, and with prompt_tokens and token_ids null where a row fails."""
        rows = self.rows
        texts = [None if row.error_code else " ".join(row.output) for row in rows]
        num_prompt = [None if row.error_code else len((row.prompt or "").split()) for row in rows]
        return pa.table(
            {
                "row_index": pa.array(range(len(rows)), pa.int64()),
                "id": pa.array([row.id for row in rows], pa.string()),
                **self._carried(),
                "text": pa.array(texts, pa.large_string()),
                "finish_reason": pa.array([row.finish_reason for row in rows], pa.string()),
                "stop_reason": pa.nulls(len(rows), pa.string()),
                "prompt_tokens": pa.array(num_prompt, pa.int32()),
                "output_tokens": pa.array([len(row.output) for row in rows], pa.int32()),
                **(self._extra_columns() if self._extras else {}),
                "error_code": pa.array([row.error_code for row in rows], pa.string()),
            }
        )

    def _input(self) -> pa.Table:
        columns = {
            "id": pa.array([row.id for row in self.rows], pa.string()),
            "prompt": pa.array([row.prompt for row in self.rows], pa.string()),
            "max_tokens": pa.array([row.max_tokens for row in self.rows], pa.int32()),
        }
        return pa.table({**columns, **self._carried()})

    def _carried(self) -> dict[str, pa.Array]:
        names = self.rows[0].carried if self.rows else {}
        if not self._is_jsonl:
            return {name: _array([row.carried[name] for row in self.rows], TYPES[name]) for name in names}
        if all(row.line is not None for row in self.rows):
            return {}
        return {name: _json_array([row.carried[name] for row in self.rows]) for name in names}

    def _extra_columns(self) -> dict[str, pa.Array]:
        ids = {word: FIRST_WORD + i for i, word in enumerate(WORDS)}
        tokens = [[ids[word] for word in row.output] if row.error_code is None else None for row in self.rows]
        logprobs = [None if row.error_code else [0.0] * len(row.output) for row in self.rows]
        return {
            "token_ids": pa.array(tokens, pa.list_(pa.int32())),
            "logprobs": pa.array(logprobs, pa.list_(pa.float32())),
        }


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)


def _json_array(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) == 1 and (kind := kinds.pop()) in JSON_TYPES:
        return pa.array(values, JSON_TYPES[kind])
    return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values], pa.string())


def _line(row: Row) -> bytes:
    if row.line is not None:
        return row.line
    record = {"id": row.id, "prompt": row.prompt, **row.carried}
    if row.max_tokens is not None:
        record["max_tokens"] = row.max_tokens
    return json.dumps(record, ensure_ascii=False).encode()
