"""What a simulated job came to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..base import Int32, Int64

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """Totals, and arrays with one entry for each of the S steps."""

    makespan_s: float
    num_tokens: int
    """Tokens committed."""
    num_draft_tokens: int
    """Draft tokens verified."""
    num_accepted_tokens: int
    num_preemptions: int
    num_catch_up_tokens: int
    """Tokens that the drafter had to read before it could draft, prompts included."""
    num_running: Int32
    """[S] requests that decoded."""
    num_waiting: Int32
    """[S]"""
    num_batched_tokens: Int32
    """[S] rows of the forward pass."""
    num_prefill_tokens: Int32
    """[S]"""
    num_context_tokens: Int64
    """[S] context of the requests that decoded."""
    draft_tokens: Int32
    """[S] draft tokens verified."""
    accepted_tokens: Int32
    """[S]"""
    committed_tokens: Int32
    """[S] tokens committed, those of finished prefills included."""
    seconds: Float64
    """[S] all of the step."""
    draft_s: Float64
    """[S] of these, drafting, standing by and catching up."""
    progress: Float64
    """[S] share of the job's tokens that were done before the step."""
    is_on: NDArray[np.bool_]
    """[S] whether the batch speculated: more than an eighth of the requests that could use a draft were given a budget,
    and more than one if there were several, and drafts of more than an eighth of those that had any were verified. A
    probe of a few requests is off; a step in which no request could use a draft, or for which none was found, is as the
    one before."""

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.seconds)

    @property
    def num_flips(self) -> int:
        """How often the batch went from speculating to not, or back."""
        return int(np.count_nonzero(self.is_on[1:] != self.is_on[:-1]))

    @property
    def mean_draft_len(self) -> Float64:
        """[S] verified draft tokens for each decoding request."""
        return np.asarray(self.draft_tokens / np.maximum(self.num_running, 1), np.float64)


_DTYPES = {"seconds": np.float64, "draft_s": np.float64, "progress": np.float64, "is_on": np.bool_}


class Steps:
    """Collects one row a step."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []
        self._names: tuple[str, ...] = ()

    def add(self, **values: float) -> None:
        """The arrays' entries for this step, by name, in the same order every time."""
        self._names = self._names or tuple(values)
        self._rows.append(tuple(values.values()))

    def result(self, num_preemptions: int, num_catch_up_tokens: int) -> Result:
        """Arrays of all steps with their sums. At least one step."""
        columns = dict(zip(self._names, np.array(self._rows, np.float64).T, strict=True))
        arrays = {name: column.astype(_DTYPES.get(name, np.int32)) for name, column in columns.items()}
        arrays["num_context_tokens"] = columns["num_context_tokens"].astype(np.int64)
        return Result(
            makespan_s=float(columns["seconds"].sum()),
            num_tokens=int(columns["committed_tokens"].sum()),
            num_draft_tokens=int(columns["draft_tokens"].sum()),
            num_accepted_tokens=int(columns["accepted_tokens"].sum()),
            num_preemptions=num_preemptions,
            num_catch_up_tokens=num_catch_up_tokens,
            **arrays,
        )
