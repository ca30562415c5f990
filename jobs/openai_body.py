"""Keys of an OpenAI request body: which are honoured as sampling parameters, accepted without effect, or refused."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .response_format import FORMAT_KEYS, read_format
from .row_errors import INVALID_PARAMS, NOUNS, UNSUPPORTED_PARAMETER, RowFailure, name_of, shown

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")
_MOST_NAMED = 8
_MENDS = {"guided_grammar": "use guided_json, guided_regex or guided_choice"}


def check_keys(url: str, body: Mapping[str, Any]) -> None:
    """Raises RowFailure with every key that is not honoured, since as a rule all lines of a file have them."""
    unknown = [key for key in body if key not in BODY_KEYS[url]]
    if not unknown:
        return
    texts = []
    for key in unknown[:_MOST_NAMED]:
        other = next((name for name, keys in BODY_KEYS.items() if key in keys), None)
        near = difflib.get_close_matches(key[:64], BODY_KEYS[url], n=1, cutoff=0.8)
        hint = f"belongs to {other}" if other else f"did you mean {near[0]}?" if near else "leave it out"
        hint = _MENDS.get(key, hint)
        texts.append(f"{name_of(key)}: not supported by {url} here; {hint}")
    if len(unknown) > _MOST_NAMED:
        texts.append(f"and {len(unknown) - _MOST_NAMED} more")
    raise RowFailure(UNSUPPORTED_PARAMETER, ", ".join(texts))


def sampling_of(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters of a body whose keys are all known, under our names.

    Raises RowFailure: invalid_params for a wrong type, unsupported_parameter for a value that is not honoured,
    invalid_response_format for a form that is malformed.
    """
    params: dict[str, Any] = {}
    for key, value in body.items():
        if key in _SAMPLING:
            params[key] = _SAMPLING[key](key, value)
        elif key in _ONLY:
            _check_only(key, value)
        elif key in _NO_EFFECT:
            _check_type(key, value, (_NO_EFFECT[key],))
        elif key in FORMAT_KEYS:
            _check_type(key, value, _FORMATS[key])
    params.update(read_format(body))
    if "max_completion_tokens" in body:
        limit = _whole("max_completion_tokens", body["max_completion_tokens"])
        if params.setdefault("max_tokens", limit) != limit:
            raise RowFailure(
                INVALID_PARAMS,
                f"max_completion_tokens: {shown(limit)} differs from max_tokens {shown(params['max_tokens'])}; "
                "give one of them",
            )
    if "logprobs" in body and _wants_logprobs(url, body["logprobs"]):
        params["logprobs"] = 0
    return params


def _wants_logprobs(url: str, value: Any) -> bool:
    """The logprob of each chosen token: true in a chat, 0 in a completion. Those of others are not to be had."""
    if url == CHAT_URL:
        _check_type("logprobs", value, (bool,))
        return bool(value)
    count = _whole("logprobs", value)
    if count < 0:
        raise RowFailure(INVALID_PARAMS, f"logprobs: must not be negative, got {shown(value)}")
    if count > 0:
        raise RowFailure(UNSUPPORTED_PARAMETER, f"logprobs: {shown(value)}; only 0 (the chosen token) is supported")
    return True


def _check_only(key: str, value: Any) -> None:
    only, types = _ONLY[key]
    _check_type(key, value, types)
    if value != only:
        raise RowFailure(UNSUPPORTED_PARAMETER, f"{key}: {shown(value)} is not supported; leave it out")


def _check_type(key: str, value: Any, types: tuple[type, ...]) -> None:
    if type(value) not in types:  # not isinstance: true is no number
        allowed = " or ".join(NOUNS[each] for each in types)
        raise RowFailure(INVALID_PARAMS, f"{key}: must be {allowed}, got {shown(value)}")


def _whole(key: str, value: Any) -> int:
    if type(value) is float and value.is_integer():
        return int(value)  # some writers know no other numbers than floats
    if type(value) is not int:
        raise RowFailure(INVALID_PARAMS, f"{key}: must be a whole number, got {shown(value)}")
    return value


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise RowFailure(INVALID_PARAMS, f"{key}: must be a number, got {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):  # NaN and 1e999: JSON readers let them pass
        raise RowFailure(INVALID_PARAMS, f"{key}: must be a finite number, got {shown(value)}")
    return value  # type: ignore[no-any-return]


def _truth(key: str, value: Any) -> bool:
    _check_type(key, value, (bool,))
    return bool(value)


def _strings(key: str, value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise RowFailure(INVALID_PARAMS, f"{key}: must be text or a list of texts, got {shown(value)}")
    for position, text in enumerate(strings):
        if not isinstance(text, str):
            raise RowFailure(INVALID_PARAMS, f"{key}[{position}]: must be text, got {shown(text)}")
    return strings


def _token_ids(key: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise RowFailure(INVALID_PARAMS, f"{key}: must be a list of token ids, got {shown(value)}")
    return [_whole(f"{key}[{position}]", token) for position, token in enumerate(value)]


def _logit_bias(key: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RowFailure(INVALID_PARAMS, f"{key}: must map token ids to numbers, got {shown(value)}")
    for token in value:
        if not _TOKEN_ID.fullmatch(token):
            raise RowFailure(INVALID_PARAMS, f'{key}: keys must be token ids, as in "50256", got {shown(token)}')
    return {int(token): _number(f"{key}.{token}", bias) for token, bias in value.items()}


_SAMPLING: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed"), _whole),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _number),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _truth,
    "logit_bias": _logit_bias,
}
"""Honoured by both urls, the API's own and those that vLLM adds to it."""

_FORMATS: dict[str, tuple[type, ...]] = {
    "response_format": (dict,),
    "structured_outputs": (dict,),
    "guided_json": (dict, str),
    "guided_regex": (str,),
    "guided_choice": (list,),
}
"""The API's key and vLLM's for what an output must look like."""

_ONLY: dict[str, tuple[Any, tuple[type, ...]]] = {
    "n": (1, (int,)),
    "best_of": (1, (int,)),
    "stream": (False, (bool,)),
    "echo": (False, (bool,)),
    "suffix": ("", (str,)),
    "top_logprobs": (0, (int,)),
    "tools": ([], (list,)),
    "tool_choice": ("none", (str, dict)),
    "functions": ([], (list,)),
    "function_call": ("none", (str, dict)),
    "modalities": (["text"], (list,)),
}
"""The one value that is accepted, which asks for what happens anyway; and the types that the API has for the key."""

_NO_EFFECT: dict[str, type] = {
    "user": str,
    "metadata": dict,
    "store": bool,
    "service_tier": str,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "parallel_tool_calls": bool,
}
"""Accepted, since they change nothing in an answer: who asks, what is kept and how it is paid."""

_COMMON = {"model", "logprobs", "n", "stream", *_SAMPLING, *_FORMATS, *_NO_EFFECT}
BODY_KEYS = {
    CHAT_URL: frozenset(_COMMON | {"messages", "max_completion_tokens"} | _ONLY.keys() - {"best_of", "echo", "suffix"}),
    COMPLETIONS_URL: frozenset(_COMMON | {"prompt", "best_of", "echo", "suffix"}),
}
"""Every key of a body that does not fail its line by its name alone."""
