"""Speculate while the batch is small: the classic rule, with a band and a dwell so that it does not flap."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

from .base import SpecDecision, SpeculationPolicy, StepState
from .options import draft_length, share, whole_number

DISABLE_ABOVE = 8
BAND_PATIENCE = 128
"""Steps in a row after which a batch that rests inside the band is taken at its word: the band does not latch."""
ROUNDING = 1e-9


class BatchThreshold(SpeculationPolicy):
    """Long drafts in small batches; short ones, or none, in large batches.

    The batch size is `StepState.num_scheduled`: all requests of the step, prefills included, as in vLLM.

    disable_above: largest batch that speculates, at least 1; 8 when neither it nor a table is given.
    num_draft_tokens: draft length up to there, at least 1; None: `StepState.max_draft_tokens`.
    table: instead of these two, rows [first, last, num_draft_tokens] over batch sizes, both ends included, as in
        vLLM's num_speculative_tokens_per_batch_size. The first row starts at 1; a gap, and all above the last
        row, carry on with the row before; 0 is off. Lengths are cut to `StepState.max_draft_tokens`.
    hysteresis: share of a limit, 0 to below 1. A growing batch crosses a limit at once; a shrinking one crosses back
        at limit * (1 - hysteresis), or after resting below the limit for 128 steps.
    min_dwell: steps that a choice is kept at least, 0 or more; the first choice is free.
    Raises ValueError naming the key or the table row that is wrong.
    """

    def __init__(
        self,
        disable_above: int | None = None,
        num_draft_tokens: int | None = None,
        table: list[list[int]] | None = None,
        hysteresis: float = 0.25,
        min_dwell: int = 8,
    ) -> None:
        if table is not None and not (disable_above is None and num_draft_tokens is None):
            raise ValueError("table replaces disable_above and num_draft_tokens; give one or the other")
        self._starts: list[int]
        self._lengths: list[int | None]
        if table is None:
            last = whole_number("disable_above", DISABLE_ABOVE if disable_above is None else disable_above, 1)
            self._starts, self._lengths = [1, last + 1], [draft_length(num_draft_tokens), 0]
        else:
            self._starts, self._lengths = _parse_table(table)
        self._shrink = 1 - share("hysteresis", hysteresis)
        if self._shrink == 0:
            raise ValueError("hysteresis must be below 1, or a batch could never cross back")
        self._min_dwell = whole_number("min_dwell", min_dwell, 0)
        self._tier = -1
        self._dwell = self._min_dwell
        self._steps_in_band = 0

    def decide(self, state: StepState) -> SpecDecision:
        """The same length for every request, by the size of the batch."""
        reason = self._move(state.num_scheduled)
        length = self._lengths[self._tier]
        limit = state.max_draft_tokens
        return SpecDecision.uniform(state, limit if length is None else min(length, limit), reason)

    def _move(self, batch: int) -> str:
        """Go to the tier of this batch size unless the dwell or the band holds the present one; say why."""
        wanted = self._tier_of(batch)
        if self._tier < 0 or wanted == self._tier:
            self._tier, self._steps_in_band = wanted, 0
            self._dwell += 1
            return self._describe(batch)
        if wanted < self._tier:
            wanted = min(self._tier, self._tier_of(self._widen(batch)))
            self._steps_in_band += 1
            if self._steps_in_band > BAND_PATIENCE:
                wanted = self._tier_of(batch)
        if wanted == self._tier:
            self._dwell += 1
            limit = self._starts[wanted] - 1
            return f"batch {batch} in band {math.floor(limit * self._shrink + ROUNDING) + 1}-{limit}"
        if self._dwell < self._min_dwell:
            self._dwell += 1
            return f"batch {batch}, dwell {self._dwell}/{self._min_dwell}"
        self._tier, self._dwell, self._steps_in_band = wanted, 1, 0
        return self._describe(batch)

    def _tier_of(self, batch: int) -> int:
        return max(bisect_right(self._starts, batch) - 1, 0)

    def _widen(self, batch: int) -> int:
        """The smallest limit that a shrinking batch of this size has crossed; nothing is smaller than 1."""
        return batch if batch <= 1 else math.ceil(batch / self._shrink - ROUNDING)

    def _describe(self, batch: int) -> str:
        start = self._starts[self._tier]
        if self._tier + 1 == len(self._starts):
            return f"batch {batch} > {start - 1}" if start > 1 else f"batch {batch}"
        last = self._starts[self._tier + 1] - 1
        return f"batch {batch} in {start}-{last}" if start > 1 else f"batch {batch} <= {last}"


def _parse_table(table: object) -> tuple[list[int], list[int | None]]:
    """First batch size and draft length of each tier; neighbours with the same length are one tier."""
    if not isinstance(table, list | tuple) or not table:
        raise ValueError(f"table must be a list of rows [first, last, num_draft_tokens], got {table!r}")
    rows = [_parse_row(index, row) for index, row in enumerate(table)]
    if rows[0][0] != 1:
        raise ValueError(f"table[0] must start at batch size 1, got {rows[0][0]}")
    for index, (before, row) in enumerate(pairwise(rows), start=1):
        if row[0] <= before[1]:
            raise ValueError(f"table[{index}] starts at {row[0]} but table[{index - 1}] reaches to {before[1]}")
    starts, lengths = [1], [rows[0][2]]
    for first, _, length in rows[1:]:
        if length != lengths[-1]:
            starts.append(first)
            lengths.append(length)
    return starts, [*lengths]


def _parse_row(index: int, row: object) -> tuple[int, int, int]:
    if not isinstance(row, list | tuple) or len(row) != 3:
        raise ValueError(f"table[{index}] must be [first, last, num_draft_tokens], got {row!r}")
    first = whole_number(f"table[{index}] first batch size", row[0], 1)
    last = whole_number(f"table[{index}] last batch size", row[1], 1)
    if last < first:
        raise ValueError(f"table[{index}] ends at {last}, before it starts at {first}")
    return first, last, whole_number(f"table[{index}] num_draft_tokens", row[2], 0)
