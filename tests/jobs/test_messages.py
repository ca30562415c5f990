"""Conversations of rows: what is read, and what is refused."""

from __future__ import annotations

import pytest

from specrun.jobs.messages import InvalidMessages, read_messages


def user(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}], "a\n\nb"),
        ([{"type": "text", "text": "a", "image_url": None}], "a"),  # as a struct column brings it
    ],
)
def test_text_parts_are_joined(content, text):
    assert read_messages(user(content)) == user(text)


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        5,
        {"type": "text", "text": "a"},
        ["a"],
        [None],
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
        [{"text": "a"}],
        [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "input_audio", "text": "a"}],
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    ],
)
def test_content_that_is_no_text_is_refused(content):
    with pytest.raises(InvalidMessages, match=r"message 0 \(user\) must have text as content"):
        read_messages(user(content))
