"""The step loop from outside: what it draws, what it refuses, what it counts."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.engine import EngineError, FinishReason, Request, SamplingParams, StepRecord
from specrun.policies import SpecDecision, SpeculationPolicy, StepState
from tests.engine.tiny_models import EOS, Budget, OracleDrafter, make_requests, run, tiny_engine


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], {}, "no tokens"),
        ([5] * 128, {}, "max_model_len"),
        ([5, 97], {}, "vocabulary"),
        ([5, -1], {}, "vocabulary"),
        ([5], {"logit_bias": {97: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": (97,), "min_tokens": 2}, "stop_token_ids"),
        ([5], {"stop": ("x",)}, "stop strings"),
        ([5] * 40, {"max_tokens": 60}, "KV cache"),
    ],
)
def test_a_request_that_cannot_run_is_an_error_of_its_own(prompt, params, named):
    engine = tiny_engine("llama", num_kv_blocks=5)
    good = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [
        Request(0, [5, 6], good),
        Request(1, prompt, SamplingParams(**{"max_tokens": 8, **params})),
        Request(2, [7], good),
    ]
    outputs = run(engine, requests)
    assert outputs[1].finish_reason is FinishReason.ERROR and named in (outputs[1].error or "")
    assert [len(outputs[i].token_ids) for i in (0, 2)] == [4, 4]


def test_requests_are_drawn_only_as_room_comes_up():
    engine = tiny_engine("llama", max_num_seqs=2)
    drawn = 0

    def source():
        nonlocal drawn
        for i in range(20):
            drawn += 1
            yield Request(i, [5 + i], SamplingParams(max_tokens=5, ignore_eos=True))

    for num_finished, _ in enumerate(engine.run(source()), start=1):
        assert drawn <= num_finished + 2 * engine.max_num_seqs
    assert num_finished == 20


@pytest.mark.parametrize("budget", [-3, 0, 99])
def test_budgets_out_of_range_are_clipped_and_counts_agree(budget):
    prompts = [[5, 6, 7], [8, 9], [10]]
    params = [SamplingParams(max_tokens=9, ignore_eos=True)] * 3
    expected = {i: o.token_ids for i, o in run(tiny_engine("llama"), make_requests(prompts, params)).items()}
    engine = tiny_engine("llama", Budget(budget), OracleDrafter(expected, 1.0, 0))
    records: list[StepRecord] = []
    engine.on_step = records.append
    outputs = run(engine, make_requests(prompts, params))
    stats = engine.stats
    assert {i: o.token_ids for i, o in outputs.items()} == expected
    assert stats.num_generation_tokens == sum(r.num_generation_tokens for r in records) == 27
    assert stats.num_draft_tokens == sum(o.num_draft_tokens for o in outputs.values())
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos) == stats.num_draft_tokens
    assert stats.num_steps == len(records) == (3 if budget == 99 else 9)
    assert bool(stats.spec_on_s) == (budget == 99) and stats.num_prompt_tokens == 6


def test_an_exception_from_on_step_leaves_run():
    engine = tiny_engine("llama")

    def stop(record):
        raise InterruptedError

    engine.on_step = stop
    with pytest.raises(InterruptedError):
        list(engine.run([Request(0, [5], SamplingParams())]))


def test_a_policy_that_forgets_a_request_is_named():
    class TooShort(SpeculationPolicy):
        def decide(self, state: StepState) -> SpecDecision:
            return SpecDecision(np.zeros(state.num_running + 1, np.int32), "one too many")

    engine = tiny_engine("llama", TooShort(), OracleDrafter({}, 0.5, seed=0))
    with pytest.raises(EngineError, match=r"TooShort\.decide returned .* shape \(2,\) for 1 requests"):
        run(engine, make_requests([[5, 6]], [SamplingParams(max_tokens=4, ignore_eos=True)]))


@pytest.mark.parametrize("budget", [0, 4])
def test_end_of_sequence_as_the_first_token(budget):
    """Drafts that go on past it are dropped."""
    first = SamplingParams(max_tokens=9, logit_bias={EOS: 1000.0})
    on_and_on = SamplingParams(max_tokens=9, logit_bias={EOS: 1000.0}, ignore_eos=True)
    drafter = OracleDrafter({0: [EOS] * 9, 1: [EOS] * 9}, 1.0, seed=0)
    outputs = run(tiny_engine("llama", Budget(budget), drafter), make_requests([[5, 6], [7]], [first, on_and_on]))
    assert (outputs[0].token_ids, outputs[0].finish_reason) == ([EOS], "stop")
    assert (outputs[1].token_ids, outputs[1].finish_reason) == ([EOS] * 9, "length")
