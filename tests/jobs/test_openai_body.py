"""Keys of an OpenAI request body: honoured as sampling parameters, accepted without effect, or refused by name."""

from dataclasses import fields

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from specrun.engine.request import SamplingParams
from specrun.jobs.openai_batch import BatchRequest, parse_line
from specrun.jobs.openai_body import BODY_KEYS, CHAT_URL, COMPLETIONS_URL
from tests.jobs.openai_lines import MODEL, USER, chat, completion, line, refusal


class TestParameters:
    def test_all_that_are_honoured(self):
        body = {
            "max_tokens": 5,
            "min_tokens": 1,
            "temperature": 1,
            "top_p": 0.5,
            "top_k": 4,
            "min_p": 0.0,
            "seed": -3,
            "stop": "\n",
            "stop_token_ids": [7],
            "ignore_eos": True,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "logit_bias": {"50256": -100},
        }
        expected = {**body, "stop": ["\n"], "logit_bias": {50256: -100}}
        assert chat(**body, logprobs=True).params == {**expected, "logprobs": 0}
        assert completion(**body, logprobs=0).params == {**expected, "logprobs": 0}
        assert set(expected) | {"logprobs"} == {each.name for each in fields(SamplingParams)}

    def test_max_completion_tokens(self):
        assert chat(max_completion_tokens=5).params == {"max_tokens": 5}
        assert chat(max_completion_tokens=5, max_tokens=5.0).params == {"max_tokens": 5}
        code, message = refusal(chat(max_completion_tokens=5, max_tokens=6))
        assert code == "invalid_params" and "max_completion_tokens" in message and "max_tokens 6" in message

    def test_out_of_range_is_left_to_the_runner(self):
        assert chat(temperature=-1, max_tokens=-5).params == {"temperature": -1, "max_tokens": -5}

    def test_null_counts_as_absent(self):
        body = dict.fromkeys((BODY_KEYS[CHAT_URL] | {"stream_options", "reasoning_effort"}) - {"messages"})
        assert chat(**body) == BatchRequest("a", CHAT_URL, None, [USER])

    @pytest.mark.parametrize(
        "body",
        [
            {"max_tokens": "x"},
            {"max_tokens": True},
            {"max_tokens": 1.5},
            {"max_tokens": float("nan")},
            {"max_tokens": float("inf")},
            {"max_completion_tokens": "5"},
            {"temperature": "0"},
            {"temperature": False},
            {"temperature": float("nan")},
            {"top_p": [1]},
            {"seed": "a"},
            {"stop": 5},
            {"stop": ["a", 5]},
            {"stop": {}},
            {"stop_token_ids": 5},
            {"stop_token_ids": ["5"]},
            {"ignore_eos": 1},
            {"ignore_eos": "false"},
            {"logit_bias": []},
            {"logit_bias": {"a": 1}},
            {"logit_bias": {"-1": 1}},
            {"logit_bias": {"01": 1}},
            {"logit_bias": {" 1": 1}},
            {"logit_bias": {"\u0661": 1}},
            {"logit_bias": {"9" * 5000: 1}},
            {"logit_bias": {"1": "x"}},
            {"logit_bias": {"1": None}},
            {"logprobs": 1},
            {"logprobs": "true"},
            {"top_logprobs": "2"},
            {"n": "1"},
            {"n": True},
            {"n": 1.0},
            {"stream": "yes"},
            {"stream": 0},
            {"tools": "x"},
            {"tool_choice": 5},
            {"response_format": "text"},
            {"user": 5},
            {"metadata": "x"},
            {"store": "yes"},
            {"service_tier": 1},
            {"parallel_tool_calls": "x"},
        ],
        ids=str,
    )
    def test_a_wrong_type(self, body):
        code, message = refusal(chat(**body))
        assert code == "invalid_params"
        assert message.startswith(next(iter(body)))

    @pytest.mark.parametrize("count", [True, "0", -1, 0.5])
    def test_logprobs_of_a_completion_are_a_count(self, count):
        assert refusal(completion(logprobs=count))[0] == "invalid_params"

    def test_logprobs_that_are_not_asked_for(self):
        assert chat(logprobs=False, top_logprobs=0).params == {}

    @pytest.mark.parametrize(
        "body",
        [
            {"n": 1},
            {"stream": False},
            {"tools": []},
            {"tool_choice": "none"},
            {"guided_choice": [], "structured_outputs": {}},
            {"modalities": ["text"]},
            {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s"},
            {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {}},
            {"parallel_tool_calls": True},
        ],
    )
    def test_what_asks_for_nothing_is_accepted(self, body):
        assert chat(**body) == chat()

    def test_what_asks_for_nothing_in_a_completion(self):
        assert completion(best_of=1, echo=False, suffix="", n=1, stream=False, user="u") == completion()

    @pytest.mark.parametrize(
        "body",
        [
            {"n": 2},
            {"n": 0},
            {"stream": True},
            {"stream_options": {"include_usage": True}},
            {"top_logprobs": 2},
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            {"tool_choice": "auto"},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"functions": [{"name": "f"}]},
            {"modalities": ["text", "audio"]},
            {"reasoning_effort": "low"},
            {"verbosity": "low"},
            {"prediction": {"type": "content", "content": "x"}},
            {"web_search_options": {}},
            {"audio": {"voice": "x", "format": "mp3"}},
            {"guided_grammar": "root ::= x"},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"prompt": "once"},
            {"": 1},
        ],
        ids=str,
    )
    def test_what_is_not_supported_is_named(self, body):
        code, message = refusal(chat(**body))
        key = next(iter(body))
        assert code == "unsupported_parameter"
        assert message.startswith(f"{key or repr(key)}: ")

    @pytest.mark.parametrize(
        ("body", "key"),
        [
            ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
            ({"response_format": {"type": "grammar", "grammar": "root ::= x"}}, "response_format.type"),
            ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ],
    )
    def test_a_form_that_is_not_supported_is_named(self, body, key):
        code, message = refusal(chat(**body))
        assert code == "unsupported_parameter" and message.startswith(f"{key}: ")

    def test_plain_text_is_honoured_since_the_job_may_ask_for_a_form(self):
        assert chat(response_format={"type": "text"}).params == {"response_format": None}

    @pytest.mark.parametrize("form", [{}, {"type": "json_schema", "json_schema": {}}], ids=str)
    def test_a_malformed_response_format(self, form):
        code, message = refusal(chat(response_format=form))
        assert code == "invalid_response_format" and message.startswith("response_format.")

    @pytest.mark.parametrize(
        "body", [{"logprobs": 2}, {"best_of": 2}, {"echo": True}, {"suffix": "x"}, {"n": 3}, {"messages": [USER]}]
    )
    def test_what_is_not_supported_in_a_completion(self, body):
        code, message = refusal(completion(**body))
        assert code == "unsupported_parameter" and message.startswith(next(iter(body)))

    def test_every_unknown_key_is_named_with_a_hint(self):
        message = refusal(chat(temperatur=0, max_token=5, best_of=1, zzz=1))[1]
        assert "temperatur: not supported by /v1/chat/completions here; did you mean temperature?" in message
        assert "did you mean max_tokens?" in message
        assert "best_of: not supported by /v1/chat/completions here; belongs to /v1/completions" in message
        assert "zzz: not supported by /v1/chat/completions here; leave it out" in message

    def test_messages_are_short_whatever_the_line_holds(self):
        assert len(refusal(chat(**{f"key{i}" * 100: 1 for i in range(500)}))[1]) < 2000
        assert len(refusal(chat(max_tokens="9" * 10_000))[1]) < 200
        assert len(refusal(chat(n=10**4000))[1]) < 200
        assert len(refusal(chat(model="m" * 10_000))[1]) < 300


@pytest.mark.parametrize(
    ("url", "types"),
    [
        (CHAT_URL, chat_create_params.CompletionCreateParamsNonStreaming),
        (COMPLETIONS_URL, completion_create_params.CompletionCreateParamsNonStreaming),
    ],
)
def test_every_key_of_the_api_is_honoured_accepted_or_refused_by_name(url, types):
    for key in types.__annotations__:
        request = parse_line(line(url, **{key: object()}), MODEL)  # a value of no JSON type passes nowhere
        assert request.error is not None, key
        assert request.error[1].startswith(f"{key}: ") or key in request.error[1], key
        if key not in BODY_KEYS[url]:
            assert request.error[0] == "unsupported_parameter"
