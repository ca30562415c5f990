"""How a job is judged by its failed rows, and where it tells of them."""

import pytest


def test_thresholds(job):
    job.jsonl([{"prompt": "BOOM" if i % 50 == 7 else "ok"} for i in range(1000)])
    result = job.run(fail_on="BOOM")
    assert (result.exit_code, result.state, job.is_success) == (2, "done", False)
    assert len(job.rows()) == 1000 and job.report()["num_failed"] == 20
    job.set(errors__max_failed_fraction=0.02)
    result = job.run()
    assert (result.exit_code, job.is_success, job.builder.num_loads) == (0, True, 0)


@pytest.mark.parametrize("prompt", ["BOOM", None])
def test_a_run_of_failures_aborts(job, prompt):
    job.jsonl([{"prompt": "ok"}] * 200 + [{"prompt": prompt}] * 20_000)
    job.set(errors__max_failed_fraction=1.0)
    result = job.run(fail_on="BOOM")
    assert (result.exit_code, result.state, job.is_success) == (2, "aborted", False)
    assert 100 <= job.report()["num_failed"] < 10_000
    assert job.report()["num_ok"] == 200


def test_errors_of_an_aborted_run_are_told(job):
    """Also those of parts that are not whole: their rows wait in the spill."""
    job.jsonl([{"prompt": "ok", "doc": f"d{i}"} for i in range(150)] + [{"prompt": None, "doc": "no"}] * 20_000)
    job.config["input"]["columns"] = {"id": "doc", "prompt": "prompt"}
    job.set(errors__max_failed_fraction=1.0, output__rows_per_part=100_000)
    assert job.run().state == "aborted" and job.rows() == []
    lines = job.error_lines()
    assert len(lines) == job.report()["num_failed"] >= 100
    assert [line["row_index"] for line in lines] == list(range(150, 150 + len(lines)))
    assert {line["error_code"] for line in lines} == {"null_prompt"} and all(line["error_message"] for line in lines)
    assert job.report()["files"]["errors"] == str(job.out / "errors.jsonl")
    job.set(errors__abort_after_consecutive=100_000)
    assert job.run().exit_code == 0
    assert [(line["row_index"], line["id"]) for line in job.error_lines()] == [(i, "no") for i in range(150, 20_150)]


def test_errors_of_a_crash_and_of_a_stop_are_told(job):
    job.jsonl([{"prompt": None if i % 10 == 0 else f"word {i}"} for i in range(300)])
    job.set(errors__max_failed_fraction=0.2, run__order="input")
    with pytest.raises(RuntimeError):
        job.run(raise_on="255", max_num_seqs=16)
    lines = job.error_lines()
    assert [line["row_index"] for line in lines] == list(range(0, 10 * len(lines), 10)) and len(lines) > 20
    assert len(lines) == job.report()["num_failed"]
    assert job.run().exit_code == 0 and len(job.error_lines()) == 30


def test_a_job_that_has_no_failed_row_has_no_errors_file(job):
    job.jsonl([{"prompt": "a"}, {"prompt": None}]).run()
    assert len(job.error_lines()) == 1
    job.jsonl([{"prompt": "a"}]).set(output__if_exists="overwrite")
    assert job.run().exit_code == 0
    assert not (job.out / "errors.jsonl").exists() and "errors" not in job.report()["files"]


@pytest.mark.parametrize(("num_failed", "exit_code"), [(0, 0), (1, 0), (2, 2), (100, 2)])
@pytest.mark.parametrize("num_rows", [100, 1])
def test_the_allowed_share_of_failed_rows_is_allowed(job, num_rows, num_failed, exit_code):
    job.jsonl([{"prompt": None if i < num_failed else "ok"} for i in range(num_rows)])
    job.set(errors__abort_after_consecutive=1000, errors__max_failed_fraction=0.01)
    assert job.run().exit_code == (exit_code if num_rows == 100 else 2 * (num_failed > 0))


def test_no_rows_are_not_too_many_failed_ones(job):
    job.jsonl([]).set(errors__max_failed_fraction=0.0, prompt__template="hello")
    assert job.run().exit_code == 0


def test_rows_that_take_too_long_fail_and_may_be_run_again_with_more_time(job):
    job.jsonl([{"prompt": f"SLOW {i}" if i % 100 == 0 else f"word {i}"} for i in range(300)])
    job.set(run__timeout_s=0.02, errors__max_failed_fraction=0.05)
    assert job.run(slow_on="SLOW", slow_steps=1 << 30, sleep_s=0.002).exit_code == 0
    assert [(line["row_index"], line["error_code"]) for line in job.error_lines()] == [
        (row, "timeout") for row in (0, 100, 200)
    ]
    assert "0.02 s; raise run.timeout_s" in job.error_lines()[0]["error_message"]
    assert job.report()["error_codes"] == {"timeout": 3} and job.report()["finish_reasons"] == {"stop": 297, "error": 3}
    # The limit is none of the job's results: with another one the job is the same.
    job.set(run__timeout_s=None)
    assert job.run().was_done


def test_failures_between_good_rows_do_not_abort(job):
    job.jsonl([{"prompt": None if i % 2 else "ok"} for i in range(1000)])
    job.set(errors__max_failed_fraction=0.5, errors__abort_after_consecutive=2)
    assert job.run().exit_code == 0
