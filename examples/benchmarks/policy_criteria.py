"""What each of A1 to A18 asks, as far as a simulated run can answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from examples.benchmarks.policy_cells import Cell
from examples.benchmarks.policy_verdict import NEVER, ORACLE, Key, Table

Found = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one surface under the judged contender."""

    table: Table
    key: Key
    contender: str

    @property
    def cells(self) -> list[Cell]:
        """One a seed."""
        return [self.table.cell(self.key, seed, self.contender) for seed in self.table.seeds(self.key, self.contender)]

    def speed_against(self, other: str) -> float:
        """Median over seeds of the other's makespan over ours; nan where the other has not run."""
        return self.table.speedup(self.key, self.contender) / self.table.speedup(self.key, other)

    def median(self, value: Callable[[Cell], float]) -> float:
        """Over seeds."""
        return median(value(cell) for cell in self.cells)


def judge_each(table: Table, contender: str) -> Iterator[tuple[Key, str, str, bool]]:
    """Workload and surface, what is asked, what was found, whether it is met."""
    for key in table.keys:
        if key[0] in CRITERIA and table.seeds(key, NEVER, ORACLE, contender):
            asked, judge = CRITERIA[key[0]]
            yield (key, asked, *judge(Run(table, key, contender)))


def _edge(run: Run) -> Found:
    flips, ratio = max(cell.flips for cell in run.cells), run.table.against_fixed(run.key, run.contender)
    return f"{flips} flips, {ratio - 1:+.1%}", flips <= 20 and ratio <= 1.03


def _of_oracle(share: float) -> Callable[[Run], Found]:
    def judge(run: Run) -> Found:
        speed = run.speed_against(ORACLE)
        return f"{speed:.1%}", speed >= share

    return judge


def _collapse(run: Run) -> Found:
    speed = run.speed_against(ORACLE)
    tokens = [recovery.tokens for cell in run.cells for recovery in cell.recoveries]
    worst = None if None in tokens else max(t for t in tokens if t is not None)
    return f"{speed:.1%}, {worst} tokens", speed >= 0.95 and worst is not None and worst <= 2000


def _back_on(run: Run) -> Found:
    """The second change is the recovery."""
    shares = [None if (r := cell.recoveries[-1]).tokens is None else r.tokens / cell.num_tokens for cell in run.cells]
    if None in shares:
        return "never", False
    worst = max(share for share in shares if share is not None)
    return f"{worst:.2%} of the tokens", worst <= 0.01


def _by_group(run: Run) -> Found:
    speed = run.speed_against("goodput:ungrouped")
    return f"{speed:.3f}x of goodput without groups", speed >= 1.03


def _tail(run: Run) -> Found:
    """A drafter that catches up drafts as well as a fresh one here; what can be lost is the tail's speed."""
    ours = run.median(lambda cell: cell.tail_s)
    oracle = median(run.table.cell(run.key, seed, ORACLE).tail_s for seed in run.table.seeds(run.key, ORACLE))
    return f"{oracle / ours:.2f} of the oracle's speed below 32 requests", oracle / ours >= 0.9


def _harm(run: Run) -> Found:
    harm = run.table.harm(run.key, run.contender)
    return f"{harm:+.1%}", harm <= 0.02


def _short_drafts(limit: float) -> Callable[[Run], Found]:
    def judge(run: Run) -> Found:
        length = run.median(lambda cell: cell.mean_draft_len)
        return f"mean draft length {length:.2f}", length <= limit

    return judge


def _preemptions(run: Run) -> Found:
    ours = run.median(lambda cell: cell.num_preemptions)
    never = median(run.table.cell(run.key, seed, NEVER).num_preemptions for seed in run.table.seeds(run.key, NEVER))
    return f"{ours:.0f} against {never:.0f}", ours <= 1.05 * never


def _calibration(run: Run) -> Found:
    errors = [cell.facts["cost_error_p50"] for cell in run.cells if "cost_error_p50" in cell.facts]
    return (f"p50 {median(errors):.1%}", median(errors) <= 0.1) if errors else ("not reported", False)


def _gain(run: Run) -> Found:
    speedup = run.table.speedup(run.key, run.contender)
    return f"{speedup:.2f}x", speedup >= 1.3


def _late_off(run: Run) -> Found:
    late = run.median(lambda cell: cell.late_draft_len)
    oracle = median(run.table.cell(run.key, s, ORACLE).late_draft_len for s in run.table.seeds(run.key, ORACLE))
    return f"draft length {late:.2f} in the last quarter (oracle {oracle:.2f})", late <= oracle + 0.1


def _calm(run: Run) -> Found:
    flips = max(cell.flips for cell in run.cells)
    return f"{flips} flips", flips <= 20


CRITERIA: dict[str, tuple[str, Callable[[Run], Found]]] = {
    "A1": ("at most 20 flips, within 3 % of the best fixed", _edge),
    "A2": ("95 % of the oracle's speed, recovery within 2,000 tokens", _collapse),
    "A3": ("on again within 1 % of the job", _back_on),
    "A4": ("groups are worth 3 %", _by_group),
    "A5": ("4 % faster than the uniform oracle", _of_oracle(1.04)),
    "A6": ("the tail as with a fresh drafter, but for 10 %", _tail),
    "A7": ("harm at most 2 %", _harm),
    "A8": ("0 or 1 drafts", _short_drafts(1.0)),
    "A9": ("0 or 1 drafts", _short_drafts(1.0)),
    "A10": ("at most 5 % more preemptions than never", _preemptions),
    "A11": ("cost error at most 10 %", _calibration),
    "A12": ("at least 1.3x", _gain),
    "A13": ("off where the oracle is, in the last quarter", _late_off),
    "A14": ("0 or 1 drafts", _short_drafts(1.05)),
    "A15": ("the engine without drafter is picked: harm at most 2 %", _harm),
    "A16a": ("within 2 % of the oracle", _of_oracle(0.98)),
    "A16b": ("within 2 % of the oracle", _of_oracle(0.98)),
    "A17": ("within 2 % of the exhaustive argmax", _of_oracle(0.98)),
    "A18": ("at most 20 flips", _calm),
}
