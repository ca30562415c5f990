"""What a policy must show, computed from the cells of the table, with every miss by name.

Definitions. speed-up = makespan of never (no drafter loaded) / makespan. harm = makespan / makespan of never - 1.
capture = (never - policy) / (never - oracle) of makespans, where the oracle is more than 5 % faster than never.
The best fixed k of a workload is the one of `never` and all `always:k` with the smallest sum of makespans over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from examples.benchmarks.policy_cells import Cell, Recovery

NEVER, ORACLE = "never", "oracle"
WORTH_CAPTURING = 0.05
AFTER_STEPS = 500

Key = tuple[str, str]
"""Workload and surface."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One criterion: what it asks, what was found, and each miss."""

    criterion: str
    found: str
    misses: tuple[str, ...]
    num_judged: int

    @property
    def passed(self) -> bool:
        """Whether nothing misses, of at least one that was judged."""
        return self.num_judged > 0 and not self.misses


class Table:
    """The cells of a run, by workload, surface, seed and contender."""

    def __init__(self, cells: Iterable[Cell], stationary: dict[str, bool]) -> None:
        """stationary: for each workload, whether acceptance and load stay the same over the job."""
        self._cells = {(c.workload, c.surface, c.seed, c.contender): c for c in cells}
        self.stationary = stationary
        self.keys: list[Key] = list(dict.fromkeys((c.workload, c.surface) for c in self._cells.values()))
        self.contenders: list[str] = list(dict.fromkeys(c.contender for c in self._cells.values()))

    def only(self, keys: Sequence[Key]) -> Table:
        """The part of these workloads and surfaces."""
        cells = (cell for (w, s, _, _), cell in self._cells.items() if (w, s) in keys)
        return Table(cells, self.stationary)

    def seeds(self, key: Key, *contenders: str) -> list[int]:
        """Seeds for which all of these contenders have run."""
        seeds = dict.fromkeys(seed for w, s, seed, _ in self._cells if (w, s) == key)
        return [seed for seed in seeds if all((*key, seed, name) in self._cells for name in contenders)]

    def cell(self, key: Key, seed: int, contender: str) -> Cell:
        """One cell. Raises KeyError where it has not run."""
        return self._cells[(*key, seed, contender)]

    def per_seed(self, key: Key, value: Callable[[int], float], *contenders: str) -> list[float]:
        """value(seed) for each seed for which these contenders have run."""
        return [value(seed) for seed in self.seeds(key, *contenders)]

    def speedup(self, key: Key, contender: str) -> float:
        """Median over seeds of the speed-up; nan where it has not run."""
        values = self.per_seed(
            key,
            lambda seed: self.cell(key, seed, NEVER).makespan_s / self.cell(key, seed, contender).makespan_s,
            NEVER,
            contender,
        )
        return median(values) if values else float("nan")

    def best_fixed(self, key: Key) -> str:
        """The fixed draft length that is best in hindsight, over all seeds; `never` is one."""
        fixed = [name for name in self.contenders if name == NEVER or name.startswith("always:")]
        fixed = [name for name in fixed if self.seeds(key, name) == self.seeds(key, NEVER)]
        return min(fixed, key=lambda name: sum(self.cell(key, s, name).makespan_s for s in self.seeds(key, NEVER)))

    def against_fixed(self, key: Key, contender: str) -> float:
        """Median over seeds of makespan / makespan of the best fixed k."""
        fixed = self.best_fixed(key)
        return median(
            self.per_seed(
                key,
                lambda seed: self.cell(key, seed, contender).makespan_s / self.cell(key, seed, fixed).makespan_s,
                fixed,
                contender,
            )
        )

    def harm(self, key: Key, contender: str) -> float:
        """Worst over seeds of makespan / makespan of never - 1; negative where it is faster on every seed."""
        return max(
            self.per_seed(
                key,
                lambda seed: self.cell(key, seed, contender).makespan_s / self.cell(key, seed, NEVER).makespan_s - 1,
                NEVER,
                contender,
            )
        )

    def capture(self, key: Key, contender: str) -> float | None:
        """Median over seeds of the captured share of the oracle's gain; None where the oracle gains 5 % or less."""
        if not self.speedup(key, ORACLE) > 1 + WORTH_CAPTURING:
            return None

        def captured(seed: int) -> float:
            never, oracle = (self.cell(key, seed, name).makespan_s for name in (NEVER, ORACLE))
            return (never - self.cell(key, seed, contender).makespan_s) / (never - oracle)

        return median(self.per_seed(key, captured, NEVER, ORACLE, contender))


def verdicts(table: Table, contender: str) -> list[Verdict]:
    """The criteria over the whole job, for one contender."""
    keys = [key for key in table.keys if table.seeds(key, NEVER, ORACLE, contender)]
    return [
        judge_harm({key: table.harm(key, contender) for key in keys}, "each single run"),
        *judge_capture({key: table.capture(key, contender) for key in keys}),
        *judge_fixed(table, keys, {key: table.against_fixed(key, contender) for key in keys}),
        *judge_recovery(table, keys, contender),
        judge_flips(
            {key: max(table.cell(key, s, contender).flips for s in table.seeds(key, contender)) for key in keys}
        ),
    ]


def judge_harm(harms: dict[Key, float], of: str) -> Verdict:
    """Worst harm at most 2 %."""
    misses = [f"{_name(key)} {harm:+.1%}" for key, harm in harms.items() if harm > 0.02]
    return Verdict(f"harm against never at most 2 %, {of}", f"worst {_worst(harms)}", tuple(misses), len(harms))


def judge_capture(captures: dict[Key, float | None]) -> list[Verdict]:
    """Median at least 90 %, worst at least 75 %, over workloads where the oracle gains over 5 %."""
    values = {key: value for key, value in captures.items() if value is not None}
    middle = median(values.values()) if values else float("nan")
    misses = [f"{_name(key)} {value:.0%}" for key, value in values.items() if value < 0.75]
    least = min(values.values(), default=float("nan"))
    return [
        Verdict(
            "capture of the oracle's gain at least 90 % in the median",
            f"{middle:.1%} over {len(values)}",
            (f"median {middle:.1%}",) if middle < 0.9 else (),
            len(values),
        ),
        Verdict("capture at least 75 % at the worst", f"worst {least:.1%}", tuple(misses), len(values)),
    ]


def judge_fixed(table: Table, keys: Sequence[Key], ratios: dict[Key, float]) -> list[Verdict]:
    """Within 1 % of the best fixed k where the workload is stationary, better than it where it is not."""
    still = {key: ratios[key] for key in keys if table.stationary[key[0]]}
    moving = {key: ratios[key] for key in keys if not table.stationary[key[0]]}

    def miss(key: Key, ratio: float) -> str:
        ideal = table.against_fixed(key, ORACLE) - 1
        return f"{_name(key)} {ratio - 1:+.1%} against {table.best_fixed(key)} (oracle {ideal:+.1%})"

    return [
        Verdict(
            "within 1 % of the best fixed k on every stationary workload",
            f"worst {_worst({k: v - 1 for k, v in still.items()})}",
            tuple(miss(key, ratio) for key, ratio in still.items() if ratio > 1.01),
            len(still),
        ),
        Verdict(
            "better than the best fixed k on every workload that is not stationary",
            f"worst {_worst({k: v - 1 for k, v in moving.items()})}",
            tuple(miss(key, ratio) for key, ratio in moving.items() if ratio >= 1),
            len(moving),
        ),
    ]


def judge_recovery(table: Table, keys: Sequence[Key], contender: str, first_step: int = 0) -> list[Verdict]:
    """Recovery after each acceptance step from first_step on: limits differ by whether the batch was speculating."""
    on: list[tuple[str, Recovery, int]] = []
    off: list[tuple[str, Recovery, int]] = []
    for key in keys:
        for seed in table.seeds(key, contender):
            cell = table.cell(key, seed, contender)
            for recovery in cell.recoveries:
                if recovery.step >= first_step:
                    (on if recovery.was_on else off).append((f"{_name(key)} seed {seed}", recovery, cell.num_tokens))
    return [
        Verdict(
            "recovery while speculating within max(2,000 tokens, 64 steps)",
            _worst_recovery(r for _, r, _ in on),
            tuple(f"{name} {r.describe()}" for name, r, _ in on if not r.within(2000, 64)),
            len(on),
        ),
        Verdict(
            "recovery from off within 1 % of the job's tokens",
            _worst_recovery(r for _, r, _ in off),
            tuple(f"{name} {r.describe()} of {total}" for name, r, total in off if not r.within(total * 0.01, 0)),
            len(off),
        ),
    ]


def judge_flips(flips: dict[Key, int]) -> Verdict:
    """At most 20 flips in any 1,000 steps of any run."""
    misses = [f"{_name(key)} {count}" for key, count in flips.items() if count > 20]
    return Verdict(
        "at most 20 on/off flips of the batch in 1,000 steps",
        f"worst {max(flips.values(), default=0)}",
        tuple(misses),
        len(flips),
    )


def verdicts_of_the_rest(table: Table, contender: str) -> list[Verdict]:
    """The same criteria on what is left of each job after the contender's first 500 steps.

    never, the oracle and the best fixed k take over there, in the state that the contender has brought about.
    """
    rest = {}
    for key in table.keys:
        seeds = table.seeds(key, contender)
        if found := [cell.rest_s for seed in seeds if (cell := table.cell(key, seed, contender)).rest_s]:
            rest[key] = found
    captures: dict[Key, float | None] = {}
    for key, found in rest.items():
        worth = [r for r in found if r["never"] > (1 + WORTH_CAPTURING) * r["oracle"]]
        captured = [(r["never"] - r["self"]) / (r["never"] - r["oracle"]) for r in worth]
        captures[key] = median(captured) if captured else None
    fixed = {key: median(r["self"] / r["fixed"] for r in found) for key, found in rest.items()}
    flips = {key: max(table.cell(key, s, contender).flips_later for s in table.seeds(key, contender)) for key in rest}
    return [
        judge_harm({key: max(r["self"] / r["never"] - 1 for r in found) for key, found in rest.items()}, "each run"),
        *judge_capture(captures),
        *judge_fixed(table, list(rest), fixed),
        *judge_recovery(table, list(rest), contender, AFTER_STEPS),
        judge_flips(flips),
    ]


def _name(key: Key) -> str:
    return f"{key[0]} {key[1]}"


def _worst(values: dict[Key, float]) -> str:
    if not values:
        return "none"
    key = max(values, key=lambda k: values[k])
    return f"{values[key]:+.1%} ({_name(key)})"


def _worst_recovery(recoveries: Iterable[Recovery]) -> str:
    worst = max(recoveries, key=lambda r: (r.tokens is None, r.tokens or 0), default=None)
    return "none to judge" if worst is None else f"worst {worst.describe()}"
