"""What the suite's workloads are made of: two machines with their drafters, and lengths drawn from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..base import Int32
from .surface import CsvSurface, DraftCost, a100, h100
from .workload import Workload

LOOK_UP = DraftCost(kind="ngram", per_pass_s=2e-5, per_request_s=2e-6, passes="none")
"""A search in token ids on the host."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU's surface and what drafters cost on it.

    Both drafters have the target's memory bandwidth to read their weights with: a head is one layer of about 32 and
    the lm_head (0.65 GB), the model 1.2 billion parameters (2.5 GB); 0.1 ms of launches a pass come on top. Catching up
    is compute: the target's time for a prompt token, by its share of the target's parameters.
    """

    name: str
    surface: CsvSurface
    slower: float
    """Times that memory and compute are slower than on the H100."""

    @property
    def head(self) -> DraftCost:
        """An EAGLE-size head, whose KV is one layer in 33."""
        return DraftCost(
            kind="eagle3",
            per_pass_s=1e-4 + 2.5e-4 * self.slower,
            per_request_s=1.5e-6 * self.slower,
            per_token_context_s=4096 / self.surface.bandwidth,
            passes="k",
            catch_up_s_per_token=6e-7 * self.slower,
            stand_by_fraction=0.6,
            kv_share=1 / 33,
        )

    @property
    def small_model(self) -> DraftCost:
        """A draft model of 1B beside the target of 7B or 8B."""
        return DraftCost(
            kind="draft_model",
            per_pass_s=1e-4 + 9.6e-4 * self.slower,
            per_request_s=3e-6 * self.slower,
            per_token_context_s=32768 / self.surface.bandwidth,
            passes="k",
            catch_up_s_per_token=3e-6 * self.slower,
            kv_share=0.2,
        )


def machine(name: str) -> Machine:
    """The machine of a surface's name, "h100" or "a100". Raises ValueError for another."""
    if name == "h100":
        return Machine(name, h100(), 1.0)
    if name == "a100":
        return Machine(name, a100(), 2.0)
    raise ValueError(f"surface must be h100 or a100, got {name!r}")


Build = Callable[[Machine, np.random.Generator], Workload]


@dataclass(frozen=True, slots=True)
class Case:
    """A workload's recipe. What it draws depends on seed and name only, not on the machine."""

    name: str
    title: str
    build: Build
    is_held_out: bool = False
    """Whether it was left alone while constants were chosen."""
    changes: tuple[float, ...] = ()
    """Shares of the job's tokens at which acceptance jumps."""

    def workload(self, surface: str, seed: int) -> Workload:
        """The workload on a machine; the same seed gives the same one."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        return replace(self.build(machine(surface), rng), name=self.name, description=self.title)


def around(rng: np.random.Generator, num_rows: int, mean: int, spread: float = 0.25) -> Int32:
    """[N] lengths spread evenly over mean * (1 - spread) to mean * (1 + spread)."""
    return rng.integers(int(mean * (1 - spread)), int(mean * (1 + spread)) + 1, num_rows, dtype=np.int32)


def skewed(rng: np.random.Generator, num_rows: int, mean: int, sigma: float = 0.6) -> Int32:
    """[N] log-normal lengths of this mean, at least 1 and at most 5 times the mean."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_rows)
    return np.clip(drawn, 1, 5 * mean).astype(np.int32)
