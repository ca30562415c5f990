"""The workloads that a policy is judged on, by name, on the cost surfaces of two machines."""

from __future__ import annotations

from collections.abc import Sequence

from .adversarial import ADVERSARIAL
from .case import Case
from .held_out import HELD_OUT
from .workload import Workload

SURFACES = ("h100", "a100")
DEVELOPMENT_SEEDS, HELD_OUT_SEEDS = (0, 1), (10, 11, 12)
CASES: dict[str, Case] = {case.name: case for case in (*ADVERSARIAL, *HELD_OUT)}


def workloads(surface: str, seed: int, names: Sequence[str] | None = None) -> list[Workload]:
    """The named workloads, or all, on the surface "h100" or "a100"; the same seed gives the same ones.

    Raises ValueError for an unknown surface or name.
    """
    unknown = [name for name in names or () if name not in CASES]
    if unknown:
        raise ValueError(f"no workload {unknown[0]!r}; choose {', '.join(CASES)}")
    return [CASES[name].workload(surface, seed) for name in names or CASES]
