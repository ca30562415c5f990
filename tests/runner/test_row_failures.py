"""Rows that fail, stall or never stop, among rows that do neither."""

from __future__ import annotations

import pytest

from specrun.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from specrun.engine.testing import WordTokenizer
from specrun.runner.outputs import OutputText
from specrun.runner.pipeline import Ending
from tests.runner.pipelines import StubPipeline


@pytest.mark.parametrize("order", ["auto", "input"])
def test_a_poison_row_fails_alone(order):
    pipeline = StubPipeline(order, fail_on="BOOM", max_num_seqs=32, seed=1)
    assert pipeline.run([f"{i} BOOM" if i == 500 else f"{i} ok" for i in range(1000)]) is Ending.DONE
    rows = pipeline.rows.by_index()
    assert [row.row_index for row in rows] == list(range(1000))
    assert [row.row_index for row in rows if row.error_code] == [500]
    assert (rows[500].text, rows[500].finish_reason, rows[500].error_code) == (None, "error", "engine_error")


def test_failing_from_the_first_row_on_ends_the_run():
    pipeline = StubPipeline(fail_on="BOOM", max_num_seqs=16)
    assert pipeline.run([f"{i} BOOM" for i in range(50_000)]) is Ending.ABORTED
    assert 100 <= len(pipeline.rows.written) <= 600


@pytest.mark.parametrize("order", ["auto", "input"])
def test_a_slow_row_keeps_nobody_waiting(order):
    pipeline = StubPipeline(order, slow_on="SLOW", slow_steps=3000, max_num_seqs=16)
    assert pipeline.run(["SLOW"] + [f"word {i}" for i in range(1, 3000)]) is Ending.DONE
    assert sorted(pipeline.rows.order) == list(range(3000))
    assert pipeline.rows.order.index(0) > 1000


@pytest.mark.parametrize("order", ["auto", "input"])
def test_a_slow_row_runs_out_of_time(order):
    pipeline = StubPipeline(order, slow_on="SLOW", slow_steps=1 << 30, request_timeout_s=0.05, sleep_s=0.002)
    prompts = [f"SLOW {i}" if i % 50 == 0 else f"word {i}" for i in range(2000)]
    assert pipeline.run(prompts) is Ending.DONE
    rows = pipeline.rows.by_index()
    assert [row.row_index for row in rows] == list(range(2000))
    assert [row.row_index for row in rows if row.error_code] == list(range(0, 2000, 50))
    assert {row.error_code for row in rows[::50]} == {"timeout"}
    assert (rows[0].text, rows[0].finish_reason, rows[0].token_ids) == (None, "error", None)
    assert rows[0].error_message == "not finished after 0.05 s; raise run.timeout_s or lower max_tokens"
    assert rows[1].text == "word 1"


def test_slow_rows_that_are_left_over_do_not_abort():
    """At the end of a job they are all that runs, and their time ends together."""
    pipeline = StubPipeline(slow_on="SLOW", slow_steps=1 << 30, request_timeout_s=0.2, sleep_s=0.002)
    assert pipeline.run([f"SLOW {i}" if i % 5 == 0 else f"word {i}" for i in range(1000)]) is Ending.DONE
    assert sum(row.error_code == "timeout" for row in pipeline.rows.written) == 200


def test_rows_that_all_run_out_of_time_end_the_run():
    pipeline = StubPipeline(slow_on="SLOW", slow_steps=1 << 30, request_timeout_s=0.01, sleep_s=0.005)
    assert pipeline.run([f"SLOW {i}" for i in range(50_000)]) is Ending.ABORTED
    assert len(pipeline.rows.written) < 1000


def test_endless_repetition_ends_at_max_tokens():
    pipeline = StubPipeline(max_tokens=8)
    pipeline.run(["the " * 40, "an end"])
    first, second = pipeline.rows.by_index()
    assert (first.text, first.finish_reason, first.output_tokens) == ("the " * 7 + "the", "length", 8)
    assert (second.text, second.finish_reason) == ("an end", "stop")


def row_of(tokenizer, token_ids, reason, **values):
    text = OutputText(tokenizer, token_ids=True)
    text.expect([Request(0, [1], SamplingParams())], [None], 0)
    return text.rows([RequestOutput(0, token_ids, reason, **values)])[0]


class Bytes(WordTokenizer):
    """One token a byte; 256 ends the text and has none."""

    def decode_batch(self, rows):
        return [bytes(t for t in row if t < 256).decode("utf-8", "replace") for row in rows]


def test_an_end_at_once_is_an_empty_text_and_no_failure():
    row = row_of(Bytes(), [256], FinishReason.STOP)
    assert (row.text, row.finish_reason, row.output_tokens, row.error_code) == ("", "stop", 1, None)


@pytest.mark.parametrize("length", range(1, 11))
def test_a_text_cut_inside_a_character_is_valid(length):
    ids = list("日本😀".encode())[:length]
    row = row_of(Bytes(), ids, FinishReason.LENGTH)
    assert row.token_ids == ids and row.text is not None
    row.text.encode("utf-8")
    assert "日本😀".startswith(row.text.rstrip("\ufffd"))


def test_a_failed_row_has_a_reason_even_where_the_engine_gives_none():
    row = row_of(Bytes(), [65], FinishReason.ERROR)
    assert (row.text, row.token_ids, row.error_message) == (None, None, "the engine gave no reason")
