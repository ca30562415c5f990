"""What a step costs, learned from the engine's own clock: rows, requests, context, prefill and drafting."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .base import Int32, StepFeedback
from .drifting_fit import DriftingFit, Float64

KNOTS = (
    *(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    *(640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 16384),
)
"""Rows between which the cost of a step is a straight line: dense where real surfaces have their stairs."""
MAX_CAPTURE_KNOTS = 64
"""So many captured sizes have a knot each, as there may be a stair between any two; of more, those nearest to KNOTS."""
OFTEN, MANY_REQUESTS, SELDOM = 32, 64, 4
"""Steps of a size that make it well known, and the requests from which time is saved on it: one step in two is learned
from, of more requests one in R / 64, but never less than one in four,"""
SURPRISE = 0.1
"""unless its seconds are so far from what was predicted."""
USUALLY_BEHIND = 200
"""Requests from which it is also saved where the drafter reads what the last step has brought, as most have to."""
FREE_ROWS = 64
"""Until measured, a step is taken to cost as though so many rows more (and as many as were first seen) came with it
anyhow: extra rows look cheap. What looks cheap is tried and corrected; what looks dear would never be."""
SHAPES = ((8, 0.15), (32, 0.25), (128, 0.3), (512, 0.3))
"""What else a machine may be like, in free rows, and how likely: a CPU has few, a large GPU hundreds."""
FIRST_LOOKS, FIRST_DOUBT = 2, 3.0
"""The first steps of a size that are slower than thought are doubted more: something may have been made ready."""
NUM_SLOPES = 4  # requests, context tokens, whether there are drafts, prefill tokens
BEYOND = 64.0  # the last straight line ends at so many times the last knot
STAND_BY_FLOOR = 0.005
"""Share of a step below which time spent on drafting nothing is that of the clock itself."""
DRAFTING_SHARES = np.array([0.1, 0.005, 0.8, 0.005, 0.001])
"""What a drafter's time is thought to be made of: in any case, for each request, for each token of the longest draft (a
pass), for each draft token, for each token that it has to read. Rows look cheap beside a pass, as FREE_ROWS has it: a
few requests are asked first, and what they seem to take is multiplied where all are."""
STAND_BY_SHARES = np.array([0.9, 0.005])
"""The same of one that stays ready and drafts nothing: in any case, for each request."""
SMALL_SHARE, SMALL_DOUBT = 0.01, 4.0
"""A share below this may as well be so many times as large."""
ERROR_WINDOW = 512
MAX_DRAFTERS = 8  # kinds; a job has one
LOADED_DOUBT = 0.2


class CostModel:
    """Predicts seconds of a step before it runs; corrected by every step. Memory is bounded; O(d^2) a step, d 40 to 70.

    seconds(n, R, context, P) = f(n) + (a + d [n > R + P]) R + b context + c P, with f a straight line between knots in
    the rows n of the forward pass, and d what it takes for each request that there are drafts at all, so that requests
    have unequal numbers of rows. Where the pass is padded, n is first padded too, and the knots are the padded sizes: a
    staircase.
    Drafting is fitted apart, for each kind of drafter: [1, m, K, m K, catch-up tokens], m requests drafted for, at
    most K tokens each.
    """

    def __init__(self, capture_sizes: Int32 | None = None) -> None:
        """capture_sizes [C] ascending: row counts that the forward pass pads to; None or empty: no padding."""
        self._capture_sizes = np.zeros(0, np.int64) if capture_sizes is None else np.asarray(capture_sizes, np.int64)
        self._knots = _knots(self._capture_sizes.tolist())
        self._scales = (
            1.0,
            1.0,
            1.0,
            1.0,
        )  # requests, context tokens, drafts, prefill to one unit of their coefficient
        self._fit: DriftingFit | None = None
        self._looks = np.zeros(len(self._knots))
        self._drafting: dict[str, DriftingFit] = {}
        self._standing_by: dict[str, DriftingFit] = {}
        self._drafter = ""
        self._errors = np.zeros(ERROR_WINDOW)
        self._num_errors = self._num_steps = 0
        self._line_at = np.append(np.array(self._knots, np.float64), self._knots[-1] * BEYOND)
        self._line: Float64 | None = None
        self._slopes = [0.0] * NUM_SLOPES
        self._draft: list[float] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether any step was observed."""
        return self._fit is not None

    def step_s(
        self, num_rows: ArrayLike, num_requests: int, num_context_tokens: float, num_prefill_tokens: int
    ) -> Float64:
        """Seconds of the forward pass and of all else but drafting, for num_rows (any shape) rows; 0 before any step.

        num_rows counts everything in the pass: decodes, drafts and prefill chunks. num_context_tokens is the sum over
        the num_requests that decode.
        """
        rows = self._padded(num_rows)
        if self._fit is None:
            return np.zeros(np.shape(rows))
        if self._line is None:
            self._line = self._draw_line()
        a, b, d, c = self._slopes
        line: Float64 = np.interp(rows, self._line_at, self._line)
        has_drafts = np.asarray(num_rows) > num_requests + num_prefill_tokens
        rest = (a + d * has_drafts) * num_requests + b * num_context_tokens + c * num_prefill_tokens
        return np.asarray(np.maximum(line + rest, 0.1 * line))

    def one_step_s(self, num_rows: int, num_requests: int, num_context_tokens: float, num_prefill_tokens: int) -> float:
        """The same for a single number of rows, without what arrays take for it."""
        if self._fit is None:
            return 0.0
        if self._line is None:
            self._line = self._draw_line()
        a, b, d, c = self._slopes
        rows, line, ends = self._padded_one(num_rows), self._line.item, self._line_at.item
        at = min(max(bisect_right(self._knots, rows), 1), len(self._knots)) - 1
        slope = (line(at + 1) - line(at)) / (ends(at + 1) - ends(at))
        level = slope * (max(rows, ends(at)) - ends(at)) + line(at)
        has_drafts = num_rows > num_requests + num_prefill_tokens
        rest = (a + d * has_drafts) * num_requests + b * num_context_tokens + c * num_prefill_tokens
        return float(max(level + rest, 0.1 * level))

    def draft_s(self, num_drafting: Any, longest: Any) -> Any:
        """Seconds of drafting for num_drafting requests, the longest draft of `longest` tokens: numbers, or arrays of
        one shape.

        0 where nothing is drafted, and until the drafter has been watched once.
        """
        if self._draft is None:
            return 0.0 * num_drafting
        one, request, token, both, _ = self._draft
        seconds = one + request * num_drafting + (token + both * num_drafting) * longest
        return seconds * ((num_drafting > 0) & (longest > 0))

    def read_s(self, num_tokens: float) -> float:
        """Seconds that the drafter takes to read so many tokens that it has missed; 0 until it was watched once."""
        return 0.0 if self._draft is None else self._draft[4] * num_tokens

    def doubt(
        self, num_rows: ArrayLike, base_rows: int, num_requests: int, num_context_tokens: float, num_prefill_tokens: int
    ) -> Float64:
        """Relative standard deviation of step_s(num_rows) / step_s(base_rows), for num_rows [N].

        How little is known of whether other rows are dearer or cheaper than these; what bears on both alike, such as
        the level of the machine, is left out. 1 before any step.
        """
        rows = np.append(self._padded(np.asarray(num_rows)), self._padded(np.asarray(base_rows)))
        if self._fit is None:
            return np.ones(len(rows) - 1)
        x = np.zeros((len(rows), len(self._fit.theta)))
        x[:, : len(self._knots)] = self._hats(rows)
        x[:, len(self._knots) :] = self._amounts(0, num_requests, num_context_tokens, num_prefill_tokens)
        has_drafts = np.asarray(num_rows) > num_requests + num_prefill_tokens
        x[:-1, len(self._knots) + 2] = has_drafts * (num_requests / self._scales[0])
        x /= np.maximum(x @ self._fit.theta, 1e-12)[:, None]
        x -= x[-1].copy()
        return np.asarray(np.sqrt(np.maximum(((x @ self._fit.covariance) * x).sum(1)[:-1], 0.0)))

    def _hats(self, rows: np.ndarray[Any, Any]) -> Float64:
        """[N, knots] the share of each knot in each of rows [N]."""
        knots = self._line_at[:-1]
        above = np.clip(np.searchsorted(knots, rows), 1, len(knots) - 1)
        share = (rows - knots[above - 1]) / (knots[above] - knots[above - 1])
        hats = np.zeros((len(rows), len(knots)))
        index = np.arange(len(rows))
        hats[index, above - 1], hats[index, above] = 1 - share, share
        return hats

    def stand_by_s(self, num_requests: int) -> float:
        """Seconds that the drafter takes to stay ready in a step that drafts nothing; 0 until that was seen."""
        fit = self._standing_by.get(self._drafter)
        return 0.0 if fit is None else float(fit.theta[0] + fit.theta[1] * num_requests)

    def observe(self, feedback: StepFeedback, budgets: Int32 | None = None, num_catch_up_tokens: float = 0.0) -> None:
        """Learn from a step. budgets [R] as decided, 0 where a request was not asked; None: what was proposed."""
        state = feedback.state
        self._drafter = state.drafter
        asked = feedback.num_proposed_tokens if budgets is None else budgets
        num_drafting, num_context = int(np.count_nonzero(asked)), float(state.context_lens.sum())
        step_s = feedback.verify_s + feedback.other_s
        if not step_s > 0:
            return
        place = (feedback.num_batched_tokens, state.num_running, num_context, state.num_prefill_tokens)
        usual = num_drafting * (state.max_draft_tokens + 1) if state.num_running >= USUALLY_BEHIND else 0
        is_usual = num_catch_up_tokens <= usual and (num_drafting > 0 or not stood_by(feedback))
        if is_usual and self._is_known(*place, step_s):
            return
        longest = int(asked.max()) if num_drafting else 0
        drafting = self._learn_drafting(feedback, num_drafting, longest, num_catch_up_tokens)
        self._refresh()
        if self._fit is None:
            self._begin(*place, step_s)
            return
        predicted = self._learn(*place, step_s) + drafting
        measured = step_s + (feedback.draft_s if num_drafting else 0.0)
        self._errors[self._num_errors % ERROR_WINDOW] = abs(predicted / measured - 1)
        self._num_errors += 1

    def _is_known(self, rows: int, num_requests: int, num_context: float, num_prefill: int, seconds: float) -> bool:
        """Whether the step may be passed over: of a large batch, at a size that was seen often, most steps that took
        about as long as was thought are."""
        self._num_steps += 1
        every = min(max(num_requests // MANY_REQUESTS, 2), SELDOM)
        if num_requests < MANY_REQUESTS or self._num_steps % every == 0 or self._line is None:
            return False
        below, share = self._between(self._padded_one(rows))
        if self._looks[below + (share >= 0.5)] <= OFTEN:
            return False
        predicted = self.one_step_s(rows, num_requests, num_context, num_prefill)
        return abs(seconds - predicted) < SURPRISE * predicted

    def _refresh(self) -> None:
        fit = self._drafting.get(self._drafter)
        self._draft = None if fit is None else fit.theta.tolist()

    def facts(self) -> dict[str, float]:
        """How well it predicts: |predicted / measured - 1| of the last 512 steps, each predicted before it ran."""
        errors = self._errors[: min(self._num_errors, ERROR_WINDOW)]
        if not len(errors):
            return {"cost_steps": float(self.is_ready)}
        p50, p95 = np.percentile(errors, (50, 95)).tolist()
        return {"cost_error_p50": p50, "cost_error_p95": p95, "cost_steps": float(self._num_errors + 1)}

    def _padded(self, num_rows: ArrayLike) -> Any:
        sizes = self._capture_sizes
        if not len(sizes):
            return num_rows
        rows = np.asarray(num_rows)
        return np.where(rows > sizes[-1], rows, sizes[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)])

    def _padded_one(self, num_rows: int) -> int:
        sizes = self._capture_sizes
        return num_rows if not len(sizes) or num_rows > sizes.item(-1) else sizes.item(sizes.searchsorted(num_rows))

    def _begin(self, rows: int, num_requests: int, num_context: float, num_prefill: int, seconds: float) -> None:
        """The prior: a level from the first step, which may be far too slow, and rows that cost little."""
        at = np.array(self._knots, np.float64)
        rows = self._padded_one(rows)
        free = FREE_ROWS + rows
        level = seconds * (at + free) / (rows + free)
        # a random walk over the knots, so that a size tells of its neighbours
        walk = 0.06 * level + 0.3 * np.diff(level, prepend=level[0])
        if len(self._capture_sizes):
            walk[self._knots.index(int(self._capture_sizes[-1])) + 1] = level[0] * 0.5
        walk_var = np.cumsum(walk**2)
        covariance = np.minimum.outer(walk_var, walk_var)
        covariance += np.multiply.outer(level, level)
        for free_rows, weight in SHAPES:
            off = seconds * (at + free_rows) / (rows + free_rows) - level
            covariance += np.multiply.outer(off * weight, off)
        self._scales = (max(num_requests, 8.0), max(num_context, 256.0), max(num_requests, 8.0), 256.0)
        row_s = seconds / (rows + free)
        spreads = np.array([0.1 * seconds, 0.3 * seconds, 0.5 * row_s * free, 0.3 * row_s * self._scales[3]])
        size = len(at) + NUM_SLOPES
        whole = np.zeros((size, size))
        whole[: len(at), : len(at)] = covariance
        whole[range(len(at), size), range(len(at), size)] = spreads**2
        lower = np.zeros(size)
        lower[-1] = -np.inf
        self._fit = DriftingFit(np.append(level, np.zeros(NUM_SLOPES)), whole, lower, len(at))
        below, share = self._between(rows)
        self._looks[below + (share >= 0.5)] += 1

    def _amounts(self, rows: int, num_requests: int, num_context: float, num_prefill: int) -> tuple[float, ...]:
        """What the slopes apply to, in their units."""
        a, b, _, c = self._scales
        has_drafts = rows > num_requests + num_prefill
        return num_requests / a, num_context / b, has_drafts * num_requests / a, num_prefill / c

    def _between(self, rows: int) -> tuple[int, float]:
        """The knot at or below this size, and the share of the way to the next."""
        above = min(max(bisect_left(self._knots, rows), 1), len(self._knots) - 1)
        low, high = self._knots[above - 1], self._knots[above]
        return above - 1, (rows - low) / (high - low)

    def _learn(self, rows: int, num_requests: int, num_context: float, num_prefill: int, seconds: float) -> float:
        """Gives the seconds that were predicted, as _learn_drafting does."""
        assert self._fit is not None
        below, share = self._between(self._padded_one(rows))
        place = below + (share >= 0.5)
        self._looks[place] += 1
        x = np.zeros(len(self._fit.theta))
        x[below], x[below + 1] = 1 - share, share
        x[len(self._knots) :] = self._amounts(rows, num_requests, num_context, num_prefill)
        doubt = 1 + 2 * num_prefill / max(rows, 1)
        if self._looks[place] <= FIRST_LOOKS and seconds > float(x @ self._fit.theta):
            doubt *= FIRST_DOUBT
        self._line = None
        return self._fit.observe(x, seconds, place, slice(place, len(self._knots)), doubt)

    def _draw_line(self) -> Float64:
        """f at the knots and at one far beyond. More rows are not believed to be much cheaper until that was seen."""
        assert self._fit is not None
        size = len(self._knots)
        self._slopes = [t / s for t, s in zip(self._fit.theta[size:].tolist(), self._scales, strict=True)]
        found = self._fit.theta[:size]
        is_seen = self._looks >= 3
        # What was hardly looked at costs hardly less than fewer rows, and no more than more rows that are known.
        known = np.minimum.accumulate(np.where(is_seen, found, np.inf)[::-1])[::-1]
        line = np.empty(size + 1)
        line[:size] = np.where(is_seen, found, np.minimum(np.maximum(found, 0.9 * np.maximum.accumulate(found)), known))
        slope = max(line.item(-2) - line.item(-3), 0.0) / (self._knots[-1] - self._knots[-2])
        line[-1] = line.item(-2) + slope * (self._line_at.item(-1) - self._knots[-1])
        return line

    def _learn_drafting(self, feedback: StepFeedback, num_drafting: int, longest: int, num_catch_up: float) -> float:
        seconds, kind = feedback.draft_s, feedback.state.drafter
        if num_drafting:
            x = np.array([1.0, num_drafting, longest, num_drafting * longest, num_catch_up])
            shares, fits = DRAFTING_SHARES, self._drafting
        elif stood_by(feedback):
            x, shares, fits = np.array([1.0, feedback.state.num_running]), STAND_BY_SHARES, self._standing_by
        else:
            return 0.0
        seconds = max(seconds, 1e-9)
        if kind in fits:
            predicted = fits[kind].observe(x, seconds)
            return predicted if num_drafting else 0.0
        if len(fits) < MAX_DRAFTERS:
            fits[kind] = _first_draft(x, shares, seconds)
        return seconds if num_drafting else 0.0

    def to_json(self) -> dict[str, Any]:
        """All that is learned, in JSON types."""
        return {
            "capture_sizes": self._capture_sizes.tolist(),
            "knots": list(self._knots),
            "scales": list(self._scales),
            "step": None if self._fit is None else self._fit.to_json(),
            "looks": self._looks.tolist(),
            "drafter": self._drafter,
            "drafting": {kind: fit.to_json() for kind, fit in self._drafting.items()},
            "standing_by": {kind: fit.to_json() for kind, fit in self._standing_by.items()},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> CostModel:
        """What to_json gave; predicts the same, and doubts it enough to learn what has changed since.

        Raises ValueError, KeyError or TypeError where the content is not to_json's.
        """
        model = cls(np.array(content["capture_sizes"], np.int32))
        if list(content["knots"]) != model._knots:
            raise ValueError("its knots are those of another version")
        a, b, d, c = map(float, content["scales"])
        model._scales = (a, b, d, c)
        model._looks = np.array(content["looks"], np.float64)
        model._drafter = str(content["drafter"])
        if content["step"] is not None:
            model._fit = DriftingFit.from_json(content["step"], len(model._knots))
            model._fit.loosen(LOADED_DOUBT)
        for name, fits in (("drafting", model._drafting), ("standing_by", model._standing_by)):
            for kind, fit in content[name].items():
                fits[kind] = DriftingFit.from_json(fit)
                fits[kind].loosen(LOADED_DOUBT)
        model._refresh()
        return model


def stood_by(feedback: StepFeedback) -> bool:
    """Whether in a step that asked for no drafts the drafter ran to stay ready."""
    return feedback.draft_s > STAND_BY_FLOOR * (feedback.verify_s + feedback.other_s)


def _knots(capture_sizes: list[int]) -> list[int]:
    """Ascending rows: the padded sizes (of very many, those nearest to KNOTS), the first one past them, then KNOTS."""
    if not capture_sizes:
        return list(KNOTS)
    last = capture_sizes[-1]
    inside = capture_sizes
    if len(inside) > MAX_CAPTURE_KNOTS:
        wanted = [knot for knot in KNOTS if knot <= last]
        inside = sorted({min(capture_sizes, key=lambda size: abs(size - knot)) for knot in wanted} | {last})
    return [*inside, last + 1, *(knot for knot in KNOTS if knot > last + 1), *([2 * last] if last >= KNOTS[-1] else [])]


def _first_draft(x: Float64, shares: Float64, seconds: float) -> DriftingFit:
    """The prior of a drafter after its first step: each of what may make it slow has its share."""
    theta = shares * (seconds / float(shares @ x))
    spread = np.where(shares < SMALL_SHARE, SMALL_DOUBT, 1.0) * theta
    return DriftingFit(theta, np.diag(spread**2) + np.multiply.outer(theta, theta), np.zeros(len(x)))
