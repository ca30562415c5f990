"""What a step costs: seconds of the target's forward pass and of the drafter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base import Int32, Int64

Float64 = NDArray[np.float64]
STEP_COSTS = "SPECRUN_STEP_COSTS"
"""Environment variable: the folder of measured step costs, CSV files of num_tokens and dense_ms."""
TILE = 64
"""Rows of a tile of a matrix product, in a stand-in for measured costs."""
GRAPH_SIZES = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)], dtype=np.int32)
"""Row counts for which vLLM captures CUDA graphs by default."""
NO_GRAPHS = np.zeros(0, np.int32)
PASSES = ("k", "one", "none")
TABLE_SIZE = 4096
"""Row counts whose dense seconds are looked up rather than computed."""


class CostSurface(Protocol):
    """Seconds of a step without its drafter. Padding is in it; `noise` is left to the simulation."""

    capture_sizes: Int32
    """[C] ascending row counts that the forward pass is padded to; more rows than the last are not padded."""
    noise: float
    """Standard deviation of the logarithm of a step's seconds."""

    def step_s(
        self,
        num_rows: ArrayLike,
        num_requests: int,
        num_context_tokens: float,
        num_prefill_tokens: int,
        progress: float = 0.0,
    ) -> Float64:
        """Seconds for each of num_rows (any shape), prefill rows included.

        num_requests, num_context_tokens: of the decoding requests. progress: share of the job that is done, 0 to 1.
        """
        ...


def pad(num_rows: ArrayLike, capture_sizes: Int32) -> Float64:
    """Rows that the forward pass runs."""
    rows = np.asarray(num_rows, dtype=np.float64)
    if not len(capture_sizes):
        return rows
    index = np.searchsorted(capture_sizes, rows)
    padded = capture_sizes[np.minimum(index, len(capture_sizes) - 1)]
    return np.where(index < len(capture_sizes), padded, rows)


@dataclass(frozen=True)
class DraftCost:
    """Seconds of a drafter. One pass over m requests takes per_pass_s + m * per_request_s + their context tokens *
    per_token_context_s.

    Raises ValueError naming the field that is wrong.
    """

    kind: str = "draft_model"
    per_pass_s: float = 0.0
    per_request_s: float = 0.0
    per_token_context_s: float = 0.0
    passes: str = "none"
    """"k": one pass a draft token (autoregressive); "one": one for all of a request's tokens; "none": no weights, one
    look-up, never behind."""
    catch_up_s_per_token: float = 0.0
    """For each token that was not read when it was written, prompts included; paid when its request is drafted for."""
    stand_by_fraction: float = 1.0
    """Share of a pass that keeping the requests ready takes that are not drafted for."""
    off_tax: float = 0.0
    """Share that a step without drafts takes longer because a drafter is loaded (an engine that loses its graphs)."""
    kv_share: float = 0.0
    """Share of the KV cache that a loaded drafter takes."""

    def __post_init__(self) -> None:
        if self.passes not in PASSES:
            raise ValueError(f"passes must be one of {', '.join(PASSES)}, got {self.passes!r}")
        if not 0 <= self.kv_share < 1:
            raise ValueError(f"kv_share must be 0 to below 1, got {self.kv_share}")

    @property
    def has_weights(self) -> bool:
        """Whether it has to read every token, and so can fall behind."""
        return self.passes != "none"

    def draft_s(self, budgets: Int32, context_lens: NDArray[np.integer]) -> Float64:
        """Seconds to draft budgets [..., R] for requests of context_lens [R]; shape [...]."""
        passes = budgets if self.passes == "k" else budgets > 0
        longest = passes.max(axis=-1, initial=0)
        seconds = longest * self.per_pass_s + passes.sum(axis=-1) * self.per_request_s
        if self.per_token_context_s:
            seconds = seconds + (passes @ context_lens) * self.per_token_context_s
        return np.asarray(seconds, np.float64)

    def stand_by_s(self, budgets: Int32, context_lens: NDArray[np.integer]) -> Float64:
        """Seconds to keep those requests ready that have no budget; they share a pass where others draft."""
        if not self.has_weights:
            return np.zeros(budgets.shape[:-1])
        idle = budgets == 0
        alone = idle.all(axis=-1) & bool(budgets.shape[-1])
        seconds = alone * self.per_pass_s + idle.sum(axis=-1) * self.per_request_s
        if self.per_token_context_s:
            seconds = seconds + (idle @ context_lens) * self.per_token_context_s
        return np.asarray(self.stand_by_fraction * seconds, np.float64)


@dataclass(frozen=True)
class CsvSurface(CostSurface):
    """Measured milliseconds of the dense layers by rows, plus what such tables leave out, by formula:

        attention  context tokens * kv_bytes_per_token / bandwidth
                   (a request's KV is read once, however many of its rows are verified; scores are left out)
        lm_head    max(hidden * vocabulary * 2 bytes / bandwidth, rows with logits * 2 * hidden * vocabulary / flops),
                   and the fp32 logits written once and read twice at the bandwidth
        launch     launch_s a step; rows past the last graph run from the host and take eager_s at least.

    Between measured rows the cost is linear, beyond the last it goes on with the slope of the last quarter.
    """

    rows: Float64
    """[M] ascending."""
    dense_s: Float64
    """[M]"""
    bandwidth: float = 2.6e12
    """Bytes a second that a kernel reaches."""
    flops: float = 6e14
    """bf16 operations a second that a matrix product reaches."""
    kv_bytes_per_token: float = 131072.0
    hidden: int = 4096
    vocabulary: int = 128256
    launch_s: float = 6e-4
    per_request_s: float = 2e-6
    """Host work for each request."""
    eager_s: float = 0.012
    capture_sizes: Int32 = field(default_factory=lambda: GRAPH_SIZES)
    noise: float = 0.0

    @classmethod
    def read(cls, path: Path | str, **constants: object) -> CsvSurface:
        """From a file with the columns num_tokens and dense_ms. Raises OSError or ValueError."""
        table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
        return replace(cls(table[:, 0], table[:, 1] / 1e3), **constants)  # type: ignore[arg-type]

    def step_s(
        self,
        num_rows: ArrayLike,
        num_requests: int,
        num_context_tokens: float,
        num_prefill_tokens: int,
        progress: float = 0.0,
    ) -> Float64:
        """As CostSurface.step_s."""
        rows = np.asarray(num_rows, dtype=np.int64)
        if rows.max(initial=0) < TABLE_SIZE:
            padded, dense_s, floor_s = self._table[:, rows]
        else:
            padded, dense_s, floor_s = self._tabulate(rows)
        logits = np.maximum(padded - num_prefill_tokens, 1.0)
        weights = self.hidden * self.vocabulary * 2.0
        head_s = np.maximum(logits * (weights / self.flops), weights / self.bandwidth)
        head_s += logits * (12.0 * self.vocabulary / self.bandwidth)
        attention_s = num_context_tokens * (self.kv_bytes_per_token / self.bandwidth)
        seconds = np.maximum(dense_s + head_s + attention_s, floor_s)
        return np.asarray(seconds + (self.launch_s + num_requests * self.per_request_s), np.float64)

    @cached_property
    def _table(self) -> Float64:
        """[3, TABLE_SIZE] padded rows, dense seconds and least seconds by rows."""
        return np.stack(self._tabulate(np.arange(TABLE_SIZE)))

    def _tabulate(self, rows: Int64) -> tuple[Float64, Float64, Float64]:
        padded = pad(rows, self.capture_sizes)
        last = self.capture_sizes[-1] if len(self.capture_sizes) else np.inf
        return padded, self._dense_s(padded), np.where(rows > last, self.eager_s, 0.0)

    def _dense_s(self, rows: Float64) -> Float64:
        last = len(self.rows) - 1
        inside = np.interp(rows, self.rows, self.dense_s)
        if last == 0:
            return np.asarray(inside, np.float64)
        far = min(last * 3 // 4, last - 1)
        slope = (self.dense_s[last] - self.dense_s[far]) / (self.rows[last] - self.rows[far])
        return np.asarray(inside + np.maximum(rows - self.rows[last], 0) * slope, np.float64)


def h100(**constants: object) -> CsvSurface:
    """Llama-2-7B's dense layers on an H100 (bf16, 2.6 TB/s and 600 Tflop/s reached), its vocabulary of 32,000, and the
    KV of a grouped-query model of that size (128 KiB a token, as Llama-3-8B; its own would be four times that).

    Measured where STEP_COSTS names a folder with step_cost_h100_llama2_7b.csv; a stand-in by the roofline elsewhere.
    """
    return _measured("step_cost_h100_llama2_7b.csv", "H100", {"vocabulary": 32000, **constants})


def a100(**constants: object) -> CsvSurface:
    """Llama-3-8B on an A100 (bf16, 1.3 TB/s and 220 Tflop/s reached, 128 KiB of KV a token); as h100, from
    step_cost_a100_llama3_8b.csv."""
    reached = {"bandwidth": 1.3e12, "flops": 2.2e14, "eager_s": 0.02}
    return _measured("step_cost_a100_llama3_8b.csv", "A100", {**reached, **constants})


def _measured(file: str, gpu: str, constants: Mapping[str, object]) -> CsvSurface:
    if folder := os.environ.get(STEP_COSTS):
        return CsvSurface.read(Path(folder) / file, **constants)
    return replace(roofline(gpu, stairs=TILE), **constants)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Gpu:
    """Data-sheet figures: bytes a second, dense bf16 operations a second."""

    bandwidth: float
    flops: float


GPUS = {
    "H100": Gpu(3.35e12, 9.89e14),
    "H200": Gpu(4.8e12, 9.89e14),
    "A100": Gpu(2.04e12, 3.12e14),
    "L40S": Gpu(8.64e11, 3.62e14),
}
"""SXM parts, A100 with 80 GB."""
REACHED_BANDWIDTH, REACHED_FLOPS = 0.77, 0.6
"""Shares of the data sheet that kernels reach: 2.6 of 3.35 TB/s on an H100, and what cuBLAS does on large products."""


def roofline(
    gpu: str, num_params: float = 7e9, bytes_per_param: float = 2.0, stairs: int = 0, **constants: object
) -> CsvSurface:
    """Dense layers by the roofline of a named GPU: the larger of weights / bandwidth and 2 * num_params * rows / flops.

    num_params: of the layers, without embeddings. stairs: if not 0, rows are computed in tiles of so many, which all
    cost the same, and the corner is round, as measured ones are: the root of the sum of the squares. Raises ValueError
    for an unknown GPU.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}")
    bandwidth, flops = GPUS[gpu].bandwidth * REACHED_BANDWIDTH, GPUS[gpu].flops * REACHED_FLOPS
    corner = bytes_per_param * flops / (2 * bandwidth)  # rows from which on compute takes longer than the weights
    rows = np.array([1.0, corner, 2 * corner, 16 * corner])
    if stairs:
        ends = np.arange(stairs, 16 * corner, stairs, dtype=np.float64)
        rows = np.stack([ends - stairs + 1, ends], axis=1).ravel()
    computed = np.ceil(rows / stairs) * stairs if stairs else rows
    weights_s, compute_s = num_params * bytes_per_param / bandwidth, 2 * num_params * computed / flops
    dense_s = np.hypot(weights_s, compute_s) if stairs else np.maximum(weights_s, compute_s)
    reached: dict[str, object] = {"bandwidth": bandwidth, "flops": flops}
    return replace(CsvSurface(rows, dense_s), **(reached | constants))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Distorted(CostSurface):
    """Another surface made worse."""

    surface: CostSurface
    factor: float = 1.0
    drift: float = 0.0
    """Seconds go up and down by this share over the job, `cycles` times: a machine that heats up."""
    cycles: float = 2.0
    cliff: tuple[float, float] | None = None
    """(rows, factor): more rows than these take `factor` times as long."""
    noise: float = 0.0
    """In place of the surface's own."""

    @property
    def capture_sizes(self) -> Int32:  # type: ignore[override]
        """Of the surface."""
        return self.surface.capture_sizes

    def step_s(
        self,
        num_rows: ArrayLike,
        num_requests: int,
        num_context_tokens: float,
        num_prefill_tokens: int,
        progress: float = 0.0,
    ) -> Float64:
        """As CostSurface.step_s."""
        seconds = self.surface.step_s(num_rows, num_requests, num_context_tokens, num_prefill_tokens, progress)
        scale = self.factor * (1 + self.drift * np.sin(2 * np.pi * self.cycles * progress))
        if self.cliff is not None:
            scale = np.where(np.asarray(num_rows) > self.cliff[0], scale * self.cliff[1], scale)
        return np.asarray(seconds * scale, np.float64)


def staircase(rows: Sequence[float], milliseconds: Sequence[float], **constants: object) -> CsvSurface:
    """Given seconds and nothing else: no attention, no lm_head, no launch, no padding unless `constants` say so."""
    bare: dict[str, object] = {
        "kv_bytes_per_token": 0.0,
        "vocabulary": 0,
        "launch_s": 0.0,
        "per_request_s": 0.0,
        "eager_s": 0.0,
        "capture_sizes": NO_GRAPHS,
    }
    surface = CsvSurface(np.asarray(rows, np.float64), np.asarray(milliseconds, np.float64) / 1e3)
    return replace(surface, **(bare | constants))  # type: ignore[arg-type]
