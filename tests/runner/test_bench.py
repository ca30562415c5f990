"""`specrun bench` on a tiny random llama."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml

from specrun.engine.request import FinishReason, RequestOutput
from specrun.jobs.errors import ConfigError, OutputError
from specrun.jobs.spec import JobSpec
from specrun.runner.bench import run_bench
from specrun.runner.bench_report import BenchReport, markdown_table
from specrun.runner.build import ModelBuilder
from specrun.runner.cli import run_command
from specrun.runner.comparison import BenchRun, Comparison, Fork, find_forks
from specrun.runner.contender import Contender, orders, parse_batches, parse_contenders
from specrun.runner.exit_codes import INTERNAL
from tests.runner.word_models import save_word_model

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "that",
    "dog",
    "run",
    "far",
    "from",
    "here",
    "to",
    "there",
]

COLUMNS = [
    "policy",
    "makespan s",
    "tokens/s",
    "acceptance",
    "acceptance length",
    "vs never",
    "host ms/step",
    "forked rows",
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("model"), WORDS)


def write_job(folder: Path, model_folder: Path, rows: list[Any] | None = None, **sections: dict[str, Any]) -> Path:
    if rows is None:
        rows = [{"prompt": " ".join(WORDS[i : i + 6])} for i in range(6)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(model_folder), "dtype": "float32"},
        "input": {"path": str(folder / "in.jsonl")},
        "speculation": {"method": "ngram"},
        "sampling": {"max_tokens": 12},
        "output": {"path": str(folder / "out")},
        "engine": {"device": "cpu"},
    }
    for name, values in sections.items():
        job[name] = {**job.get(name, {}), **values}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def bench(job: Path, policies: str, batches: str = "1,4", repeats: int = 2) -> BenchReport:
    spec = JobSpec.load(job)
    contenders = parse_contenders(policies, spec, job.parent)
    return run_bench(spec, contenders, parse_batches(batches), repeats, ModelBuilder(job.parent))


def spec_with(method: str = "ngram", **policy: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"path": "m"},
            "input": {"path": "i"},
            "output": {"path": "o"},
            "speculation": {"method": method, "policy": policy or {"name": "never"}},
        }
    )


def test_bench_measures_every_policy_at_every_batch_size(tmp_path, model):
    report = bench(write_job(tmp_path, model), "none,always:7,batch_threshold:2,job", repeats=1)
    runs = report.comparison.runs
    labels = ["never", "none", "always:7", "batch_threshold:2", "job"]
    assert [(s.batch, s.policy) for s in report.comparison.summaries()] == [(b, p) for b in (1, 4) for p in labels]
    assert len(runs) == 2 * 5
    for run in runs:
        assert run.num_generation_tokens == 6 * 12 and run.makespan_s > 0 and run.num_steps > 0 and run.host_s > 0
        assert run.num_failed == 0
        off = run.policy in ("never", "none") or (run.policy, run.batch) == ("batch_threshold:2", 4)
        assert bool(run.num_draft_tokens) != off
    always = next(run for run in runs if run.policy == "always:7")
    # random models repeat themselves, so some step verifies more than the job's limit of 5 drafts
    assert always.num_draft_tokens / always.num_drafts > 5

    text = report.text()
    headers = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "makespan s" in line]
    assert headers == [COLUMNS, COLUMNS]
    assert "batch 4\n" in text and "6 rows (0 bad ones left out), 1 repetitions" in text


SMALL = ["--policies", "always:3", "--batch", "2", "--rows", "2", "--max-tokens", "4", "--repeats", "1"]


def test_the_command_prints_tables_and_leaves_json_beside_the_output(tmp_path, model, capsys):
    job = write_job(tmp_path, model)
    assert run_command(["bench", str(job), *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "batch 2\n" in out and "| always:3 |" in out and f"all numbers: {tmp_path}/out.bench.json" in out
    assert "specrun: batch 2, repetition 1/1: always:3\n" in err
    content = json.loads((tmp_path / "out.bench.json").read_text())
    assert content["num_rows"] == 2 and {run["num_generation_tokens"] for run in content["runs"]} == {8}
    assert not (tmp_path / "out").exists()


def test_the_command_gives_json_and_fails_where_outputs_differ(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr(Comparison, "difference", lambda self: "row 1 differs")
    job = write_job(tmp_path, model, engine={"deterministic": True})
    assert run_command(["bench", str(job), *SMALL, "--json", "--save", str(tmp_path / "b.json")]) == INTERNAL
    out, err = capsys.readouterr()
    assert json.loads(out)["identical"] is False and json.loads((tmp_path / "b.json").read_text())["runs"]
    assert err.splitlines()[-1].startswith("specrun: row 1 differs")


def test_no_run_profits_from_the_one_before(tmp_path, model):
    """The prefix cache, the policy and the drafter start empty, or repetitions would measure something else."""
    rows = [{"prompt": " ".join(WORDS)}, {"prompt": " ".join(WORDS[::-1])}]
    report = bench(write_job(tmp_path, model, rows), "always:3", batches="2", repeats=3)
    assert {run.num_cached_tokens for run in report.comparison.runs} == {0}
    assert len({(run.num_steps, run.num_accepted_tokens) for run in report.comparison.runs}) == 2  # one a policy


@pytest.mark.parametrize("sections", [{"engine": {"deterministic": True}}, {"model": {"dtype": "float64"}}])
def test_outputs_are_identical_where_they_must_be(tmp_path, model, sections):
    rows = [{"prompt": " ".join(WORDS[i : i + 6]), "temperature": i / 2} for i in range(4)]
    report = bench(write_job(tmp_path, model, rows, **sections), "always:3,batch_threshold:2", repeats=1)
    assert report.comparison.is_exact
    assert report.comparison.difference() is None
    assert "all outputs are identical" in report.text() and "identical |" in report.text()


def test_json_holds_every_run_and_what_it_ran_on(tmp_path, model):
    report = bench(write_job(tmp_path, model), "always:3", batches="2")
    report.write(tmp_path / "new" / "bench.json")
    content = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert len(content["runs"]) == 4 and len(content["summaries"]) == 2
    assert {"policy", "batch", "repetition", "order", "makespan_s", "forks"} <= content["runs"][0].keys()
    assert content["identical"] is None and content["num_rows"] == 6 and content["dtype"] == "float32"
    assert content["versions"].keys() >= {"python", "torch", "transformers"}
    assert content["machine"].keys() >= {"cpu", "cores", "memory_bytes", "load_average"}
    assert content["inputs"][0]["path"].endswith("in.jsonl") and content["fingerprint"]["files[0].hash"]
    with pytest.raises(OutputError, match="--save"):
        report.write(tmp_path)


def test_bad_rows_are_left_out_and_counted(tmp_path, model):
    good, bad = {"prompt": "the cat"}, {"prompt": None}
    report = bench(write_job(tmp_path, model, [bad, good, good]), "never", batches="1", repeats=1)
    assert report.comparison.num_rows == 2 and "2 rows (1 bad ones left out)" in report.text()
    with pytest.raises(ConfigError, match=r"no row to run.*null"):
        bench(write_job(tmp_path, model, [bad]), "never")


def test_short_forms():
    spec = spec_with(name="acceptance_gate", low=0.5)
    contenders = parse_contenders("always:3, batch_threshold:8,never,acceptance_gate,job,none", spec)
    assert [(c.label, c.name, c.kwargs, c.num_draft_tokens) for c in contenders] == [
        ("never", "never", {}, 0),
        ("always:3", "always", {"num_draft_tokens": 3}, 3),
        ("batch_threshold:8", "batch_threshold", {"disable_above": 8}, 0),
        ("acceptance_gate", "acceptance_gate", {}, 0),
        ("job", "acceptance_gate", {"low": 0.5}, 0),
        ("none", "none", {}, 0),
    ]
    assert [c.has_drafter for c in contenders] == [True, True, True, True, True, False]


def test_a_method_goes_before_its_policy():
    spec = spec_with(name="acceptance_gate", low=0.5)
    contenders = parse_contenders("suffix/always:3,ngram/job,suffix/batch_threshold,always:2,suffix/never", spec)
    assert [(c.label, c.method, c.name, c.num_draft_tokens) for c in contenders] == [
        ("never", None, "never", 0),
        ("suffix/always:3", "suffix", "always", 3),
        ("ngram/job", "ngram", "acceptance_gate", 0),
        ("suffix/batch_threshold", "suffix", "batch_threshold", 0),
        ("always:2", None, "always", 2),
        ("suffix/never", "suffix", "never", 0),
    ]
    assert contenders[2].kwargs == {"low": 0.5}
    assert [c.label for c in parse_contenders("suffix/always:3", spec_with("none"))] == ["never", "suffix/always:3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sufix/always:3", "'sufix' is no method that drafts; did you mean 'suffix'"),
        ("xyz/always:3", "'xyz' is no method that drafts; choose ngram, suffix, draft_model"),
        ("none/always:3", "'none' is no method that drafts"),
        ("auto/always:3", "'auto' is no method that drafts"),
        ("/always:3", "'' is no method that drafts"),
        ("suffix/none", "'suffix/none': none is without any drafter; write it without a method"),
        ("suffix/alway:3", "'alway' takes no number"),
        ("draft_model/never", "draft_model needs a draft model; add --set speculation.method=draft_model --set"),
        ("synthetic/never", "synthetic needs a recording"),
    ],
)
def test_a_wrong_method_is_told_in_one_line(text, message):
    with pytest.raises(click.BadParameter) as caught:
        parse_contenders(text, spec_with())
    assert message in caught.value.message and "\n" not in caught.value.message


def test_the_command_compares_drafters(tmp_path, model, capsys):
    job = write_job(tmp_path, model)
    assert run_command(["bench", str(job), "--policies", "always:3,suffix/always:3", *SMALL[2:]]) == 0
    assert "| suffix/always:3 |" in capsys.readouterr().out
    content = json.loads((tmp_path / "out.bench.json").read_text())
    assert content["policies"] == ["never", "always:3", "suffix/always:3"] and content["method"] == "ngram"


def test_a_policy_of_ones_own_has_no_number(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bench_own_policy.py").write_text(
        "from specrun.policies.fixed import Never\nclass Mine(Never):\n    pass\n"
    )
    assert parse_contenders("bench_own_policy:Mine", spec_with())[1].name == "bench_own_policy:Mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alway:3", "'alway' takes no number; only always:K and batch_threshold:K do"),
        ("acceptance_gate:3", "takes no number"),
        ("alway", "did you mean 'always'"),
        ("always:0", "num_draft_tokens must be a whole number of at least 1"),
        ("batch_threshold:-2", "disable_above must be a whole number of at least 1"),
        ("no_such_module:Mine", "no module 'no_such_module'"),
    ],
)
def test_a_wrong_policy_is_told_in_one_line(text, message):
    with pytest.raises(click.BadParameter, match="(?s)" + message.replace("*", r"\*")) as caught:
        parse_contenders(text, spec_with())
    assert "\n" not in caught.value.message and caught.value.param_hint == "--policies"


def test_policies_need_a_drafter():
    with pytest.raises(click.BadParameter, match=r"speculation\.method=ngram"):
        parse_contenders("always:3", spec_with("none"))
    assert len(parse_contenders("never,none", spec_with("none"))) == 2


def test_batch_sizes():
    assert parse_batches("16, 1,4,4") == [1, 4, 16]
    for text in ("", "0", "-1,2", "a", "1.5"):
        with pytest.raises(click.BadParameter, match="list of batch sizes"):
            parse_batches(text)


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("repeats", [2, 4, 6, 12])
def test_the_order_of_runs_is_balanced(count, repeats):
    contenders = [Contender(str(i), "never") for i in range(count)]
    order = orders(contenders, repeats)
    assert len(order) == repeats and all(sorted(o, key=contenders.index) == contenders for o in order)
    places = [sum(o.index(contender) for o in order) for contender in contenders]
    assert places == [repeats * (count - 1) / 2] * count
    assert order[0] == contenders, "the first run is the reference"


def outputs(**rows: tuple[list[int], str]) -> dict[int, RequestOutput]:
    return {int(k[1:]): RequestOutput(int(k[1:]), tokens, FinishReason(end)) for k, (tokens, end) in rows.items()}


def test_forks_are_found_where_they_begin():
    a = outputs(r0=([1, 2, 3], "length"), r1=([1, 2, 3], "length"), r2=([1, 2], "stop"), r3=([7], "stop"))
    b = outputs(r0=([1, 2, 3], "length"), r1=([1, 9, 3], "length"), r2=([1, 2, 5], "stop"), r3=([7], "length"))
    assert find_forks(a, a) == []
    assert find_forks(a, b) == [Fork(1, 1), Fork(2, 2), Fork(3, 1)]


def run_of(policy: str, repetition: int, makespan_s: float, forks: list[Fork] | None = None) -> BenchRun:
    drafts = 0 if policy == "never" else 5
    return BenchRun(
        policy=policy,
        batch=4,
        repetition=repetition,
        order=0,
        makespan_s=makespan_s,
        num_steps=10,
        host_s=0.02,
        decode_step_s=0.1,
        num_prompt_tokens=8,
        num_cached_tokens=0,
        num_generation_tokens=100,
        num_drafts=drafts,
        num_draft_tokens=2 * drafts,
        num_accepted_tokens=drafts,
        num_preemptions=0,
        num_failed=0,
        forks=forks or [],
    )


def test_summaries_pair_repetitions():
    runs = [run_of("never", 0, 10), run_of("a", 0, 5), run_of("never", 1, 30), run_of("a", 1, 10, [Fork(2, 7)])]
    never, a = Comparison(False, 4, runs, {4: []}).summaries()
    assert (never.speedup, never.acceptance_rate, never.mean_acceptance_length) == (1, None, None)
    assert (a.speedup_min, a.speedup, a.speedup_max) == (2, 2.5, 3)
    assert (a.makespan_s, a.tokens_per_s, a.host_ms_per_step) == (7.5, 15, 2)
    assert (a.acceptance_rate, a.mean_acceptance_length, a.fork_rate, a.first_fork) == (0.5, 2, 1 / 8, 7)


@pytest.mark.parametrize(
    ("forks", "batch_forks", "message"),
    [
        ([Fork(3, 5)], {1: [], 4: []}, "row 3 differs from output token 5 on between a and never at batch 4"),
        ([], {1: [], 4: [Fork(2, 0)]}, "row 2 differs .* between never at batch 4 and at batch 1"),
    ],
)
def test_a_difference_is_an_error_where_none_may_be(forks, batch_forks, message):
    runs = [run_of("never", 0, 10), run_of("a", 0, 5, forks)]
    comparison = Comparison(True, 4, runs, batch_forks)
    assert re.match(message, comparison.difference() or "")
    assert replace(comparison, is_exact=False).difference() is None


def test_tables_line_up():
    assert markdown_table(["policy", "x"], [["a", "10.5"], ["longer one", "1"]]).splitlines() == [
        "| policy     |    x |",
        "| ---------- | ---: |",
        "| a          | 10.5 |",
        "| longer one |    1 |",
    ]
