"""Drafters on real text: how much of what they guess is accepted, and what that does to the time of a job.

    python -m examples.benchmarks.drafters [--quick] [--data FOLDER] [--peer VENV/bin/python] [--json PATH]

SmolLM2-135M-Instruct in bfloat16 on the CPU. Each data set has two nights of rows: the first is run once, so that its
outputs can fill the index of `suffix-warm`; the second is measured. drafters.md says what the contenders are and how to
read the tables. --datasets, --drafters, --k, --batches and the like cut out a slice; how long it may take is printed
first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import torch

from examples.benchmarks.real_text import DATASETS, DRAFTERS, NEVER, Lab, Nights, read_nights, save_model
from examples.benchmarks.replay import replay
from specrun.runner.bench_report import markdown_table
from specrun.runner.comparison import Comparison
from specrun.runner.contender import Contender
from specrun.runner.machine import library_versions, load_average, machine_facts

SECTIONS = ("replay", "drafters", "coupling", "peer")
WITHOUT_WEIGHTS = ("ngram", "suffix-cold", "suffix-job", "suffix-warm")
PEER_K = 8
PEER_CACHES = ("cold", "job", "warm")


def contenders_of(drafter: str, ks: Sequence[int]) -> list[Contender]:
    """Never, the default policy and each fixed draft length, with drafts by one drafter."""
    fixed = [Contender(f"{drafter}/always:{k}", "always", {"num_draft_tokens": k}, None, k, drafter) for k in ks]
    return [NEVER, Contender(f"{drafter}/default", "batch_threshold", {}, None, 0, drafter), *fixed]


def measure_drafters(lab: Lab, datasets: Sequence[Nights]) -> list[dict[str, Any]]:
    """For each data set and temperature: a comparison of each drafter with never at each batch size."""
    options, results = lab.options, []
    for nights in datasets:
        for temperature in options.temperatures:
            bench = lab.bench(nights, temperature)
            comparisons = {}
            for drafter in options.drafters:
                runs = []
                for batch in options.batches:
                    contenders = contenders_of(drafter, options.k)
                    bench.run(contenders[-1], batch, num_requests=batch, max_tokens=2)  # shapes met for the first time
                    runs += lab.compare(bench, contenders, batch)
                comparisons[drafter] = Comparison(False, len(nights.second), runs, {})
            print(f"### {nights.name}, temperature {temperature}, {len(nights.second)} rows\n", flush=True)
            print_comparisons(comparisons, options)
            results.append({"dataset": nights.name, "temperature": temperature, "drafters": as_json(comparisons)})
    return results


def measure_coupling(lab: Lab, nights: Nights) -> list[dict[str, Any]]:
    """Drafts sampled with the target's noise against the draft model's most likely token."""
    options, results = lab.options, []
    batch = 4 if 4 in options.batches else options.batches[0]
    for temperature in (0.7, 1.0):
        bench = lab.bench(nights, temperature)
        contenders = [NEVER, *(c for name in ("draft_model", "greedy") for c in contenders_of(name, options.k)[2:])]
        comparisons = {"coupling": Comparison(False, len(nights.second), lab.compare(bench, contenders, batch), {})}
        rows = []
        for s in comparisons["coupling"].summaries()[1:]:
            rates = f"{s.acceptance_rate or 0:.1%}", f"{s.mean_acceptance_length or 1:.2f}"
            rows.append([s.policy.replace("draft_model/", "coupled/"), *rates, speedup_cell(s)])
        print(f"### {nights.name}, temperature {temperature}, batch {batch}, {options.layers} layers\n")
        print(markdown_table(["drafts", "acceptance", "acceptance length", "vs never (min-max)"], rows) + "\n")
        results.append({"dataset": nights.name, "temperature": temperature, "drafters": as_json(comparisons)})
    return results


def measure_replay(lab: Lab, datasets: Sequence[Nights]) -> list[dict[str, Any]]:
    """Acceptance of the drafters without weights, by data set, temperature and draft length, on outputs made once."""
    options, results = lab.options, []
    batch = max(options.batches)
    for nights in datasets:
        for temperature in options.temperatures:
            _, outputs = lab.bench(nights, temperature).run(NEVER, batch)
            recorded = [outputs[i].token_ids for i in range(len(nights.second))]
            seeds = lab.first_outputs[nights.name, temperature, False]
            rows = []
            for name in WITHOUT_WEIGHTS:
                found = [replay(lab.drafter(name, seeds), nights.second, recorded, k, batch) for k in options.k]
                rows.append([name, *(f"{r.acceptance_rate:.1%} ({r.tokens_per_verification:.2f})" for r in found)])
                results += [
                    {"dataset": nights.name, "temperature": temperature, "drafter": name, "k": k, **asdict(r)}
                    for k, r in zip(options.k, found, strict=True)
                ]
            print(f"### {nights.name}, temperature {temperature}, {len(recorded)} rows, batch {batch}\n")
            print(markdown_table(["drafter", *(f"k = {k}" for k in options.k)], rows) + "\n", flush=True)
    return results


def print_comparisons(comparisons: dict[str, Comparison], options: argparse.Namespace) -> None:
    """Acceptance by drafter and draft length, over all batch sizes; makespan by contender and batch size."""
    accepted, makespans = [], []
    for drafter, comparison in comparisons.items():
        cells, shares = [], []
        for contender in contenders_of(drafter, options.k)[1:]:
            runs = [run for run in comparison.runs if run.policy == contender.label]
            drafts, drafted, good = (
                sum(getattr(run, f"num_{name}") for run in runs)
                for name in ("drafts", "draft_tokens", "accepted_tokens")
            )
            cells.append(f"{good / drafted:.1%} ({1 + good / drafts:.2f})" if drafted else "-")
            summaries = {s.batch: s for s in comparison.summaries() if s.policy == contender.label}
            shares.append([contender.label, *(speedup_cell(summaries[batch]) for batch in options.batches)])
        accepted.append([drafter, *cells])
        makespans += shares
    titles = ["default", *(f"k = {k}" for k in options.k)]
    print("Accepted of drafted tokens (mean acceptance length):\n")
    print(markdown_table(["drafter", *titles], accepted) + "\n")
    print("Makespan of never over this one's, in the same repetition: median (min-max):\n")
    print(markdown_table(["drafter/policy", *(f"batch {b}" for b in options.batches)], makespans) + "\n")


def speedup_cell(summary: Any) -> str:
    """As in the other tables: above 1 is faster than never."""
    return f"{summary.speedup:.2f}x ({summary.speedup_min:.2f}-{summary.speedup_max:.2f})"


def as_json(comparisons: dict[str, Comparison]) -> dict[str, Any]:
    """Every single run."""
    return {name: [asdict(run) for run in comparison.runs] for name, comparison in comparisons.items()}


class PeerProcess:
    """vllm_suffix.py in an environment of its own."""

    def __init__(self, python: Path, model: Path, prompts: Path, method: str, num_tokens: int) -> None:
        script = Path(__file__).with_name("vllm_suffix.py")
        arguments = [str(model), str(prompts), "--method", method, "--k", str(PEER_K), "--tokens", str(num_tokens)]
        self._log = (prompts.parent / f"vllm-{method}.log").open("w")
        self._process = subprocess.Popen(
            [str(python), str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        )
        self._answer()

    def run(self, batch: int, cache: str) -> dict[str, float]:
        """See vllm_suffix.py."""
        assert self._process.stdin is not None
        print(json.dumps({"batch": batch, "cache": cache}), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.communicate()
        self._log.close()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer ended: " + Path(self._log.name).read_text(encoding="utf-8")[-2000:])
        answer: dict[str, float] = json.loads(line)
        return answer


def measure_peer(lab: Lab, nights: Nights, python: Path) -> dict[str, Any]:
    """Specrun and vLLM in turns: plain, and suffix decoding cold, over the job and warm."""
    options, folder = lab.options, lab.folder
    if not (folder / "target").exists():
        save_model(folder / "target", None)
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps({"prompts": nights.second, "other": nights.first}), encoding="utf-8")
    processes = {
        method: PeerProcess(python, folder / "target", prompts, method, options.tokens)
        for method in ("plain", "suffix")
    }
    bench = lab.bench(nights, 0.0, ignore_eos=True)
    batches = [batch for batch in options.batches if batch <= 16]

    def own(contender: Contender, batch: int) -> dict[str, float]:
        run, _ = bench.run(contender, batch)
        return {"seconds": run.makespan_s, "drafted": run.num_draft_tokens, "accepted": run.num_accepted_tokens}

    fixed = [
        Contender(f"suffix-{c}", "always", {"num_draft_tokens": PEER_K}, None, PEER_K, f"suffix-{c}")
        for c in PEER_CACHES
    ]
    contestants: dict[str, Callable[[int], dict[str, float]]] = {
        "specrun plain": lambda b: own(NEVER, b),
        "vllm plain": lambda b: processes["plain"].run(b, "cold"),
    }
    for cache, contender in zip(PEER_CACHES, fixed, strict=True):
        contestants[f"specrun {cache}"] = lambda b, c=contender: own(c, b)  # type: ignore[misc]
        contestants[f"vllm {cache}"] = lambda b, c=cache: processes["suffix"].run(b, c)  # type: ignore[misc]
    results: dict[str, Any] = {}
    for batch in batches:
        answers: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
        for process in processes.values():
            process.run(batch, "cold")  # warm-up
        for repetition in range(options.repeats):
            for name in list(contestants)[:: -1 if repetition % 2 else 1]:
                answers[name].append(contestants[name](batch))
        results[str(batch)] = answers
    for process in processes.values():
        process.close()
    print(
        f"### {nights.name}, {len(nights.second)} rows of {options.tokens} tokens\n\n{peer_table(results)}\n",
        flush=True,
    )
    return {"dataset": nights.name, "batches": results}


def peer_table(results: dict[str, Any]) -> str:
    """Medians over the repetitions; ratios of runs of the same repetition."""
    rows = []
    for batch, answers in results.items():
        for cache in ("plain", *PEER_CACHES):
            ours, theirs = answers[f"specrun {cache}"], answers[f"vllm {cache}"]
            ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)]
            cells = [f"{median(a['seconds'] for a in runs):.1f}" for runs in (ours, theirs)]
            cells.append(f"{median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
            for name, runs in (("specrun", ours), ("vllm", theirs)):
                plain = [a["seconds"] for a in answers[f"{name} plain"]]
                cells.append(f"{median(p / a['seconds'] for p, a in zip(plain, runs, strict=True)):.2f}x")
                drafted = sum(a["drafted"] for a in runs)
                cells.append(f"{sum(a['accepted'] for a in runs) / drafted:.1%}" if drafted else "-")
            rows.append([f"{batch} {cache}", *cells])
    titles = ["batch, index", "specrun s", "vllm s", "vllm / specrun (min-max)"]
    return markdown_table([*titles, "specrun vs its plain", "accepted", "vllm vs its plain", "accepted"], rows)


def parse_options() -> argparse.Namespace:
    """The command line; --quick replaces what makes a run long."""

    def items(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="Drafters on real text.")
    parser.add_argument("--quick", action="store_true", help="a smoke test: its figures mean nothing")
    parser.add_argument("--data", type=Path, help="folder of gsm8k_test.jsonl, humaneval.jsonl and spec_bench.jsonl")
    parser.add_argument("--datasets", type=items(str), help=f"of {','.join(DATASETS)}; all that there is data for")
    parser.add_argument("--sections", type=items(str), default=list(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--drafters", type=items(str), default=list(DRAFTERS))
    parser.add_argument("--k", type=items(int), default=[1, 3, 5, 8], help="fixed draft lengths")
    parser.add_argument("--batches", type=items(int), default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=items(float), default=[0.0, 0.7])
    parser.add_argument("--rows", type=int, default=64, help="rows of each of the two nights")
    parser.add_argument(
        "--carried-over", type=float, default=0.0, help="share of the second night's rows that were there"
    )
    parser.add_argument("--tokens", type=int, default=96, help="most new tokens of a row")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--layers", type=int, default=25, help="layers of the target, of 30, that the draft model keeps"
    )
    parser.add_argument("--bits", type=int, help="round the weights of the draft model's layers to so many bits")
    parser.add_argument("--peer", type=Path, help="python of the environment that vllm_suffix.py describes")
    parser.add_argument("--json", type=Path, default=Path("out/bench-drafters.json"), help="where all numbers go")
    options = parser.parse_args()
    options.datasets = options.datasets or list(DATASETS if options.data else DATASETS[:1])
    if options.quick:
        options.k, options.batches, options.temperatures = [3], [1, 4], [0.0]
        options.rows, options.tokens, options.repeats = 4, 12, 1
    for name, known in (("datasets", DATASETS), ("drafters", DRAFTERS), ("sections", SECTIONS)):
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))}; choose of {', '.join(known)}")
    return options


def main() -> None:
    """Measure, print Markdown, write JSON."""
    options = parse_options()
    machine = machine_facts() | {"torch_threads": torch.get_num_threads()}
    print(f"SmolLM2-135M bfloat16, at most {options.tokens} new tokens, {options.repeats} repetitions; torch")
    print(f"{torch.__version__}, {machine['torch_threads']} threads; {machine['cpu']}; load average before:")
    print(
        f"{machine['load_average']:.2f}. Draft model: {options.layers} of the target's 30 layers, "
        f"{f'rounded to {options.bits} bits' if options.bits else 'not rounded'}, not trained for it.\n"
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(options, Path(folder))
        datasets = [read_nights(name, options, lab.tokenizer) for name in options.datasets]
        if "replay" in options.sections:
            print("## Acceptance by replay\n", flush=True)
            results["replay"] = measure_replay(lab, datasets)
        if "drafters" in options.sections:
            minutes = sum(map(lab.estimated_s, datasets)) * len(options.temperatures) / 60
            print(f"## Drafters\n\nabout {minutes:.1f} minutes, if drafts neither cost nor gave anything\n", flush=True)
            results["drafters"] = measure_drafters(lab, datasets)
        if "coupling" in options.sections:
            print("## Drafts with the target's noise against the most likely token\n", flush=True)
            results["coupling"] = [run for nights in datasets for run in measure_coupling(lab, nights)]
        if "peer" in options.sections and options.peer:
            print("## Suffix decoding by vLLM\n", flush=True)
            results["peer"] = [measure_peer(lab, nights, options.peer) for nights in datasets]
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    content = {
        "settings": settings,
        "machine": machine | {"load_average_after": load_average()},
        "versions": library_versions(),
        **results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"all numbers: {options.json}")


if __name__ == "__main__":
    main()
