"""The stub engine and its tokenizer keep the manners of the real ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from specrun.engine.request import FinishReason, Request, SamplingParams
from specrun.engine.testing import FIRST_WORD, StubEngine, WordTokenizer
from specrun.engine.trace import StepRecord


def requests(count, prompt=(1, 2, 3), **params):
    return [Request(i, list(prompt), SamplingParams(**params)) for i in range(count)]


def test_echo():
    outputs = list(StubEngine().run(requests(3, max_tokens=2)))
    assert [o.token_ids for o in outputs] == [[1, 2]] * 3 and outputs[0].finish_reason is FinishReason.LENGTH
    assert next(StubEngine().run(requests(1))).finish_reason is FinishReason.STOP


def test_draws_no_more_than_it_can_hold():
    drawn: list[Request] = []

    def draw():
        for request in requests(50):
            drawn.append(request)
            yield request

    order = []
    for output in StubEngine(max_num_seqs=4, seed=1).run(draw()):
        order.append(output.request_id)
        assert len(drawn) - len(order) < 4 or len(drawn) == 50
    assert sorted(order) == list(range(50)) and order != sorted(order)


def test_errors_and_crashes():
    engine = StubEngine(fail_on=2)
    (output,) = engine.run(requests(1))
    assert output.finish_reason is FinishReason.ERROR and output.error
    with pytest.raises(RuntimeError, match="request 0 holds the token 3"):
        list(StubEngine(raise_on=3).run(requests(1)))


def test_counts_and_steps():
    engine = StubEngine(max_num_seqs=10, num_draft_tokens=4)
    steps: list[StepRecord] = []
    engine.on_step = steps.append
    list(engine.run(requests(25)))
    assert [step.num_running for step in steps] == [10, 10, 5]
    assert engine.stats.num_generation_tokens == 75 == sum(step.num_generation_tokens for step in steps)
    assert (engine.stats.num_drafts, engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens) == (25, 100, 50)


def test_words_and_past_its_vocabulary_bytes():
    tokenizer = WordTokenizer(max_words=2)
    texts = ["a b a", "a né b", "", "c", " a  b "]
    rows = tokenizer.encode_batch(texts)
    assert [len(row) for row in rows] == [3, 6, 0, 2, 2]
    assert tokenizer.decode_batch(rows) == ["a b a", "a né b", "", "c", "a b"]
    pieces = tokenizer.token_bytes()
    assert b"".join(pieces[token] for token in rows[1]) == " a né b".encode()
    assert tokenizer.token_id("b") == FIRST_WORD + 1


def test_needs_no_torch():
    code = "import sys, specrun.engine.testing; sys.exit('torch' in sys.modules)"
    source = Path(__file__).parent.parent.parent / ".src"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}).returncode == 0


def test_a_slow_request_lets_the_others_pass():
    engine = StubEngine(max_num_seqs=2, slow_on=9, slow_steps=4)
    slow, *others = requests(9)
    slow.prompt_token_ids = [9]
    outputs = [output.request_id for output in engine.run([slow, *others])]
    assert outputs[:3] == [1, 2, 3] and set(outputs[3:5]) == {0, 4} and outputs[5:] == [5, 6, 7, 8]


def test_a_slow_request_runs_out_of_time():
    engine = StubEngine(slow_on=9, slow_steps=1 << 30, sleep_s=0.001, request_timeout_s=0.02)
    slow, other = requests(2)
    slow.prompt_token_ids = [9]
    first, last = engine.run([slow, other])
    assert (first.request_id, first.finish_reason) == (1, FinishReason.STOP)
    assert (last.request_id, last.finish_reason) == (0, FinishReason.TIMEOUT)
    assert (last.token_ids, last.error) == ([], "not finished after 0.02 s")


def test_what_has_finished_is_handed_over_before_an_exception_leaves_run():
    engine = StubEngine()

    def stop(record: StepRecord) -> None:
        raise InterruptedError

    engine.on_step = stop
    outputs = []
    with pytest.raises(InterruptedError):
        for output in engine.run(requests(2)):
            outputs.append(output.request_id)
    assert outputs == [0, 1]


def test_conversations():
    tokenizer = WordTokenizer(has_chat_template=True)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]
    assert tokenizer.render(messages) == "user: hi\nassistant: I\nassistant:"
    assert tokenizer.render(messages, continue_final_message=True) == "user: hi\nassistant: I"
