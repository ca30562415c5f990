"""run_job from input files to committed parts, on the stub engine."""

import gc
import random
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.engine.errors import ModelError
from specrun.jobs.errors import ConfigError, InputError, StorageError, TemporaryError
from specrun.jobs.fingerprint import Fingerprint
from specrun.jobs.folder import OutputFolder
from specrun.jobs.index import JobIndex
from specrun.jobs.ledger import Ledger
from specrun.jobs.outputs import OutputWriter
from specrun.jobs.shard import Shard
from specrun.runner.run import run_job


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    gc.collect()
    assert threading.active_count() == before


def test_jsonl_in_input_order_with_metrics(job):
    job.jsonl([{"prompt": f"word {i}", "doc": f"d{i}", "task": "t"} for i in range(250)])
    job.config["input"]["columns"] = {"id": "doc", "prompt": "prompt"}
    result = job.run(seed=3, num_draft_tokens=2)
    assert (result.exit_code, result.state, job.is_success) == (0, "done", True)
    rows = job.rows()
    assert [row["row_index"] for row in rows] == list(range(250))
    assert rows[7] == {
        "row_index": 7,
        "id": "d7",
        "task": "t",
        "text": "word 7",
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_tokens": 2,
        "output_tokens": 2,
        "error_code": None,
        "error_message": None,
    }
    report = job.report()
    assert report == result.report
    assert report["num_ok"] == 250 and report["num_generation_tokens"] == 500
    assert report["num_drafts"] == 250 and report["acceptance_rate"] == 0.5
    assert pq.read_table(job.out / "metrics" / "job.parquet").to_pylist()[0]["num_ok"] == 250
    steps = pq.read_table(job.out / "metrics" / "steps").to_pydict()
    assert sum(steps["num_generation_tokens"]) == 500
    prometheus = (job.out / "metrics.prom").read_text()
    assert "specrun_generation_tokens_total 500.0" in prometheus
    assert 'specrun_rows_total{outcome="stop"} 250.0' in prometheus


def test_parquet_with_token_ids_and_logprobs(job):
    job.parquet(pa.table({"prompt": ["a b", "c d e"], "rank": pa.array([1, 2], pa.int8())}))
    job.set(output__token_ids=True, sampling__logprobs=0)
    assert job.run().exit_code == 0
    first, second = job.rows()
    assert first["rank"] == 1 and len(first["token_ids"]) == 2 and first["logprobs"] == [0, 0]
    assert second["text"] == "c d e"


def test_a_row_may_ask_for_logprobs_where_the_job_does_not(job):
    job.jsonl([{"prompt": "a b", "logprobs": 0}, {"prompt": "c"}])
    assert job.run().exit_code == 0
    assert [row["logprobs"] for row in job.rows()] == [[0, 0], None]


def test_bad_rows_become_output_rows(job):
    job.jsonl([{"prompt": "a"}, {"prompt": None}, {"prompt": ""}, "{", {"prompt": "   "}, {"prompt": "BOOM x"}])
    job.set(errors__max_failed_fraction=1.0)
    assert job.run(fail_on="BOOM").exit_code == 0
    rows = job.rows()
    codes = [row["error_code"] for row in rows]
    assert codes == [None, "null_prompt", "empty_prompt", "parse_error", "empty_prompt", "engine_error"]
    assert all(row["text"] is None and row["finish_reason"] == "error" and row["error_message"] for row in rows[1:])
    assert job.report()["error_codes"] == {"null_prompt": 1, "empty_prompt": 2, "parse_error": 1, "engine_error": 1}


def test_a_rows_own_sampling_wins(job):
    prompt = "one two three four five"
    job.jsonl(
        [
            {"prompt": prompt, "max_tokens": 2},
            {"prompt": prompt, "max_tokens": None},
            {"prompt": prompt, "max_tokens": 0},
            {"prompt": prompt, "top_p": 2},
        ]
    )
    job.set(errors__max_failed_fraction=1.0, sampling__max_tokens=4)
    job.run()
    rows = job.rows()
    assert [row["text"] for row in rows] == ["one two", "one two three four", None, None]
    assert [row["finish_reason"] for row in rows] == ["length", "length", "error", "error"]
    assert rows[2]["error_code"] == "invalid_params" and "max_tokens" in rows[2]["error_message"]
    assert "top_p" in rows[3]["error_message"]


def test_messages_go_through_the_chat_template(job):
    job.jsonl([{"chat": [{"role": "user", "content": "hi"}]}])
    job.config["input"]["columns"] = {"messages": "chat"}
    assert job.run(has_chat_template=True).exit_code == 0
    assert job.rows()[0]["text"] == "user: hi assistant:"


def test_a_system_prompt_needs_a_chat_template(job):
    job.prompts(1).set(prompt__system="be brief")
    with pytest.raises(ConfigError, match=r"prompt\.system needs a chat template"):
        job.run()
    assert job.run(has_chat_template=True).exit_code == 0
    assert job.rows()[0]["text"] == "system: be brief user: word 0 assistant:"


def test_a_finished_job_is_not_run_again(job):
    job.prompts(30).run()
    files = {path: path.stat().st_mtime_ns for path in job.out.rglob("*")}
    result = job.run()
    assert (result.exit_code, result.was_done, job.builder.num_loads) == (0, True, 0)
    assert result.report["num_ok"] == 30
    assert files == {path: path.stat().st_mtime_ns for path in job.out.rglob("*")}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_no_rows_load_no_model(job, kind):
    if kind == "jsonl":
        job.jsonl([])
        job.config["prompt"] = {"template": "hello"}
    else:
        job.parquet(pa.table({"prompt": pa.array([], pa.string())}))
    result = job.run()
    assert (result.exit_code, job.builder.num_loads, job.is_success) == (0, 0, True)
    assert job.rows() == [] and job.report()["rows_per_s"] is not None


def test_resume_after_a_crash_of_the_engine(job):
    job.jsonl([{"prompt": f"word {i}"} for i in range(500)] + [{"prompt": "CRASH"}] + [{"prompt": "w"}] * 99)
    with pytest.raises(RuntimeError, match="holds the token"):
        job.run(raise_on="CRASH", max_num_seqs=64)
    assert job.report()["state"] == "failed" and job.report()["exit_code"] == 70
    num_done = job.report()["num_rows"]
    assert 300 < num_done < 600 and not job.is_success
    result = job.run()
    assert result.exit_code == 0 and job.report()["attempt"] == 2
    assert [row["row_index"] for row in job.rows()] == list(range(600))
    # Rows of the first attempt are not run again, those that were in flight are.
    assert job.report()["num_steps"] > 0
    second = [s for s in pq.read_table(job.out / "metrics" / "steps").to_pylist() if s["attempt"] == 2]
    assert sum(step["num_running"] for step in second) == 600 - num_done


def test_a_changed_job_is_refused(job):
    job.prompts(3).run()
    job.set(sampling__max_tokens=5)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: 16 -> 5"):
        job.run()


def test_the_order_of_running_does_not_show(job):
    rng = random.Random(5)
    rows = [
        {"prompt": None if i % 97 == 0 else " ".join([rng.choice(["a b c", "d e f"])] * rng.randrange(1, 9)), "doc": i}
        for i in range(900)
    ]
    job.jsonl(rows).set(errors__max_failed_fraction=1.0, sampling__seed=3, output__token_ids=True)
    found, orders = [], []
    for order in ("auto", "input"):
        job.set(run__order=order, output__path=str(job.folder / order))
        job.out = job.folder / order
        assert job.run(seed=1, max_num_seqs=16).exit_code == 0
        found.append([{k: v for k, v in row.items() if k != "token_ids"} for row in job.rows()])
        orders.append(job.builder.ran)
        found[-1].append(job.error_lines())
    assert found[0] == found[1] and sorted(orders[0]) == orders[1] != orders[0]


def test_the_order_may_change_between_attempts(job):
    job.prompts(500).set(run__order="auto")
    with pytest.raises(RuntimeError):
        job.run(raise_on="321", max_num_seqs=16, seed=2)
    job.set(run__order="input")
    assert job.run().exit_code == 0
    assert [row["text"] for row in job.rows()] == [f"word {i}" for i in range(500)]


def test_the_time_limit_saves_progress(job):
    job.prompts(400)
    result = job.preempt(30, max_num_seqs=16)
    assert (result.exit_code, result.state, job.is_success) == (75, "preempted", False)
    assert result.stop_reason is not None and "max_runtime_s" in result.stop_reason
    assert 0 < job.report()["num_rows"] < 400
    assert job.run().exit_code == 0
    assert [row["row_index"] for row in job.rows()] == list(range(400))


def test_grace_has_an_end(job):
    job.prompts(64).set(run__max_runtime_s=0.01, run__grace_s=0)
    assert job.run(sleep_s=0.1, max_num_seqs=64).exit_code == 75
    assert job.report()["num_rows"] == 0


def test_a_failing_writer_ends_the_run(job, monkeypatch):
    def full(self, rows):
        if rows:
            raise StorageError("disk full; free some space")

    monkeypatch.setattr(OutputWriter, "write", full)
    job.prompts(20_000)
    with pytest.raises(StorageError, match="disk full"):
        job.run()


def test_a_failing_reader_ends_the_run_and_keeps_what_it_read(job, monkeypatch):
    job.parquet(pa.table({"prompt": [f"word {i}" for i in range(5000)]}))
    original = OutputWriter.range_done

    def break_off(self, start, stop):
        if start > 2000:
            raise InputError("in.parquet: cannot be read")
        return original(self, start, stop)

    monkeypatch.setattr(OutputWriter, "range_done", break_off)
    with pytest.raises(InputError, match="cannot be read"):
        job.run()
    assert job.report()["exit_code"] == 65 and job.report()["num_rows"] > 1000


def test_an_engine_that_does_not_load(job):
    job.prompts(3)
    with pytest.raises(ModelError, match="no such device"):
        job.run(load_error="no such device")
    assert job.report()["state"] == "failed" and job.report()["exit_code"] == 69


def test_one_run_at_a_time(job):
    job.prompts(3)
    fingerprint = Fingerprint({})
    index = JobIndex.of(fingerprint, Shard(), 3, 100, {})
    ledger = Ledger(OutputFolder(str(job.out)), Shard(), index, fingerprint)
    ledger.open()
    try:
        with pytest.raises(TemporaryError):
            job.run()
    finally:
        ledger.close()


def test_a_bad_job_level_parameter_is_a_config_error(job):
    job.prompts(1).set(sampling__top_p=3)
    with pytest.raises(ConfigError, match=r"sampling\.top_p: must be above 0"):
        job.run()


def test_the_real_builder_names_a_model_that_is_not_there(job):
    job.prompts(1).set(model__path="./no/such/model")
    with pytest.raises(ModelError, match="does not exist"):
        run_job(job.spec)
