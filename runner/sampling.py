"""Sampling parameters of a row: its own columns over the job's, and a seed that depends on nothing but the row."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ..engine.grammar import Grammar
from ..engine.request import InvalidParameter, SamplingParams
from ..jobs.columns import UNSUPPORTED_KEYS, asks_for_nothing
from ..jobs.errors import ConfigError
from ..jobs.response_format import FORMAT_KEYS, RESPONSE_FORMAT, ResponseFormat, parse_response_format, read_format
from ..jobs.row_errors import INVALID_PARAMS, RowFailure
from ..jobs.spec import JobSpec

Compile = Callable[[ResponseFormat], Grammar | None]
"""A new grammar of a format, for one request; RowFailure where there is none. None where only shapes are checked."""


class UnsupportedParameter(InvalidParameter):
    """A row asks for something that no job does; the text says what to do."""


_WHOLE = {"max_tokens", "min_tokens", "top_k", "seed", "logprobs"}
_MENDS = {
    "max_completion_tokens": "rename it to max_tokens",
    "max_new_tokens": "rename it to max_tokens",
    "guided_grammar": "use guided_json or guided_regex, or remove it",
}
_ENDS = "does not go with a response format, which ends with end-of-sequence; remove one of them"
_AS_DATA = "or list the column in output.keep_columns, which makes it plain data"
_NAMES = {field.name for field in fields(SamplingParams)}


class RowSampling:
    """The job's parameters, ready to be given to each row. Raises InvalidParameter when they are out of range, and
    RowFailure for a response format of a wrong shape.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job = SamplingParams(**_normalized(job))
        self._format = parse_response_format(job.get(RESPONSE_FORMAT))
        if self._format is not None and self._job.ignore_eos:
            raise InvalidParameter("ignore_eos", _ENDS)

    def params(self, row_index: int, row_id: str | None, own: Mapping[str, Any]) -> SamplingParams:
        """Parameters of one row. Raises InvalidParameter naming a key that is unknown or out of range, and
        UnsupportedParameter for what is known and not honoured.

        Greedy rows without parameters share one object: no noise, so no seed.
        """
        values = _normalized(own) if own else {}
        if not values:
            if self._job.temperature == 0:
                return self._job
            return replace(self._job, seed=row_seed(self._job.seed, row_index, row_id))
        if "seed" not in values:
            values["seed"] = row_seed(self._job.seed, row_index, row_id)
        return replace(self._job, **values)

    def response_format(self, own: Mapping[str, Any], params: SamplingParams) -> ResponseFormat | None:
        """What the output of a row with these parameters must look like; None for plain text.

        A format of its own wins, and so does type text. Raises RowFailure.
        """
        if own.get(RESPONSE_FORMAT, self) is None:  # nulls of columns are not here: an OpenAI line asks for plain text
            return None
        found = read_format(own, from_column=True).get(RESPONSE_FORMAT, self._format) if own else self._format
        if found is not None and params.ignore_eos:
            raise RowFailure(INVALID_PARAMS, f"ignore_eos: {_ENDS}")
        return found


def check_job_format(spec: JobSpec, compile: Compile) -> None:
    """Raises ConfigError where nothing can be held to the job's own response format, before any row finds out."""
    found = parse_response_format(spec.sampling.response_format)
    if found is None:
        return
    try:
        compile(found)
    except RowFailure as exc:
        reason = str(exc).removeprefix(RESPONSE_FORMAT).lstrip(".: ")
        if any(key.startswith("sampling.response_format") for key in spec.secret_keys):
            # A reason quotes parts of the form, and no part of what came from the environment is shown.
            raise ConfigError("sampling.response_format: nothing can be held to it; correct its variables") from None
        raise ConfigError(f"sampling.response_format: {reason}") from exc


def row_seed(job_seed: int, row_index: int, row_id: str | None) -> int:
    """64-bit key of a row's noise: a hash of the job's seed and the row's id or, where there is none, its index."""
    key = f"{job_seed}\nrow\n{row_index}" if row_id is None else f"{job_seed}\nid\n{row_id}"
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _normalized(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values in SamplingParams' types, as far as there is no doubt: data files know neither tuples nor whole floats."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name in FORMAT_KEYS:
            continue
        if name in UNSUPPORTED_KEYS:
            if asks_for_nothing(name, value):
                continue
            raise UnsupportedParameter(name, f"is not supported; {_MENDS.get(name, 'remove it')}, {_AS_DATA}")
        if name not in _NAMES:
            raise InvalidParameter(name, "is not a sampling parameter")
        if name == "stop":
            value = _strings(value)
        elif name == "stop_token_ids":
            value = _token_ids(value)
        elif name == "logit_bias":
            value = _logit_bias(value)
        elif name == "ignore_eos":
            value = _truth(value)
        elif name in _WHOLE and isinstance(value, float) and value.is_integer():
            value = int(value)  # a column of whole numbers and nulls often arrives as float
        if name == "logprobs" and type(value) is int and value > 0:
            raise UnsupportedParameter(
                name, f"only 0 (the chosen token) is supported, got {value}; write 0 or remove it"
            )
        result[name] = value
    return result


def _strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise InvalidParameter("stop", f"must be a string or a list of strings, got {value!r}")
    return tuple(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    values = () if value is None else value
    if not isinstance(values, (list, tuple)) or not all(type(token) is int and token >= 0 for token in values):
        raise InvalidParameter("stop_token_ids", f"must be a list of token ids, got {value!r}")
    return tuple(values)


def _truth(value: Any) -> bool:
    """Also from 0 and 1: a column of truth values and nulls often arrives as numbers. Text is none: "false" is not."""
    if value not in (0, 1):
        raise InvalidParameter("ignore_eos", f"must be true or false, got {value!r}")
    return bool(value)


def _logit_bias(value: Any) -> dict[int, float]:
    """From a mapping (JSON gives its keys as strings) or from pairs, as an Arrow map comes."""
    try:
        bias = {int(token): float(number) for token, number in dict(value or {}).items()}
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameter("logit_bias", f"must map token ids to numbers, got {value!r}") from None
    if any(math.isnan(number) for number in bias.values()):
        raise InvalidParameter("logit_bias", f"must hold no NaN, got {value!r}")
    return bias
