"""Input lines of the OpenAI batch API: each becomes a request, or an error that says what cannot be honoured.

A line is `{"custom_id": "...", "method": "POST", "url": "/v1/...", "body": {...}}`, its body that of a call to the url.
Nothing in it is passed over in silence: a key is honoured, or has no influence on the output and is accepted, or fails
its line with its name. null counts as absent. What a body leaves out is the job's: `sampling` and the model (the API's
own defaults, temperature 1 and another max_tokens, do not apply).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .openai_body import BODY_KEYS, CHAT_URL, COMPLETIONS_URL, check_keys, sampling_of
from .row_errors import (
    EMPTY_PROMPT,
    INVALID_MESSAGES,
    INVALID_PARAMS,
    MODEL_NOT_FOUND,
    NULL_PROMPT,
    PARSE_ERROR,
    UNSUPPORTED_PARAMETER,
    RowFailure,
    name_of,
    shown,
)

_ENVELOPE = ("custom_id", "method", "url", "body")
# A developer message is what the API calls the system message of newer models; chat templates know it as system.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(slots=True)
class BatchRequest:
    """One line. Either messages, prompt or an error is set."""

    custom_id: str | None = None
    """As the line has it; None where the line has none that is text."""
    url: str | None = None
    """As the line has it, known or not; None where it is no text."""
    model: str | None = None
    """As the body has it, or None."""
    messages: list[dict[str, Any]] | None = None
    """Each with role (system, user, assistant) and content (text) alone."""
    prompt: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters under the names of SamplingParams: of the right type, their range not checked. And
    response_format, a ResponseFormat, or None where the line asks for plain text."""
    error: tuple[str, str] | None = None
    """Code and message of a line that cannot run."""


def parse_line(record: Any, served_model_name: str) -> BatchRequest:
    """The request of one line, given as parsed JSON without halves of surrogate pairs. Raises nothing.

    Errors: parse_error (custom_id, method, url or body is not what the API asks for), unsupported_parameter (a url, a
    key or a value that is not honoured), model_not_found (a body's model is not served_model_name), invalid_params
    (a wrong type; max_tokens and max_completion_tokens differ), invalid_response_format, invalid_messages, null_prompt
    and empty_prompt.
    """
    request = BatchRequest()
    try:
        _read_line(request, record, served_model_name)
    except RowFailure as exc:
        request.messages = request.prompt = None
        request.params = {}
        request.error = exc.code, str(exc)
    return request


def _read_line(request: BatchRequest, record: Any, served_model_name: str) -> None:
    if not isinstance(record, dict):
        raise RowFailure(
            PARSE_ERROR, f"a line must be an object with custom_id, method, url and body, got {shown(record)}"
        )
    custom_id, method, url, body = (record.get(key) for key in _ENVELOPE)
    request.custom_id = custom_id if isinstance(custom_id, str) else None
    request.url = url if isinstance(url, str) else None
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        request.model = body["model"]
    if request.custom_id is None:
        raise RowFailure(PARSE_ERROR, f"custom_id: must be text that no other line has, got {shown(custom_id)}")
    if method != "POST":
        raise RowFailure(PARSE_ERROR, f"method: must be POST, got {shown(method)}")
    if request.url is None:
        raise RowFailure(PARSE_ERROR, f"url: must be {CHAT_URL} or {COMPLETIONS_URL}, got {shown(url)}")
    if request.url not in BODY_KEYS:
        raise RowFailure(UNSUPPORTED_PARAMETER, f"url: {shown(url)}; use {CHAT_URL} or {COMPLETIONS_URL}")
    if not isinstance(body, dict):
        raise RowFailure(PARSE_ERROR, f"body: must be an object, got {shown(body)}")
    for key in record:
        if key not in _ENVELOPE and record[key] is not None:
            raise RowFailure(
                UNSUPPORTED_PARAMETER, f"{name_of(key)}: a line has {', '.join(_ENVELOPE)} alone; leave it out"
            )
    _read_body(request, {key: value for key, value in body.items() if value is not None}, served_model_name)


def _read_body(request: BatchRequest, body: dict[str, Any], served_model_name: str) -> None:
    assert request.url is not None, "checked with the line"
    model = body.pop("model", served_model_name)
    if not isinstance(model, str):
        raise RowFailure(INVALID_PARAMS, f"model: must be text, got {shown(model)}")
    if model != served_model_name:
        raise RowFailure(
            MODEL_NOT_FOUND,
            f"model: {shown(model)} is not served, this job runs {served_model_name!r}; "
            "change the line or model.served_model_name",
        )
    check_keys(request.url, body)
    if request.url == CHAT_URL:
        request.messages = _messages(body.pop("messages", None))
    else:
        request.prompt = _prompt(body.pop("prompt", None))
    request.params = sampling_of(request.url, body)


def _messages(value: Any) -> list[dict[str, Any]]:
    if value is None:
        raise RowFailure(NULL_PROMPT, "messages: is missing; a chat needs a list of them")
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else shown(value)
        raise RowFailure(INVALID_MESSAGES, f"messages: must be a list of messages, got {got}")
    return [_message(f"messages[{position}]", message) for position, message in enumerate(value)]


def _message(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowFailure(INVALID_MESSAGES, f"{where}: must be an object with role and content, got {shown(value)}")
    role, content = value.get("role"), value.get("content")
    if role in ("tool", "function"):
        raise RowFailure(UNSUPPORTED_PARAMETER, f"{where}.role: {role}; tools are not supported")
    if not isinstance(role, str) or role not in _ROLES:
        raise RowFailure(INVALID_MESSAGES, f"{where}.role: must be one of {', '.join(_ROLES)}, got {shown(role)}")
    for key, inner in value.items():
        # Clients send the answers that they got, whose unused keys hold null or an empty list.
        if key not in ("role", "content") and inner is not None and inner != []:
            raise RowFailure(UNSUPPORTED_PARAMETER, f"{where}.{name_of(key)}: only role and content are supported")
    if isinstance(content, list) and content:
        # As vLLM does: a template of a text model sees one text.
        content = "\n".join(_part(f"{where}.content[{position}]", part) for position, part in enumerate(content))
    if not isinstance(content, str):
        raise RowFailure(
            INVALID_MESSAGES, f"{where}.content: must be text or a list of text parts, got {shown(content)}"
        )
    return {"role": _ROLES[role], "content": content}


def _part(where: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "text":
        got = f"type {shown(kind)}" if isinstance(value, dict) else shown(value)
        raise RowFailure(INVALID_MESSAGES, f'{where}: must be {{"type": "text", "text": "..."}}, got {got}')
    for key, inner in value.items():
        # prompt_cache_breakpoint: where a cache may cut, which changes no output.
        if key not in ("type", "text", "prompt_cache_breakpoint") and inner is not None:
            raise RowFailure(UNSUPPORTED_PARAMETER, f"{where}.{name_of(key)}: only type and text are supported")
    text = value.get("text")
    if not isinstance(text, str):
        raise RowFailure(INVALID_MESSAGES, f"{where}.text: must be text, got {shown(text)}")
    return text


def _prompt(value: Any) -> str:
    if value is None:
        raise RowFailure(NULL_PROMPT, "prompt: is missing; give the text to go on from")
    if value == "":
        raise RowFailure(EMPTY_PROMPT, "prompt: is empty; give the text to go on from")
    if isinstance(value, list):
        raise RowFailure(
            UNSUPPORTED_PARAMETER, "prompt: a list of texts or token ids; give each text a line of its own"
        )
    if not isinstance(value, str):
        raise RowFailure(INVALID_PARAMS, f"prompt: must be text, got {shown(value)}")
    return value
