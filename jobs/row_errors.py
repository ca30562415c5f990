"""Why a row may fail: every error_code that a job writes, once, with its meaning. Codes never change theirs."""

from __future__ import annotations

import re
from typing import Any

NULL_PROMPT = "null_prompt"
EMPTY_PROMPT = "empty_prompt"
TEMPLATE_ERROR = "template_error"
PARSE_ERROR = "parse_error"
INVALID_MESSAGES = "invalid_messages"
ENCODING_ERROR = "encoding_error"
INVALID_PARAMS = "invalid_params"
INVALID_RESPONSE_FORMAT = "invalid_response_format"
UNSUPPORTED_PARAMETER = "unsupported_parameter"
MODEL_NOT_FOUND = "model_not_found"
PROMPT_TOO_LONG = "prompt_too_long"
TIMEOUT = "timeout"
ENGINE_ERROR = "engine_error"

ROW_ERRORS = {
    NULL_PROMPT: "The column of the prompt or of the messages is null or absent in this row.",
    EMPTY_PROMPT: "The prompt is empty, or has no tokens.",
    TEMPLATE_ERROR: "The prompt template or the chat template refused the row.",
    PARSE_ERROR: "The line is no JSON object, or a value has a type that its column cannot have.",
    INVALID_MESSAGES: "The conversation is no list of messages with a role and text.",
    ENCODING_ERROR: "The text is no valid UTF-8 or Unicode.",
    INVALID_PARAMS: "A sampling parameter of the row is out of range or of the wrong type.",
    INVALID_RESPONSE_FORMAT: "The form that the row asks of its output is malformed, or nothing can be held to it.",
    UNSUPPORTED_PARAMETER: "The row asks for something that specrun does not do, such as tools or n above 1.",
    MODEL_NOT_FOUND: "The row of an OpenAI batch names another model than the job's.",
    PROMPT_TOO_LONG: "Prompt and max_tokens do not fit into the model's length (prompt.overflow: error).",
    TIMEOUT: "The row did not end within run.timeout_s seconds of work.",
    ENGINE_ERROR: "The engine refused the row; the message says why.",
}
"""error_code -> what it means."""


class RowFailure(Exception):
    """A row cannot run; `code` is its error_code, the text its error_message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


NOUNS = {str: "text", bool: "true or false", int: "a whole number", list: "a list", dict: "an object"}
"""JSON types as messages name them."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def name_of(key: str) -> str:
    """A key as a message shows it: as it is where it is a plain word, so that `key: ...` can be found again."""
    return key if isinstance(key, str) and _PLAIN_NAME.fullmatch(key) else shown(key)


def shown(value: Any) -> str:
    """A value as a message shows it: short, and safe for any depth and size."""
    if isinstance(value, (dict, list)):
        return NOUNS[type(value)]
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 100:  # Python refuses to spell very long numbers
        return "a number of more than 30 digits"
    if isinstance(value, str) and len(value) > 60:
        value = value[:57] + "..."
    return repr(value)
