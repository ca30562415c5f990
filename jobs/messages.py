"""Conversations as rows bring them: checked, and free of the gaps that Arrow structs leave."""

from __future__ import annotations

import json
from typing import Any


class InvalidMessages(Exception):
    """A conversation that no chat template should see; the text says why."""


def read_messages(value: Any) -> list[dict[str, Any]]:
    """A list of messages, given as such or as JSON text. Raises InvalidMessages."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise InvalidMessages("the text holds half of a surrogate pair (\\ud800 to \\udfff)") from exc
        except (ValueError, RecursionError) as exc:
            raise InvalidMessages(f"the text is not JSON: {exc}") from exc
    if not isinstance(value, list):
        raise InvalidMessages(f"must be a list of messages, not {type(value).__name__}")
    if not value:
        raise InvalidMessages("the list is empty")
    return [_read_message(position, message) for position, message in enumerate(value)]


def _read_message(position: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidMessages(f"message {position} must be an object with role and content")
    # A struct column gives every message every key; a template would take the empty ones for given.
    message: dict[str, Any] = _without_none(value)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidMessages(f"message {position} has no role")
    content = message.get("content")
    if content is None and "tool_calls" in message:
        return message
    if isinstance(content, list):
        content = message["content"] = _joined(content)
    if not isinstance(content, str):
        raise InvalidMessages(f"message {position} ({role}) must have text as content, only text models are run")
    return message


def _joined(parts: list[Any]) -> str | None:
    """The text of content parts, a line break between two, as vLLM joins them; None where a part is something else."""
    texts = [part["text"] for part in parts if isinstance(part, dict) and set(part) == {"type", "text"}]
    if len(texts) < len(parts) or not texts or any(part["type"] != "text" for part in parts):
        return None
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
