"""`specrun retry` of a job in shards, and from another place than the job was submitted from."""

import json
import os
import shutil

import pytest

from specrun.jobs.errors import ConfigError, TemporaryError
from specrun.runner.cli import run_command
from tests.runner.failed_jobs import BOOM, NULL, NUM_ROWS, assert_merged, fill


@pytest.fixture
def failed(job):
    return fill(job)


def test_all_shards_of_a_job(failed):
    for index in range(3):
        failed.run_shard(index, 3, fail_on="BOOM")
    assert not failed.is_success
    assert failed.retry().exit_code == 0 and sorted(failed.builder.ran) == BOOM
    assert_merged(failed)
    assert failed.is_success and failed.report()["shards"] == 3


def test_one_shard_of_a_job(failed):
    for index in range(3):
        failed.run_shard(index, 3, fail_on="BOOM")
    start, stop = NUM_ROWS // 3, 2 * NUM_ROWS // 3
    result = failed.retry(overrides=("run.shard=1/3",))
    assert result.exit_code == 2 and sorted(failed.builder.ran) == [i for i in BOOM if start <= i < stop]
    assert_merged(failed, len(NULL) + len([i for i in BOOM if not start <= i < stop]))
    with pytest.raises(ConfigError, match=r"has 3 shard\(s\), not 4"):
        failed.retry(overrides=("run.shard=1/4",))
    assert failed.retry().exit_code == 0
    assert_merged(failed)


def test_only_shards_that_need_it(failed):
    failed.jsonl([{"prompt": f"BOOM {i}" if i in (490, 495) else f"word {i}"} for i in range(NUM_ROWS)])
    for index in range(3):
        failed.run_shard(index, 3, fail_on="BOOM")
    assert failed.retry().exit_code == 0
    attempts = [json.loads(p.read_bytes())["attempt"] for p in sorted(failed.out.glob(".specrun/*/manifest.json"))]
    assert attempts == [1, 1, 2]


def test_shards_are_retried_from_an_indexed_job(failed, monkeypatch):
    """The pod's own index does not count: `retry` is for the whole job."""
    for index in range(2):
        failed.run_shard(index, 2, fail_on="BOOM")
    monkeypatch.setenv("JOB_COMPLETIONS", "7")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "6")
    assert failed.retry().exit_code == 0
    assert_merged(failed)


def test_a_sharded_retry_that_stopped_goes_on(failed):
    for index in range(3):
        failed.run_shard(index, 3, fail_on="BOOM")
    with pytest.raises(RuntimeError):
        failed.retry(raise_on="307", max_num_seqs=2)
    first = failed.builder.ran
    assert failed.retry().exit_code == 0
    assert set(first) | set(failed.builder.ran) == set(BOOM)
    assert_merged(failed)


def test_a_shard_that_is_not_done(failed):
    for index in (0, 2):
        failed.run_shard(index, 3, fail_on="BOOM")
    with pytest.raises(TemporaryError, match="is not finished"):
        failed.retry()
    assert failed.run_shard(1, 3).exit_code == 2
    assert failed.retry().exit_code == 0
    assert_merged(failed)


def test_from_another_working_directory(failed, monkeypatch, tmp_path_factory):
    """Paths in the job file are relative to where it was submitted."""
    monkeypatch.chdir(failed.folder)
    failed.config["input"]["path"], failed.config["output"]["path"] = "in.jsonl", "out"
    failed.run(fail_on="BOOM")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert failed.retry().exit_code == 0
    assert_merged(failed)
    assert list(elsewhere.iterdir()) == []


def test_relative_to_the_working_directory(failed, monkeypatch):
    failed.run(fail_on="BOOM")
    monkeypatch.chdir(failed.out)
    assert run_command(["retry", "."], failed.stub()) == 0
    assert_merged(failed)
    monkeypatch.chdir(failed.folder)
    assert run_command(["retry", "out/", "--code", "null_prompt"], failed.stub()) == 0
    assert_merged(failed)


@pytest.mark.parametrize("name", ["moved", "20240131", "true", "${HOME}", "a: b", "[x]", "sp ace"])
def test_an_output_that_was_moved(failed, monkeypatch, name):
    failed.run(fail_on="BOOM")
    moved = failed.folder / name
    shutil.move(failed.out, moved)
    failed.out = moved
    monkeypatch.chdir(failed.folder)
    assert run_command(["retry", name], failed.stub()) == 0
    assert_merged(failed)
    assert str(moved / "data") == failed.report()["files"]["data"] or failed.report()["files"]["data"] == f"{name}/data"
    assert sorted(os.listdir(failed.folder)) == sorted(["in.jsonl", "job.yaml", name])


def test_a_variable_that_is_not_set(failed, monkeypatch, capsys):
    monkeypatch.setenv("SOME_SUFFIX", "!")
    failed.set(prompt__template="{{ prompt }} ${SOME_SUFFIX}").jsonl([{"prompt": "BOOM"}, {"prompt": "a"}])
    failed.run(fail_on="BOOM")
    monkeypatch.delenv("SOME_SUFFIX")
    assert run_command(["retry", str(failed.out)], failed.stub()) == 78
    err = capsys.readouterr().err
    assert "job.resolved.yaml: prompt.template: environment variable SOME_SUFFIX is not set" in err
    monkeypatch.setenv("SOME_SUFFIX", "?")
    assert run_command(["retry", str(failed.out)], failed.stub()) == 78
    assert "prompt.template" in capsys.readouterr().err
    monkeypatch.setenv("SOME_SUFFIX", "!")
    assert run_command(["retry", str(failed.out)], failed.stub()) == 0
    assert [row["text"] for row in failed.rows()] == ["BOOM !", "a !"]


def test_another_input(failed):
    failed.run(fail_on="BOOM")
    failed.prompts(NUM_ROWS)
    with pytest.raises(ConfigError, match="another configuration: input file"):
        failed.retry()
