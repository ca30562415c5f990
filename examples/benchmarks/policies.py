"""Policies against each other on simulated jobs: the table in policies.md, and what it says of each criterion.

    python -m examples.benchmarks.policies [--quick] [--workers 2] [--write]

Every workload of the suite runs on both cost surfaces, with the held-out seeds, under every contender. Each finished
job goes into a file of lines at once, so an interrupted table is taken up where it stopped; a run is done again when
the code or the workload that it depends on has changed. policies.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from examples.benchmarks.policy_cells import Cell, make_cell, read_cells
from examples.benchmarks.policy_priors import rest_s, wrong_profile
from examples.benchmarks.policy_table import DISTORTED, render
from examples.benchmarks.policy_verdict import Table
from specrun.policies import Proposals, SpecDecision, SpeculationPolicy, StepFeedback, StepState, make_policy
from specrun.policies.base import Int32
from specrun.policies.registry import POLICIES
from specrun.policies.simulator import Oracle, Workload, simulate
from specrun.policies.simulator.rivals import RIVALS
from specrun.policies.simulator.suite import CASES, DEVELOPMENT_SEEDS, HELD_OUT_SEEDS, SURFACES
from specrun.policies.simulator.surface import STEP_COSTS

ROOT = Path(__file__).parent.parent.parent
PAGE = Path(__file__).parent / "policies.md"
BEGIN, END = "<!-- simulated: begin -->", "<!-- simulated: end -->"
FIXED = tuple(f"always:{k}" for k in (1, 2, 3, 5, 7))
OWN = ("batch_threshold", "acceptance_gate")
PRIORS = {"goodput:prior-30": 0.7, "goodput:prior+50": 1.5}
ABLATIONS = ("goodput:ungrouped", *PRIORS)
BASELINES = ("never", *FIXED)
CONTENDERS = ("oracle", *BASELINES, "goodput", *ABLATIONS, *OWN, *RIVALS)
QUICK = ("A1", "A2", "A6", "A14")
Unit = tuple[str, str, int]
"""Workload, surface, seed."""


class Ungrouped(SpeculationPolicy):
    """`goodput` that is told that all rows are of one group."""

    def __init__(self) -> None:
        self._policy = make_policy("goodput")

    def decide(self, state: StepState) -> SpecDecision:
        """As goodput, groups hidden."""
        state.groups[:] = 0
        return self._policy.decide(state)

    def trim(self, proposals: Proposals) -> Int32:
        """As goodput."""
        return self._policy.trim(proposals)

    def observe(self, feedback: StepFeedback) -> None:
        """As goodput."""
        self._policy.observe(feedback)

    def facts(self) -> dict[str, float]:
        """As goodput."""
        return self._policy.facts()


def policy_maker(name: str, workload: Workload) -> Callable[[], SpeculationPolicy]:
    """What makes new policies of a name in the table."""
    if name in RIVALS:
        return RIVALS[name]
    if name in PRIORS:
        return partial(make_policy, "goodput", profile=wrong_profile(workload, PRIORS[name]))
    kind, _, argument = name.partition(":")
    if kind == "always":
        return partial(make_policy, kind, num_draft_tokens=int(argument))
    return {"oracle": Oracle, "goodput:ungrouped": Ungrouped}.get(name) or partial(make_policy, kind)


def run_unit(unit: Unit, contenders: Sequence[str], known: dict[str, Cell]) -> list[Cell]:
    """The cells of a workload that are not known under their present key. The oracle goes first, since recovery is
    measured against its speed; then the fixed lengths, the best of which takes over where only the rest is judged."""
    name, surface, seed = unit
    workload = CASES[name].workload(surface, seed)
    digest = hashlib.blake2b(pickle.dumps(workload), digest_size=8).hexdigest()
    cells: dict[str, Cell] = {}
    for contender in sorted({*contenders, "oracle"}, key=CONTENDERS.index):
        if contender == "goodput:ungrouped" and not workload.groups.any():
            continue
        key, cell = _key(digest, contender), known.get(contender)
        if cell is None or cell.key != key:
            cell = _run(unit, contender, workload, key, cells)
        cells[contender] = cell
    return [cell for cell in cells.values() if cell is not known.get(cell.contender)]


def _run(unit: Unit, contender: str, workload: Workload, key: str, before: dict[str, Cell]) -> Cell:
    """One run; `before` holds the oracle's cell and those of the fixed lengths."""
    name, _, seed = unit
    began = time.process_time()
    make = policy_maker(contender, workload)
    result = simulate(workload, policy := make(), seed, load_drafter=contender != "never")
    cpu_s = time.process_time() - began
    rest: dict[str, float] = {}
    if contender in PRIORS or (contender == "goodput" and name in DISTORTED):
        rest = rest_s(workload, seed, result, make, _best_fixed(before))
    facts = {fact: float(value) for fact, value in policy.facts().items()}
    speeds = None if contender == "oracle" else before["oracle"].speeds
    return make_cell((*unit, contender), key, result, CASES[name].changes, speeds, rest, facts, cpu_s)


def _best_fixed(cells: dict[str, Cell]) -> int:
    """Draft length of the fastest of never and the fixed lengths that have run; 0 is never."""
    makespans = {int(name.partition(":")[2] or 0): cell.makespan_s for name, cell in cells.items() if name in BASELINES}
    return min(makespans, key=makespans.__getitem__) if makespans else 0


def _key(workload_digest: str, contender: str) -> str:
    """Hash of all that the run's figures depend on."""
    digest = hashlib.blake2b(workload_digest.encode(), digest_size=8)
    for path in _sources(contender):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(contender: str) -> list[Path]:
    """Modules that a contender's run depends on, those of the workloads apart."""
    folder = ROOT / "policies"
    shared = [folder / "base.py", PAGE.with_name("policy_cells.py"), PAGE.with_name("policy_priors.py")]
    recipes = {"adversarial", "case", "held_out", "suite"}
    shared += sorted(path for path in (folder / "simulator").glob("*.py") if path.stem not in recipes)
    kind = contender.partition(":")[0]
    if kind == "goodput":
        others = {"__init__", "profile", "base", "fixed", "options", "registry", *OWN}
        return [*shared, *sorted(path for path in folder.glob("*.py") if path.stem not in others)]
    if kind in OWN:
        return [*shared, folder / f"{kind}.py"]
    return [*shared, *sorted((folder / "simulator" / "rivals").glob("*.py"))] if kind in RIVALS else shared


def run_all(options: argparse.Namespace) -> list[Cell]:
    """Every cell that was asked for, from the file or run now; new ones are appended to the file as they come."""
    known: dict[Unit, dict[str, Cell]] = {}
    for old in read_cells(options.cells):
        known.setdefault((old.workload, old.surface, old.seed), {})[old.contender] = old
    units = [(w, surface, seed) for seed in options.seeds for w in options.workloads for surface in options.surfaces]
    wanted = [name for name in CONTENDERS if name in {*options.contenders, "oracle"}]
    if not options.table:
        _run_units(units, known, options)
    return [cell for unit in units for name in wanted if (cell := known.get(unit, {}).get(name))]


def _run_units(units: Sequence[Unit], known: dict[Unit, dict[str, Cell]], options: argparse.Namespace) -> None:
    """Run what is missing or out of date, into `known` and the file."""
    options.cells.parent.mkdir(parents=True, exist_ok=True)
    began, num_new = time.monotonic(), 0
    with options.cells.open("a", encoding="utf-8") as file, ProcessPoolExecutor(options.workers) as pool:
        futures = {pool.submit(run_unit, u, _contenders_of(u, options), known.get(u, {})): u for u in units}
        for count, future in enumerate(as_completed(futures), start=1):
            unit = futures[future]
            for cell in future.result():
                known.setdefault(unit, {})[cell.contender] = cell
                print(cell.to_json(), file=file, flush=True)
                num_new += 1
            elapsed = time.monotonic() - began
            print(f"\r{count}/{len(units)} jobs, {num_new} new runs, {elapsed:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)


def _contenders_of(unit: Unit, options: argparse.Namespace) -> list[str]:
    """All, but wrong priors with the first seeds only: each takes four runs."""
    with_priors = unit[2] in options.seeds[: options.prior_seeds]
    return [name for name in options.contenders if with_priors or name not in PRIORS]


def write_page(text: str) -> None:
    """Put the text between its marks in policies.md; all else stays. Raises ValueError where the marks are missing."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no {BEGIN} and {END}")
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _list_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    known = list(choices)

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; choose among {', '.join(known)}")
        return names

    return parse


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runnable = [c for c in CONTENDERS if c.partition(":")[0] in {*POLICIES, *RIVALS, "oracle"}]
    parser.add_argument("--quick", action="store_true", help="one seed, one surface, four workloads")
    parser.add_argument("--dev", action="store_true", help="development seeds and workloads A1 to A18 only")
    parser.add_argument("--workloads", type=_list_of(CASES))
    parser.add_argument("--surfaces", type=_list_of(SURFACES))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--contenders", type=_list_of(runnable), default=runnable)
    parser.add_argument(
        "--prior-seeds", type=int, default=1, help="seeds, the first of all, that wrong priors run with"
    )
    parser.add_argument("--judge", default="goodput" if "goodput" in POLICIES else "batch_threshold")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cells", type=Path, default=ROOT / "out" / "policy_cells.jsonl")
    parser.add_argument("--table", action="store_true", help="run nothing: judge what is in the file, old or new")
    parser.add_argument("--write", action="store_true", help="put the result into policies.md")
    parser.add_argument("--data", type=Path, help="folder of the measured step costs, step_cost_*.csv")
    options = parser.parse_args(arguments)
    if options.data is not None:
        if not list(options.data.glob("step_cost_*.csv")):
            parser.error(f"--data: no step_cost_*.csv in {options.data}")
        os.environ[STEP_COSTS] = str(options.data)
    elif options.write and STEP_COSTS not in os.environ:
        parser.error("--write is for measured step costs: name their folder with --data")
    seeds = DEVELOPMENT_SEEDS if options.dev else HELD_OUT_SEEDS
    workloads = [name for name, case in CASES.items() if not (options.dev and case.is_held_out)]
    options.seeds = options.seeds or list(DEVELOPMENT_SEEDS[:1] if options.quick else seeds)
    options.surfaces = options.surfaces or list(SURFACES[: 1 if options.quick else None])
    options.workloads = options.workloads or (list(QUICK) if options.quick else workloads)
    return options


def main() -> None:
    """Run, judge, print."""
    options = parse_options()
    cells = run_all(options)
    stationary = {name: CASES[name].workload("h100", 0).is_stationary for name in options.workloads}
    text = render(Table(cells, stationary), options.judge)
    print(text)
    if options.write:
        write_page(text)


if __name__ == "__main__":
    main()
