"""`make chaos`: jobs that are killed again and again, on disks that fail, and every row comes out once and right.

Run from the root of the repository: python -m tests.chaos.chaos --runs 200
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.campaign import DisturbedRun, Tally, Trial
from tests.chaos.plans import CHOSEN, FAULTS, KILLS, kill_plan, run_on_small_disk
from tests.chaos.zygote import zygote

TRIALS = 16
ENOUGH = 20
"""Hits of each chosen point, in a campaign of FULL_RUNS and more."""
FULL_RUNS = 200


class Chaos:
    """All runs of a campaign."""

    def __init__(self, trials: list[Trial], seed: int) -> None:
        self.trials = trials
        self.tally = Tally()
        self.violations: list[str] = []
        self.num_runs = 0
        self._seed = seed

    def kill(self, number: int) -> None:
        """Run `number`: its first kill goes round all there are, one or two more are drawn."""
        rng = random.Random(f"{self._seed} {number}")
        trial = self.trials[number % len(self.trials)]
        names = [KILLS[number % len(KILLS)], *rng.choices(KILLS, k=rng.randrange(3))]
        out = trial.folder / f"run-{number:04d}"
        disturbed = DisturbedRun(trial, out)

        def run() -> Tally:
            delayed = number // len(KILLS) % 2 == 1
            tally = disturbed.run([kill_plan(rng, name, trial, delayed) for name in names])
            if number % 10 == 0:
                disturbed.check_nothing_to_do()
            return tally

        self._judge(out, f"run {number} ({', '.join(names)})", run)

    def fault(self, number: int) -> None:
        """Each fault in turn."""
        fault = FAULTS[number % len(FAULTS)]
        trial = self.trials[number * 7 % len(self.trials)]
        out = trial.folder / f"fault-{number:04d}"
        self._judge(out, f"fault {number} ({fault.name})", lambda: fault.run(trial, out, random.Random(number)))

    def small_disk(self, number: int) -> None:
        """A real disk that is too small."""
        trial = self.trials[number % len(self.trials)]
        out = trial.folder / f"disk-{number:04d}"

        def run() -> Tally:
            tally = run_on_small_disk(trial, out)
            if tally is None:
                print("small disk: not permitted to mount one; left out")
            return tally or Tally()

        self._judge(out, f"small disk {number}", run)

    def _judge(self, out: Path, what: str, run: Callable[[], Tally]) -> None:
        try:
            tally = run()
        except Exception as error:  # whatever it is, the run did not do what it must
            self.violations.append(f"{what}\n  {out} from {out.parent / 'job.yaml'}\n  {type(error).__name__}: {error}")
            return
        self.num_runs += 1
        self.tally.add(tally)
        shutil.rmtree(out, ignore_errors=True)

    @property
    def is_short(self) -> bool:
        """Whether a chosen point was not hit often enough."""
        return any(self.tally.seen[name] < ENOUGH for name in CHOSEN)

    def print(self, seconds: float) -> None:
        """The table."""
        tally = self.tally
        print(f"\n{'':34}{'aimed':>8}{'told':>8}{'seen':>8}")
        for name in [*KILLS, *(name for name in tally.aimed if name not in KILLS)]:
            print(f"{name:34}{tally.aimed[name]:8}{tally.told[name]:8}{tally.seen[name]:8}")
        print(
            f"\n{self.num_runs} runs on {len(self.trials)} jobs, {tally.attempts} attempts, {tally.reads:,} reads of "
            f"parts meanwhile; {tally.resumed_rows:,} finished rows of unfinished parts taken up, "
            f"{tally.repeated_rows:,} rows ran again; {seconds:.0f} s"
        )


def campaign(
    folder: Path, runs: int, faults: int, shards: int = 1, workers: int = 2, seed: int = 0, rows: int = 300
) -> Chaos:
    """`runs` with kills, then `faults` with faults, `workers` at a time, on jobs of about `rows` rows.

    shards: the most that a job has.
    """
    with zygote() as mother, ThreadPoolExecutor(workers) as pool:
        count = min(TRIALS, max(4, runs // 4))
        numbers = range(seed, seed + count)
        trials = list(pool.map(lambda n: Trial(mother, folder / f"job-{n}", n, rows, 1 + n // 2 % shards), numbers))
        chaos = Chaos(trials, seed)
        list(pool.map(chaos.kill, range(runs)))
        for number in range(runs, 2 * runs if runs >= FULL_RUNS else 0):
            if chaos.is_short and not chaos.violations:
                chaos.kill(number)
        list(pool.map(chaos.fault, range(faults)))
        if faults > len(FAULTS):
            chaos.small_disk(0)
    return chaos


def main() -> int:
    """Exit code 1 when something did not hold; its folder is then kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=FULL_RUNS)
    parser.add_argument("--faults", type=int, default=3 * len(FAULTS))
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="specrun-chaos-"))
    chaos = campaign(folder, options.runs, options.faults, options.shards, options.workers, options.seed)
    chaos.print(time.monotonic() - began)
    for violation in chaos.violations:
        print(f"\nVIOLATION in {violation}", file=sys.stderr)
    short = options.runs >= FULL_RUNS and chaos.is_short
    if short:
        print(f"\nnot enough hits: each of {', '.join(CHOSEN)} must be seen {ENOUGH} times", file=sys.stderr)
    if chaos.violations:
        print(f"\nkept for inspection: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return 1 if chaos.violations or short else 0


if __name__ == "__main__":
    sys.exit(main())
