"""`specrun calibrate` on a tiny random llama, and the check that a profile fits a job."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml

from specrun.jobs.errors import ConfigError, OutputError
from specrun.jobs.spec import JobSpec
from specrun.policies.cost_model import CostModel
from specrun.runner.build import ModelBuilder
from specrun.runner.calibrate import batch_sizes, draft_lengths, parse_lengths, run_calibration
from specrun.runner.cli import run_command
from specrun.runner.fingerprint import pin
from specrun.runner.profile import profile_identity, read_profile, write_profile
from tests.runner.measured_costs import measured_costs
from tests.runner.word_models import save_word_model

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "far"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("model"), WORDS, size=1)


def write_job(folder: Path, model_folder: Path, **sections: dict[str, Any]) -> Path:
    rows = [{"prompt": " ".join(WORDS[i : i + 6])} for i in range(3)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(model_folder), "dtype": "float32"},
        "input": {"path": str(folder / "in.jsonl")},
        "speculation": {"method": "ngram", "max_draft_tokens": 3},
        "sampling": {"max_tokens": 40},
        "output": {"path": str(folder / "out")},
        "engine": {"device": "cpu", "max_num_seqs": 4},
    }
    for name, values in sections.items():
        job[name] = {**job.get(name, {}), **values}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def test_every_batch_size_and_length_is_measured_and_predicted(tmp_path, model):
    spec = JobSpec.load(write_job(tmp_path, model))
    calibration = run_calibration(spec, None, None, 6, ModelBuilder(tmp_path))
    cells = {(cell.batch, cell.num_draft_tokens): cell for cell in calibration.cells}
    assert list(cells) == [(batch, length) for batch in (1, 2, 4) for length in (0, 1, 2, 3)]
    assert all(cell.num_steps >= 6 and cell.step_s > 0 and cell.predicted_step_s > 0 for cell in calibration.cells)
    assert {cells[batch, 0].num_rows for batch in (1, 2, 4)} == {1, 2, 4}
    assert all(cells[batch, 3].predicted_draft_s > 0 for batch in (1, 2, 4))
    assert calibration.costs.facts()["cost_steps"] >= len(cells) * 6
    assert "| draft tokens |" in calibration.text() and "(median)" in calibration.text()


def test_the_command_saves_a_profile_that_its_job_accepts(tmp_path, model, capsys):
    job, profile = write_job(tmp_path, model), tmp_path / "new" / "profile.json"
    options = ["--batch", "2", "--draft-tokens", "2", "--steps", "3", "--rows", "2"]
    assert run_command(["calibrate", str(job), "--save", str(profile), *options]) == 0
    out, err = capsys.readouterr()
    assert "| draft tokens |" in out and f"profile: {profile}" in out
    assert "specrun: batch 2: drafts of 0, 2 tokens\n" in err and not (tmp_path / "out").exists()
    assert run_command(["calibrate", str(job), "--save", str(profile), *options, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [cell["num_draft_tokens"] for cell in content["cells"]] == [0, 2]

    builder = ModelBuilder(tmp_path)
    spec = pin(JobSpec.load(job), builder.identity(JobSpec.load(job)))
    costs = read_profile(profile, profile_identity(spec))
    assert CostModel.from_json(costs).is_ready
    stored = json.loads(profile.read_text())
    assert stored["identity"]["device"] == "cpu" and stored["identity"]["dtype"] == "float32"
    assert stored["identity"]["model"].startswith("sha256:") and stored["identity"]["method"] == "ngram"


def test_a_profile_of_something_else_is_refused_by_name(tmp_path):
    path, identity = tmp_path / "p.json", {"machine": "a", "model": "m", "dtype": "float32"}
    write_profile(path, identity, measured_costs(), {})
    assert read_profile(path, {"machine": "a", "model": "m"}) == read_profile(path)
    with pytest.raises(ConfigError, match=r"profile: .*p\.json was measured with another dtype: 'float32', this job"):
        read_profile(path, {**identity, "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="another device: None"):
        read_profile(path, {**identity, "device": "cuda:0"})


@pytest.mark.parametrize("content", ["no json", "[]", "{}", '{"version": 0, "identity": {}, "cost_model": {}}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ConfigError, match="save one with specrun calibrate"):
        read_profile(tmp_path / "p.json", {})


def test_a_missing_profile_and_an_impossible_place_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "none.json", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="--save"):
        write_profile(tmp_path / "file" / "p.json", {}, CostModel(), {})


def test_rows_that_never_decode_together_are_an_error_and_no_endless_run(tmp_path, model):
    spec = JobSpec.load(write_job(tmp_path, model, sampling={"max_tokens": 1}))
    with pytest.raises(ConfigError, match="no batch was ever full"):
        run_calibration(spec, [2], [0, 1], 3, ModelBuilder(tmp_path))


def test_a_job_without_drafts_has_nothing_to_calibrate(tmp_path, model):
    spec = JobSpec.load(write_job(tmp_path, model, speculation={"method": "none"}))
    with pytest.raises(ConfigError, match=r"speculation\.method"):
        run_calibration(spec, [2], [0, 1], 3, ModelBuilder(tmp_path))


def test_sizes_and_lengths():
    assert batch_sizes(1) == [1] and batch_sizes(6) == [1, 2, 4, 6] and batch_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
    assert draft_lengths(1) == [0, 1] and draft_lengths(5) == [0, 1, 2, 3, 5] and draft_lengths(6) == [0, 1, 2, 3, 5, 6]
    assert parse_lengths("3,1") == [0, 1, 3]
    for text in ("", "x", "0", "-1,2"):
        with pytest.raises(click.BadParameter):
            parse_lengths(text)
