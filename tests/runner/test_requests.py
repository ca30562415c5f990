"""Rows to requests: lengths, parameters, seeds, text that cannot be encoded."""

import pyarrow as pa
import pytest

from specrun.engine.request import FinishReason, InvalidParameter, Request, RequestOutput, SamplingParams
from specrun.engine.testing import WordTokenizer
from specrun.jobs.prompts import PromptBatch, PromptRow
from specrun.jobs.spec import JobSpec
from specrun.runner.conversation import PromptText
from specrun.runner.outputs import OutputText
from specrun.runner.requests import RequestBuilder
from specrun.runner.sampling import RowSampling, row_seed


def prompt_row(index, prompt, **params):
    return PromptRow(index, None, prompt, None, params, None, None)


def build(prompts, overflow="error", tokenizer=None, max_model_len=64, is_done=None, **sampling):
    tokenizer = tokenizer or WordTokenizer()
    spec = JobSpec.model_validate({"model": {"path": "m"}, "input": {"path": "i"}, "output": {"path": "o"}})
    builder = RequestBuilder(
        tokenizer,
        PromptText(spec, tokenizer),
        RowSampling({"max_tokens": 16, **sampling}),
        overflow,
        max_model_len=max_model_len,
        is_done=is_done,
    )
    rows = [prompt if isinstance(prompt, PromptRow) else prompt_row(i, prompt) for i, prompt in enumerate(prompts)]
    return builder.build(PromptBatch(0, rows, pa.RecordBatch.from_pylist([{}] * len(rows))))


LENGTHS = [47, 48, 49, 63, 64, 65]


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [
        ("error", [(47, 16), (48, 16), None, None, None, None]),
        ("clamp", [(47, 16), (48, 16), (49, 15), (63, 1), None, None]),
        ("truncate_left", [(47, 16), (48, 16), (48, 16), (48, 16), (48, 16), (48, 16)]),
        ("truncate_right", [(47, 16), (48, 16), (48, 16), (48, 16), (48, 16), (48, 16)]),
    ],
)
def test_lengths_around_the_limit(overflow, expected):
    prompts = [" ".join(f"w{i}" for i in range(length)) for length in LENGTHS]
    batch = build(prompts, overflow)
    found = {r.request_id: (len(r.prompt_token_ids), r.sampling_params.max_tokens) for r in batch.requests}
    assert [found.get(i) for i in range(6)] == expected
    assert [row.error_code for row in batch.errors] == ["prompt_too_long"] * expected.count(None)
    assert all(f"{LENGTHS[row.row_index]} tokens" in (row.error_message or "") for row in batch.errors)


def test_truncation_keeps_the_right_end():
    tokenizer = WordTokenizer()
    left = build(["a b c d"], "truncate_left", tokenizer, max_model_len=4, max_tokens=2).requests[0]
    right = build(["a b c d"], "truncate_right", tokenizer, max_model_len=4, max_tokens=2).requests[0]
    assert tokenizer.decode_batch([left.prompt_token_ids, right.prompt_token_ids]) == ["c d", "a b"]
    tiny = build(["a b c d"], "truncate_left", tokenizer, max_model_len=4, max_tokens=3, min_tokens=2).requests[0]
    assert (len(tiny.prompt_token_ids), tiny.sampling_params.max_tokens, tiny.sampling_params.min_tokens) == (1, 3, 2)


@pytest.mark.parametrize("overflow", ["truncate_left", "truncate_right"])
def test_no_prompt_is_cut_to_nothing(overflow):
    (error,) = build(["a"], overflow, max_model_len=4, max_tokens=4).errors
    assert error.error_code == "prompt_too_long" and "leaves no room for a prompt" in (error.error_message or "")


def test_rows_that_are_done_are_left_out():
    batch = build(["a", "b", None], is_done=lambda index: index != 1)
    assert [request.request_id for request in batch.requests] == [1] and not batch.errors


class Strict(WordTokenizer):
    def encode_batch(self, texts, add_special_tokens=True):
        for text in texts:
            text.encode()
        return super().encode_batch(texts)


def test_one_text_that_cannot_be_encoded_does_not_harm_the_others():
    batch = build(["a", "\ud800", "b"], tokenizer=Strict())
    assert [request.request_id for request in batch.requests] == [0, 2]
    assert [(row.row_index, row.error_code) for row in batch.errors] == [(1, "encoding_error")]


def test_a_template_that_raises_fails_its_row():
    tokenizer = WordTokenizer(has_chat_template=True)
    row = prompt_row(0, None)
    row.messages = [{"role": "user"}]
    batch = build([row, "fine"], tokenizer=tokenizer)
    assert [(row.error_code, row.error_message) for row in batch.errors] == [("template_error", "KeyError: 'content'")]
    assert len(batch.requests) == 1


def test_parameters_as_data_files_bring_them():
    sampling = RowSampling({"max_tokens": 8, "stop": "END"})
    own = {"max_tokens": 4.0, "stop": ["a", "b"], "stop_token_ids": [3], "logit_bias": [("5", 1)], "temperature": 1}
    own["ignore_eos"] = 1.0
    params = sampling.params(0, None, own)
    assert params == SamplingParams(
        max_tokens=4,
        stop=("a", "b"),
        stop_token_ids=(3,),
        logit_bias={5: 1.0},
        temperature=1,
        ignore_eos=True,
        seed=row_seed(0, 0, None),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2.5),
        ("max_tokens", float("nan")),
        ("temperature", float("nan")),
        ("temperature", -1),
        ("temperature", "hot"),
        ("stop", 7),
        ("stop", [""]),
        ("stop_token_ids", ["x"]),
        ("logit_bias", "x"),
        ("logit_bias", [1]),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", {"5": 10**400}),
        ("ignore_eos", "false"),
        ("logprobs", -2),
        ("logprobs", True),
        ("seeds", 2),
        ("max_tokens", -1),
        ("temperature", float("inf")),
        ("top_p", 0),
    ],
)
def test_invalid_parameters_are_named(name, value):
    row = prompt_row(0, "a")
    row.params[name] = value
    (error,) = build([row]).errors
    assert error.error_code == "invalid_params" and (error.error_message or "").startswith(f"{name}: ")
    with pytest.raises(InvalidParameter):
        RowSampling({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", "2"),
        ("best_of", 2.0),
        ("logprobs", 5),
        ("logprobs", 1.0),
        ("top_logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("guided_grammar", "root ::= x"),
        ("stream", True),
        ("echo", True),
        ("suffix", "x"),
        ("bad_words", ["a"]),
        ("prompt_logprobs", 0),
        ("max_completion_tokens", 5),
    ],
)
def test_what_is_not_supported_is_never_passed_over(name, value):
    batch = build([prompt_row(0, "a", **{name: value}), "b"])
    (error,) = batch.errors
    assert (error.row_index, error.error_code) == (0, "unsupported_parameter")
    message = error.error_message or ""
    assert message.startswith(f"{name}: ") and ("remove it" in message or "rename it to max_tokens" in message)
    assert name == "logprobs" or "output.keep_columns" in message
    assert [request.request_id for request in batch.requests] == [1]


def test_unsupported_parameters_that_ask_for_nothing():
    neutral = {"n": 1.0, "stream": False, "tools": [], "response_format": {"type": "text", "json_schema": None}}
    sampling = RowSampling({"max_tokens": 3})
    assert sampling.params(0, None, {**neutral, "tool_choice": "none"}) is sampling.params(1, None, {})


def test_a_rows_own_values_win_and_null_is_the_jobs_own():
    prompt = "one two three"
    rows = [
        prompt_row(0, prompt, max_tokens=4, temperature=0, stop="a"),
        prompt_row(1, prompt),
        prompt_row(2, prompt, max_tokens=9999, temperature=-1, stop=["b", "c"]),
        prompt_row(3, prompt, max_tokens=9999),
        prompt_row(4, prompt, stop=["b", "c"]),
    ]
    batch = build(rows, "clamp", temperature=0.5, stop="END")
    found = {r.request_id: r.sampling_params for r in batch.requests}
    assert {i: (p.max_tokens, p.temperature, p.stop) for i, p in found.items()} == {
        0: (4, 0, ("a",)),
        1: (16, 0.5, ("END",)),
        3: (61, 0.5, ("END",)),
        4: (16, 0.5, ("b", "c")),
    }
    assert [(row.row_index, row.error_code) for row in batch.errors] == [(2, "invalid_params")]


def test_a_number_beyond_every_float_fails_its_row_alone():
    batch = build([prompt_row(0, "a", temperature=10**400), "b"])
    assert [row.error_code for row in batch.errors] == ["invalid_params"] and len(batch.requests) == 1


def test_seeds_depend_on_the_row_alone():
    sampling = RowSampling({"temperature": 1.0, "seed": 7})
    by_id = sampling.params(5, "doc", {})
    assert by_id.seed == sampling.params(99, "doc", {}).seed == row_seed(7, 0, "doc")
    assert len({row_seed(7, i, None) for i in range(1000)} | {row_seed(8, i, None) for i in range(1000)}) == 2000
    assert row_seed(7, 5, None) != row_seed(7, 5, "5")
    assert sampling.params(5, "doc", {"seed": 42}).seed == 42
    assert sampling.params(5, "doc", {"top_k": 3}).seed == by_id.seed
    assert 0 <= by_id.seed < 1 << 64


def test_greedy_rows_share_their_parameters():
    sampling = RowSampling({"max_tokens": 3})
    assert sampling.params(0, "a", {}) is sampling.params(1, "b", {})


@pytest.mark.parametrize(
    ("words", "stop", "text"),
    [
        ("a b END", "END", "a b "),
        ("END", "END", ""),
        ("END b END", "END", "END b "),  # the first one came before min_tokens
        ("a b c", "b c", "a "),
    ],
)
def test_text_ends_before_the_stop_string(words, stop, text):
    tokenizer = WordTokenizer()
    (ids,) = tokenizer.encode_batch([words])
    outputs = OutputText(tokenizer, token_ids=False)
    outputs.expect([Request(4, [1], SamplingParams(stop=(stop,)))], ["id"], 4)
    (row,) = outputs.rows([RequestOutput(4, ids, FinishReason.STOP, stop)])
    assert (row.text, row.id, row.stop_reason, row.output_tokens) == (text, "id", stop, len(ids))
