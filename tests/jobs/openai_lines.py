"""Lines of the OpenAI batch API, for the tests of how they are read."""

from typing import Any

from specrun.jobs.openai_batch import BatchRequest, parse_line
from specrun.jobs.openai_body import CHAT_URL, COMPLETIONS_URL

MODEL = "org/model"
USER = {"role": "user", "content": "hi"}


def line(url: str = CHAT_URL, **body: Any) -> dict[str, Any]:
    main = {"messages": [USER]} if url == CHAT_URL else {"prompt": "once"}
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": MODEL, **main, **body}}


def chat(**body: Any) -> BatchRequest:
    return parse_line(line(**body), MODEL)


def completion(**body: Any) -> BatchRequest:
    return parse_line(line(COMPLETIONS_URL, **body), MODEL)


def refusal(request: BatchRequest) -> tuple[str, str]:
    assert request.error is not None
    assert request.messages is None and request.prompt is None and request.params == {}
    return request.error
