"""The kills and faults there are."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.chaos.campaign import DisturbedRun, Plan, Tally, Trial
from tests.chaos.invariants import demand
from tests.chaos.remains import work_files

CHOSEN = ("part_write", "rename", "journal", "spill")
"""Points that must be hit often."""
KILLS = ("random", *CHOSEN, "named", "state", "SIGTERM")


def kill_plan(rng: random.Random, name: str, trial: Trial, delayed: bool = False) -> Plan:
    """A kill of the given name, at a moment that a first attempt comes to.

    delayed: amid a part write the kill comes a little later, at any moment, from another thread.
    """
    if name == "random":
        return {"name": name, "kill_after_s": rng.uniform(0, trial.seconds), "codes": [-signal.SIGKILL, 0]}
    if name == "SIGTERM":
        codes = [0, 75, -signal.SIGTERM]  # the last before Python listens
        return {"name": name, "kill_after_s": rng.uniform(0, trial.seconds), "signal": signal.SIGTERM, "codes": codes}
    plan: Plan = {"name": name, "point": name, "do": "kill", "nth": rng.randint(1, trial.parts_per_shard)}
    if name == "part_write" and delayed:
        plan["delay_s"] = rng.uniform(0, 0.001)
    if name in ("journal", "spill"):
        plan["do"] = rng.choice(["half_line", "tear"])
        plan["fraction"] = rng.random()
    if name == "spill":
        plan["nth"] = rng.randint(1, 4 * trial.parts_per_shard)
    return plan


@dataclass(frozen=True, slots=True)
class Fault:
    """A disk that fails in one attempt, or files that were damaged between two."""

    name: str
    plan: Plan
    prepare: Callable[[Path], None] | None = None
    mend: Callable[[Path], None] | None = None
    may_forget: bool = False
    """See DisturbedRun.run()."""

    def run(self, trial: Trial, out: Path, rng: random.Random) -> Tally:
        """A kill, so that there is something to lose, the fault, and the attempts after it."""
        kill = {**kill_plan(rng, "spill", trial), "nth": 8, "name": "before a fault"}
        plans = [{"name": self.name, **self.plan}] if self.plan else []
        if self.prepare is not None:
            out.mkdir()
            self.prepare(out)
        else:
            plans.insert(0, kill)
        tally = DisturbedRun(trial, out).run(plans, self.mend, self.may_forget)
        if not self.plan:
            for counter in (tally.aimed, tally.told, tally.seen):
                counter[self.name] += 1
        demand(tally.told[self.name] > 0, "the job did not come to the fault")
        return tally


def _unlock(out: Path) -> None:
    for folder in (out, out / "data"):
        if folder.exists():
            folder.chmod(0o755)


def _tear_journals(out: Path) -> None:
    for number, journal in enumerate(work_files(out, "journal.jsonl")):
        content = journal.read_bytes()
        rng = random.Random(f"{out.name} {number}")
        torn = [content[: rng.randrange(len(content) + 1)], content + b'\n{"name"', content + bytes(40), b"\xff" * 9]
        journal.write_bytes(rng.choice(torn))


def _truncate_manifests(out: Path) -> None:
    for number, manifest in enumerate([out / "manifest.json", *work_files(out, "manifest.json")]):
        if manifest.exists():
            rng = random.Random(f"{out.name} {number}")
            manifest.write_bytes(manifest.read_bytes()[: rng.choice([0, 1, 100, -1])])


def _failing(point: str, error: str, says: str, code: int = 74, nth: int = 1, sticky: bool = True) -> Plan:
    return {
        "point": point,
        "nth": nth,
        "do": "raise",
        "errno": error,
        "sticky": sticky,
        "codes": [code],
        "says": says,
    }


FULL, BROKEN, READ_ONLY = "No space left on device", "Input/output error", "Read-only file system"
FAULTS = [
    Fault("ENOSPC, spill", _failing("spill", "ENOSPC", FULL)),
    Fault("ENOSPC, spill, once", _failing("spill", "ENOSPC", FULL, nth=3, sticky=False)),
    Fault(
        "ENOSPC amid a spilled line", {"point": "spill", "nth": 2, "do": "short_write", "fraction": 0.6, "codes": [74]}
    ),
    Fault(
        "ENOSPC amid a journal line",
        {"point": "journal", "nth": 2, "do": "short_write", "fraction": 0.6, "codes": [74]},
    ),
    Fault("ENOSPC, journal", _failing("journal", "ENOSPC", FULL)),
    Fault("ENOSPC, rename", _failing("rename", "ENOSPC", FULL, nth=2)),
    Fault("EIO, rename", _failing("rename", "EIO", BROKEN, sticky=False)),
    Fault("EIO, fsync", {"fsync": "EIO", "nth": 2, "codes": [74], "says": BROKEN}),
    Fault("EROFS, start", _failing("write", "EROFS", READ_ONLY, code=73)),
    Fault("EROFS, later", _failing("spill", "EROFS", READ_ONLY, nth=3)),
    Fault(
        "read-only folder",
        {"obey_permissions": True, "codes": [73], "says": "Permission denied"},
        lambda out: out.chmod(0o555),
        _unlock,
    ),
    Fault(
        "data/ becomes read-only",
        {"obey_permissions": True, "point": "rename", "nth": 2, "do": "read_only", "codes": [74], "says": "denied"},
        None,
        _unlock,
    ),
    Fault("file size limit", {"file_size": 5000, "codes": [74], "says": "File too large"}),
    Fault("torn journal", {}, None, _tear_journals),
    Fault("truncated manifest", {}, None, _truncate_manifests, may_forget=True),
]


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Callable[[Path], None] | None]:
    """A file system of its own at `folder`, of so many bytes. Gives what enlarges it; None without permission."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        may = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        may = False
    try:
        yield partial(_enlarge, folder) if may else None
    finally:
        if may:
            subprocess.run(["umount", str(folder)], check=True)


def _enlarge(folder: Path, out: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)


def run_on_small_disk(trial: Trial, folder: Path) -> Tally | None:
    """A disk with room for half of the output, then a larger one; None where mounting one is not permitted."""
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in trial.path.rglob("*") if path.is_file())
    plan: Plan = {"name": "small disk", "codes": [74], "says": FULL}
    with small_disk(folder, size // 2) as enlarge:
        if enlarge is None:
            return None
        return DisturbedRun(trial, folder / "out").run([plan], enlarge)
