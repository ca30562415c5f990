"""From speculation to a drafter, on tiny real models: what each method needs, and that no method changes a row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from specrun.engine.errors import ModelError
from specrun.jobs.errors import ConfigError
from specrun.jobs.spec import JobSpec
from specrun.jobs.speculation import METHODS, SpeculationSpec
from specrun.runner.bench import run_bench
from specrun.runner.build import ModelBuilder
from specrun.runner.contender import parse_contenders
from specrun.runner.drafting import choose_method
from specrun.runner.report import full_lines
from specrun.runner.run import JobResult, run_job
from tests.contract import tiny_model

NUM_ROWS = 6
SHIFT = 10


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, and as draft models same/, which is its copy, and shifted/, the same with other token ids."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model.save(folder / "target")
    for name in ("same", "shifted"):
        shutil.copytree(folder / "target", folder / name)
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    weights = [model.get_input_embeddings().weight.clone(), model.get_output_embeddings().weight.clone()]
    model.resize_token_embeddings(len(weights[0]) + SHIFT, mean_resizing=False)
    with torch.no_grad():
        for layer, old in zip((model.get_input_embeddings(), model.get_output_embeddings()), weights, strict=True):
            layer.weight.zero_()[SHIFT:] = old
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = tiny_model.BOS + SHIFT, tiny_model.EOS + SHIFT
    model.save_pretrained(folder / "shifted")
    tokenizer = json.loads((folder / "shifted" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {name: token + SHIFT for name, token in vocab.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] += SHIFT
    tokenizer["post_processor"] = None
    (folder / "shifted" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class TinyJob:
    """A job on the target, in a folder of its own."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, models
        self.warnings: list[str] = []
        rows = [{"prompt": f"{'ab' * 8} {i % 3}"} for i in range(NUM_ROWS)]
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def spec(self, out: str = "out", response_format: dict[str, Any] | None = None, **speculation: Any) -> JobSpec:
        """With policy always:4."""
        if (model := speculation.get("model")) is not None:
            speculation["model"] = str(self.models / model)
        policy = {"name": "always", "num_draft_tokens": 4}
        values = {
            "model": {"path": str(self.models / "target"), "dtype": "float64"},
            "input": {"path": str(self.folder / "in.jsonl")},
            "prompt": {"chat_template": "none"},
            "sampling": {"max_tokens": 12, "response_format": response_format},
            "output": {"path": str(self.folder / out), "token_ids": True},
            "engine": {"device": "cpu", "max_num_seqs": 2},
            "speculation": {"policy": policy, **speculation},
        }
        return JobSpec.parse(yaml.safe_dump(values), "job.yaml")

    def run(self, out: str = "out", **speculation: Any) -> JobResult:
        result = run_job(self.spec(out, **speculation), warn=self.warnings.append)
        assert (result.exit_code, result.was_done) == (0, False)
        return result

    def rows(self, out: str = "out") -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = pq.read_table(self.folder / out / "data").to_pylist()
        return rows


@pytest.fixture
def tiny(tmp_path, models):
    return TinyJob(tmp_path, models)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, models):
    """A job without speculation, and its rows."""
    job = TinyJob(tmp_path_factory.mktemp("plain"), models)
    job.run()
    return job


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("auto", "synthetic")])
def test_a_method_that_is_named_is_taken(method):
    model = "m" if "draft_model" in method else None
    choice = choose_method(SpeculationSpec(method=method, model=model))
    assert (choice.method, choice.reason, choice.has_draft_model) == (method, None, model is not None)


def test_auto_goes_by_what_there_is():
    without, having = (
        choose_method(SpeculationSpec(method="auto")),
        choose_method(SpeculationSpec(method="auto", model="m")),
    )
    assert without.method == "suffix" and not without.has_draft_model
    assert without.reason == "suffix: no draft model is given; rows draft from their siblings"
    assert having.method == "suffix+draft_model" and having.has_draft_model
    assert having.reason is not None and having.reason.startswith("suffix+draft_model: a draft model is given;")


@pytest.mark.parametrize(
    ("speculation", "method", "fact"),
    [
        ({"method": "ngram"}, "ngram", None),
        ({"method": "suffix"}, "suffix", "index_rows"),
        ({"method": "draft_model", "model": "same"}, "draft_model", "num_draft_model_tokens"),
        ({"method": "draft_model", "model": "shifted"}, "draft_model", "num_draft_model_tokens"),
        ({"method": "auto", "model": "same"}, "suffix+draft_model", "num_draft_model_tokens"),
        ({"method": "auto"}, "suffix", "index_tokens"),
    ],
)
def test_no_method_changes_a_row(tiny, plain, speculation, method, fact):
    report = tiny.run(**speculation).report
    assert tiny.rows() == plain.rows()
    assert report["method"] == method and report["num_draft_tokens"] > 0
    assert (report["method_reason"] is not None) == (speculation["method"] == "auto")
    assert fact is None or report["drafter_facts"][fact] > 0
    if method == "draft_model":
        assert report["acceptance_rate"] == 1
    lines = dict(full_lines(report))
    assert ("suffix index" in lines) == ("suffix" in method) and ("draft model" in lines) == ("draft_model" in method)


def test_synthetic_replays_at_the_set_rates(tiny, plain):
    synthetic = {"replay": str(plain.folder / "out"), "acceptance_rates": [1.0, 0.0]}
    report = tiny.run(method="synthetic", synthetic=synthetic).report
    assert tiny.rows() == plain.rows()
    facts, lines = report["drafter_facts"], dict(full_lines(report))
    assert (facts["realised_acceptance_rate_pos_0"], facts["realised_acceptance_rate_pos_1"]) == (1, 0)
    assert lines["draft 1"].startswith("set to 100.0%, realised 100.0% of ")
    assert lines["draft 2"].startswith("set to 0.0%, realised 0.0% of ")


def test_the_index_begins_with_earlier_outputs(tiny, plain):
    report = tiny.run(method="suffix", warm_from=str(plain.folder / "out")).report
    assert tiny.rows() == plain.rows() and report["drafter_facts"]["seeded_tokens"] >= 12 * NUM_ROWS - 1
    assert " seeded, " in dict(full_lines(report))["suffix index"]
    assert tiny.run("second", method="suffix", warm_from=str(tiny.folder / "none")).report["num_rows"] == NUM_ROWS
    assert "nothing behind" in tiny.warnings[-1]


def test_errors_name_the_keys_of_the_draft_model(tiny, tmp_path):
    with pytest.raises(ModelError, match=r"^speculation\.model '.*/nowhere' does not exist"):
        tiny.run(method="draft_model", model="nowhere")
    copy = tmp_path / "copy"
    shutil.copytree(tiny.models / "same", copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    with pytest.raises(ModelError, match=r"^speculation\.model '.*/copy': its tokenizer does not load"):
        tiny.run("second", method="draft_model", model=copy)


def test_a_changed_draft_model_does_not_go_on(tiny, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny.models / "same", copy)
    tiny.run(method="draft_model", model=copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "note": "tuned"}))
    with pytest.raises(ConfigError, match=r"another configuration: draft\.files\.config\.json: "):
        tiny.run(method="draft_model", model=copy)


def test_a_bench_compares_drafters(tiny):
    """Each run begins with an index of its own, and never with what this very job has written."""
    tiny.run(method="none")
    labels = ["never", "suffix/always:3", "draft_model/always:3"]
    spec = tiny.spec(method="suffix+draft_model", model="same")
    report = run_bench(spec, parse_contenders(",".join(labels), spec), [2], 2, ModelBuilder())
    runs = {label: [run for run in report.comparison.runs if run.policy == label] for label in labels}
    assert report.comparison.is_exact and report.comparison.difference() is None
    for label, (run, again) in runs.items():
        assert bool(run.num_draft_tokens) == (label != "never")
        assert (run.num_steps, run.num_accepted_tokens) == (again.num_steps, again.num_accepted_tokens)
    assert all(run.num_accepted_tokens == run.num_draft_tokens for run in runs["draft_model/always:3"])
    facts = report.to_json()
    assert facts["method"] == "suffix+draft_model" and facts["draft_content_hash"] == facts["content_hash"]


def test_a_bench_gives_every_run_its_own_grammars(tiny):
    spec = tiny.spec(method="ngram", response_format={"type": "regex", "regex": "[ab]{3}"})
    report = run_bench(spec, parse_contenders("always:3", spec), [2], 1, ModelBuilder())
    assert report.comparison.difference() is None
    assert {run.num_generation_tokens for run in report.comparison.runs} == {NUM_ROWS * 4}  # with end-of-sequence


def test_a_format_is_held_to_and_checked_before_the_weights(tiny, monkeypatch):
    tiny.run(method="ngram", response_format={"type": "regex", "regex": "!"})
    assert {row["text"] for row in tiny.rows()} == {"!"}
    monkeypatch.setattr("specrun.engine.target.Target.load", None)
    with pytest.raises(ConfigError, match=r"^sampling\.response_format"):
        tiny.run("second", response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}})
