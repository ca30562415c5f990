"""A request whose time is over leaves, wherever it stands, and those beside it never notice."""

from __future__ import annotations

import random

import pytest

from specrun.engine import FinishReason, Request, SamplingParams, StepRecord
from specrun.engine.engine import Engine
from specrun.engine.request import RequestStatus
from tests.engine.tiny_models import (
    Budget,
    OracleDrafter,
    RandomPolicy,
    essence,
    letters,
    make_prompts,
    make_requests,
    one_at_a_time,
    run,
    tiny_engine,
)

LONG = SamplingParams(max_tokens=80, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def let_time_pass(engine: Engine, at_step: int) -> None:
    """A hundred seconds of work, all in one step."""

    def on_step(record: StepRecord) -> None:
        if record.step == at_step:
            engine.stats.busy_s += 100

    engine.on_step = on_step


def test_only_those_that_have_begun_are_out_of_time():
    engine = tiny_engine("llama", max_num_seqs=2, request_timeout_s=50.0)
    let_time_pass(engine, at_step=9)
    requests = make_requests([[5, 6], [7], [8, 9], [10]], [SHORT, LONG, LONG, SHORT])
    outputs = run(engine, requests)
    assert [outputs[i].finish_reason for i in range(4)] == ["length", "timeout", "timeout", "length"]
    assert outputs[1].error == "not finished after 50 s" and 0 < len(outputs[1].token_ids) < 80
    assert engine.blocks.num_free == engine.blocks.num_blocks and not engine.scheduler.has_unfinished


def test_without_a_limit_nothing_is_out_of_time():
    engine = tiny_engine("llama")
    let_time_pass(engine, at_step=2)
    assert run(engine, make_requests([[5]], [LONG]))[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("at_step", range(1, 14, 3))
@pytest.mark.parametrize("budget", [0, 3, None])
def test_others_are_not_disturbed(at_step, budget):
    """Prompts share prefixes that the lost requests were computing, slots are reused, drafts come and go."""
    prompts = make_prompts(12, seed=at_step)
    rng = random.Random(at_step)
    params = [SamplingParams(max_tokens=rng.randrange(1, 60), temperature=i % 2 * 0.8, seed=i) for i in range(12)]
    alone = one_at_a_time("qwen3", prompts, params)
    drafter = OracleDrafter({i: output.token_ids for i, output in alone.items()}, 0.7, seed=at_step)
    engine = tiny_engine(
        "qwen3",
        RandomPolicy(at_step) if budget is None else Budget(budget),
        drafter,
        letters(),
        max_num_seqs=4,
        max_num_batched_tokens=12,
        num_kv_blocks=20,
        request_timeout_s=50.0,
    )
    let_time_pass(engine, at_step)
    outputs = run(engine, make_requests(prompts, params))
    lost = [i for i, output in outputs.items() if output.finish_reason is FinishReason.TIMEOUT]
    assert len(outputs) == 12 and 0 < len(lost) <= 5
    for i, output in outputs.items():
        if i in lost:
            assert output.token_ids == alone[i].token_ids[: len(output.token_ids)]
        else:
            assert essence(output) == essence(alone[i])
    assert engine.blocks.num_free == 20


def test_time_is_over_for_one_that_waits_after_a_preemption():
    prompts = [[5 + i] * 30 for i in range(4)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=i, temperature=1.0) for i in range(4)]
    alone = one_at_a_time("llama", prompts, params)
    engine = tiny_engine("llama", num_kv_blocks=12, request_timeout_s=50.0)
    preempted: list[Request] = []

    def on_step(record: StepRecord) -> None:
        waiting = [r for r in engine.scheduler.waiting if r.status is RequestStatus.PREEMPTED]
        if waiting and not preempted:
            preempted.extend(waiting)
            for request in waiting:
                assert request.began_at_s is not None
                request.began_at_s -= 100

    engine.on_step = on_step
    outputs = run(engine, make_requests(prompts, params))
    lost = {request.request_id for request in preempted}
    assert lost and {i for i, o in outputs.items() if o.finish_reason is FinishReason.TIMEOUT} == lost
    assert all(essence(outputs[i]) == essence(alone[i]) for i in range(4) if i not in lost)
    assert engine.blocks.num_free == 12 and not engine.scheduler.has_unfinished


def test_the_last_request_may_be_the_one_that_is_lost():
    engine = tiny_engine("llama", request_timeout_s=1e-9)
    outputs = run(engine, make_requests([[5], [6]], [LONG, SHORT]))
    assert [output.finish_reason for output in outputs.values()] == ["timeout", "timeout"]
    assert engine.stats.num_steps == 1


def test_what_has_finished_is_handed_over_before_an_exception_from_on_step_leaves_run():
    engine = tiny_engine("llama")

    def stop(record: StepRecord) -> None:
        if record.step == 3:
            raise InterruptedError

    engine.on_step = stop
    outputs = []
    with pytest.raises(InterruptedError):
        for output in engine.run(make_requests([[5], [6], [7]], [SHORT, LONG, SHORT])):
            outputs.append(output.request_id)
    assert sorted(outputs) == [0, 2]
