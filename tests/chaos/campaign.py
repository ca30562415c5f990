"""One disturbed job: attempts that are killed or fail, then attempts to the end, and everything that must hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.chaos.chaos_job import ChaosJob, make_rows
from tests.chaos.invariants import PartReader, check_clean, check_complete, demand, parts_of
from tests.chaos.remains import committed_rows, shows, spilled_rows
from tests.chaos.zygote import Ended, Zygote

MAX_ATTEMPTS = 3
"""Attempts that nothing disturbs; one is enough, but for a shard that finds another one finalising."""
KILLED = -9
Plan = dict[str, Any]
"""See broken_disk.arm(); with `name`, under which it is counted, and `codes`, the exit codes that it may lead to."""


@dataclass(slots=True)
class Tally:
    """What was met, over many runs."""

    attempts: int = 0
    aimed: Counter[str] = field(default_factory=Counter)
    """Attempts at a kill or a fault, by its name."""
    told: Counter[str] = field(default_factory=Counter)
    """Of these, those in which the child left a note just before, or died where no note is asked for."""
    seen: Counter[str] = field(default_factory=Counter)
    """Of these, those in which the files show it too."""
    resumed_rows: int = 0
    """Finished rows of unfinished parts that were there when an attempt began."""
    repeated_rows: int = 0
    """Rows that ran once more, since a crash had taken their results."""
    reads: int = 0
    """Files of data/ read while jobs ran."""

    def add(self, other: Tally) -> None:
        self.attempts += other.attempts
        for name in ("aimed", "told", "seen"):
            getattr(self, name).update(getattr(other, name))
        self.resumed_rows += other.resumed_rows
        self.repeated_rows += other.repeated_rows
        self.reads += other.reads


class Trial:
    """A job, run undisturbed once, then disturbed as often as one likes."""

    def __init__(self, zygote: Zygote, folder: Path, seed: int, num_rows: int, shards: int = 1) -> None:
        rng = random.Random(seed)
        is_jsonl = seed % 2 == 1
        rows = make_rows(rng, rng.randrange(num_rows * 2 // 3, num_rows * 4 // 3), is_jsonl)
        self.folder = folder
        self.shards = shards
        self.job = ChaosJob(folder, rows, is_jsonl, rng.randrange(20, 51), extras=seed % 3 == 0)
        self.stub = {"seed": seed if seed % 4 else None, "max_num_seqs": rng.choice([8, 32, 64]), "output_rows": 16}
        self._zygote = zygote
        self.path = folder / "undisturbed"
        self.seconds = 0.0
        """How long an undisturbed attempt takes."""
        for shard in range(shards):
            ended = self.attempt(self.path, shard)
            demand(ended.status == 0, f"undisturbed: exit {ended.status}\n{ended.log}")
            self.seconds = max(self.seconds, ended.seconds)
        check_complete(self.job, self.path, None)
        self.undisturbed: dict[str, pa.Table] = parts_of(self.path)
        self.parts_per_shard = len(self.undisturbed) // shards

    def attempt(self, out: Path, shard: int, plan: Plan | None = None) -> Ended:
        """One attempt at a shard."""
        args = ["submit", str(self.job.file), "--set", f"output.path={out}"]
        if self.shards > 1:
            args += ["--set", f"run.shard={shard}/{self.shards}"]
        log = out.with_name(f"{out.name}.{shard}.log")
        return self._zygote.run(args, out, log, {"shard": shard, **(plan or {})}, **self.stub)


class DisturbedRun:
    """One output of a trial's job. Shards run at the same time, each through all the plans."""

    def __init__(self, trial: Trial, out: Path) -> None:
        self.trial = trial
        self.out = out
        self.tally = Tally()
        self._ran: Counter[int] = Counter()
        self._may_forget = False

    def run(self, plans: list[Plan], between: Callable[[Path], None] | None = None, may_forget: bool = False) -> Tally:
        """Attempts with the plans, one after the other, then without until the job is done; then everything must hold.

        between: called with the output when all plans are through, before the attempts that nothing disturbs.
        may_forget: after that, rows that were finished but not committed may run again.
        """
        trial = self.trial
        reader = PartReader(self.out, trial.undisturbed)
        with reader.reading(), ThreadPoolExecutor(trial.shards) as pool:
            list(pool.map(partial(self._disturb, plans), range(trial.shards)))
            if between is not None:
                between(self.out)
            self._may_forget = may_forget
            list(pool.map(self._finish, range(trial.shards)))
        reader.read_all()
        demand(reader.violation is None, str(reader.violation))
        check_complete(trial.job, self.out, trial.path)
        self.tally.reads = reader.num_reads
        self.tally.repeated_rows = sum(self._ran.values()) - len(self._ran)
        return self.tally

    def check_nothing_to_do(self) -> None:
        """Another attempt at the finished job runs nothing and changes nothing."""
        ended = self._attempt(0, None)
        demand(ended.status == 0 and not ended.generated, f"a finished job ran again: exit {ended.status}\n{ended.log}")
        check_complete(self.trial.job, self.out, self.trial.path)

    def _disturb(self, plans: list[Plan], shard: int) -> None:
        for plan in plans:
            self._suffer(shard, plan)

    def _suffer(self, shard: int, plan: Plan) -> None:
        name, tally = plan["name"], self.tally
        ended = self._attempt(shard, plan)
        tally.aimed[name] += 1
        if ended.status == 0 and not ended.notes:
            return  # it was done before it came to the point
        codes = plan.get("codes", [KILLED])
        demand(ended.status in codes, f"{name}: exit {ended.status}, expected {codes}\n{ended.log}")
        tally.told[name] += bool(ended.notes) or "point" not in plan
        if ended.status == KILLED:
            tally.seen[name] += all(shows(self.out, n["killed_at"], Path(n["path"])) for n in ended.notes)
            return
        tally.seen[name] += 1
        check_clean(self.out, shard)
        if ended.status > 0 and ended.status != 75:
            _check_text(ended.log, plan.get("says", ""))

    def _finish(self, shard: int) -> None:
        for _ in range(MAX_ATTEMPTS):
            ended = self._attempt(shard, None)
            if ended.status == 0:
                return
        demand(False, f"shard {shard} does not come to an end: exit {ended.status}\n{ended.log}")

    def _attempt(self, shard: int, plan: Plan | None) -> Ended:
        committed = committed_rows(self.out)
        spilled = spilled_rows(self.out) - committed if not self._may_forget else set()
        ended = self.trial.attempt(self.out, shard, plan)
        again = sorted({*ended.generated} & (committed | spilled))
        demand(not again, f"rows that were done ran again: {again}\n{ended.log}")
        twice = [row for row, count in Counter(ended.generated).items() if count > 1]
        demand(not twice, f"rows ran twice in one attempt: {twice}")
        spilled_now = spilled_rows(self.out)  # before what is committed: another shard may commit meanwhile
        committed_now = committed_rows(self.out)
        lost = sorted(committed - committed_now)
        demand(not lost, f"rows were committed and are gone: {lost}\n{ended.log}")
        lost = sorted(spilled - committed_now - spilled_now)
        demand(not lost, f"rows were finished and are gone: {lost}\n{ended.log}")
        self._ran.update(ended.generated)
        self.tally.attempts += 1
        self.tally.resumed_rows += len(spilled)
        return ended


def _check_text(log: str, says: str) -> None:
    """What a person gets to read: a line or two that begin with the program's name, and nothing of its inside."""
    lines = log.splitlines()
    is_clear = lines and len(lines) <= 3 and all(line.startswith("specrun: ") for line in lines)
    demand(bool(is_clear) and "internal error" not in log and says in log, f"no clear text ({says!r} expected):\n{log}")
