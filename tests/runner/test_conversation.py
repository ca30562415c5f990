"""From a row to the text and the ids that the model sees, with a real tokenizer that adds its own BOS."""

from __future__ import annotations

import pyarrow as pa
import pytest

from specrun.engine.testing import WordTokenizer
from specrun.jobs.messages import InvalidMessages, read_messages
from specrun.jobs.prompts import PromptBatch, PromptRow
from specrun.jobs.spec import JobSpec
from specrun.runner.conversation import PromptText
from specrun.runner.requests import RequestBuilder
from specrun.runner.sampling import RowSampling
from specrun.runner.tokenizer import Tokenizer

BOS, END = 1, 2
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ m.role }} : {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "<end>", ":", "system", "user", "assistant", "hi", "I", "am", "ignore", "now"]
    backend = Backend(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<unk>", additional_special_tokens=["<end>"]
    )
    fast.chat_template = STRICT
    return Tokenizer(fast)


def build(tokenizer, *rows, input_format="auto", **prompt):
    """(ids by row, errors by row); a row is a prompt or a conversation."""
    input_section = {"path": "i", "format": input_format}
    spec = JobSpec.model_validate(
        {"model": {"path": "m"}, "input": input_section, "output": {"path": "o"}, "prompt": prompt}
    )
    builder = RequestBuilder(tokenizer, PromptText(spec, tokenizer), RowSampling({}), "error", 1024)
    made = [
        PromptRow(
            i, None, row if isinstance(row, str) else None, row if isinstance(row, list) else None, {}, None, None
        )
        for i, row in enumerate(rows)
    ]
    batch = builder.build(PromptBatch(0, made, pa.RecordBatch.from_pylist([{}] * len(made))))
    return {r.request_id: r.prompt_token_ids for r in batch.requests}, {
        row.row_index: (row.error_code, row.error_message) for row in batch.errors
    }


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_one_bos_each(tokenizer):
    ids, errors = build(tokenizer, chat(("user", "hi")), "hi")
    assert not errors and [row.count(BOS) for row in ids.values()] == [1, 1]
    ids, errors = build(tokenizer, "hi", "<s> hi", chat_template="none")
    assert not errors and ids == {0: [BOS, 7], 1: [BOS, 7]}


def test_special_tokens_in_a_users_text_are_read_as_such(tokenizer):
    ids, _ = build(tokenizer, "ignore <end> now", chat_template="none")
    assert ids[0] == [BOS, 10, END, 11]


def test_bad_conversations_fail_alone(tokenizer):
    ids, errors = build(
        tokenizer,
        chat(("user", "hi")),
        chat(("wizard", "hi")),
        chat(("user", "hi"), ("assistant", "I")),
        [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}],
        chat(("user", "hi"), ("assistant", "I"), ("user", "am")),
    )
    assert sorted(ids) == [0, 4]
    assert {code for code, _ in errors.values()} == {"template_error"} and sorted(errors) == [1, 2, 3]
    assert "unknown role wizard" in errors[1][1]
    assert "prompt.continue_final_message: true" in errors[2][1] and "remove it" in errors[2][1]
    with pytest.raises(InvalidMessages, match="the list is empty"):
        read_messages([])


def test_the_final_message_is_continued_where_the_job_says_so(tokenizer):
    rows = [chat(("user", "hi"), ("assistant", "I am")), chat(("user", "hi")), "hi"]
    ids, errors = build(tokenizer, *rows, continue_final_message=True)
    assert not errors
    assert ids[0] == [BOS, 5, 3, 7, END, 6, 3, 8, 9]
    assert ids[1] == ids[2] == [BOS, 5, 3, 7, END, 6, 3]


def test_a_final_message_that_a_template_does_not_keep_fails_its_row(tokenizer, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    ids, errors = build(
        tokenizer, chat(("assistant", "I am")), "hi", chat_template=str(file), continue_final_message=True
    )
    assert list(ids) == [1] and errors[0][0] == "template_error"


def test_the_stub_continues_as_well():
    words = WordTokenizer(has_chat_template=True)
    ids, errors = build(words, chat(("user", "hi"), ("assistant", "I")), continue_final_message=True)
    assert not errors and words.decode_batch(ids.values()) == ["user: hi assistant: I"]


def test_openai_completions_do_not_go_through_the_chat_template(tokenizer):
    rows = ["hi", chat(("user", "hi")), "ignore now", chat(("user", "am"))]
    ids, errors = build(tokenizer, *rows, input_format="openai-batch")
    assert not errors
    assert ids[0] == [BOS, 7] and ids[2] == [BOS, 10, 11]
    assert ids[1] == [BOS, 5, 3, 7, END, 6, 3] and ids[3] == [BOS, 5, 3, 9, END, 6, 3]


def test_openai_chats_without_a_chat_template_fail():
    ids, errors = build(WordTokenizer(), "hi", chat(("user", "hi")), input_format="openai-batch")
    assert list(ids) == [0] and errors[1][0] == "template_error" and "prompt.chat_template" in errors[1][1]
