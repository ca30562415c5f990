"""Why a row may fail: every error_code that a job writes, once, with its meaning. Codes never change theirs."""

from __future__ import annotations

NULL_PROMPT = "null_prompt"
EMPTY_PROMPT = "empty_prompt"
TEMPLATE_ERROR = "template_error"
PARSE_ERROR = "parse_error"
INVALID_MESSAGES = "invalid_messages"
ENCODING_ERROR = "encoding_error"
INVALID_PARAMS = "invalid_params"
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
