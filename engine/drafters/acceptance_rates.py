"""How often a draft token is to be right: by its position, its request, the job's progress and the context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...policies.base import Int64
from ...policies.options import share, whole_number

Float64 = NDArray[np.float64]
Points = Sequence[Sequence[float]]
"""Corners [x, factor] of a line: straight between two, level before the first and after the last; two at one x make a
jump."""


@dataclass(frozen=True, slots=True)
class RequestGroups:
    """A factor for each group of requests, taken in turn: group g has factors[g % len(factors)].

    rows_per_group: g is row index // rows_per_group: 1 mixes rows of all kinds in a batch, 40 gives blocks of 40 rows.
    Without it g is Request.group.
    """

    factors: Sequence[float]
    rows_per_group: int | None = None

    def __post_init__(self) -> None:
        _check_list("groups.factors", self.factors)
        for index, factor in enumerate(self.factors):
            _check_number(f"groups.factors[{index}]", factor)
        if self.rows_per_group is not None:
            whole_number("groups.rows_per_group", self.rows_per_group, 1)


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """P(draft j is right, given that those before it are) = acceptance_rates[j] times all factors, clipped to 0..1.

    acceptance_rates: by draft position, each 0 to 1; the last one carries on.
    over_time: points [tokens, factor] over the tokens that the job has generated in this run: a clock that is the same
        under every policy, as steps and seconds are not.
    by_context: points [tokens, factor] over the tokens, prompt and output, before the draft's position.
    Raises ValueError naming the key.
    """

    acceptance_rates: Sequence[float]
    groups: RequestGroups | None = None
    over_time: Points = ()
    by_context: Points = ()

    def __post_init__(self) -> None:
        _check_list("acceptance_rates", self.acceptance_rates)
        for index, rate in enumerate(self.acceptance_rates):
            share(f"acceptance_rates[{index}]", rate)
        _check_points("over_time", self.over_time)
        _check_points("by_context", self.by_context)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> AcceptanceRates:
        """Of the plain values of a job file; None stands for a default. Raises ValueError naming the key."""
        options = {key: value for key, value in options.items() if value is not None}
        _check_keys("", options, cls)
        if "groups" in options:
            _check_keys("groups.", options["groups"], RequestGroups)
            options["groups"] = RequestGroups(**options["groups"])
        return cls(**options)

    def probabilities(self, rows: Int64, groups: Int64, context_lens: Int64, num_generated: int) -> Float64:
        """[R, K] for requests of these row indices [R] and groups [R], with context_lens [R, K] tokens before each of
        their drafts, when the job has generated num_generated tokens."""
        last = len(self.acceptance_rates) - 1
        rates = np.array(self.acceptance_rates, dtype=np.float64)[np.minimum(np.arange(context_lens.shape[1]), last)]
        factors = _line(self.over_time, np.array(num_generated)) * _line(self.by_context, context_lens)
        if self.groups is not None:
            key = groups if self.groups.rows_per_group is None else rows // self.groups.rows_per_group
            factors = factors * np.array(self.groups.factors)[key % len(self.groups.factors)][:, None]
        return np.clip(rates * factors, 0, 1)


def _line(points: Points, x: Int64) -> Float64:
    """The factor at each x, in the shape of x; 1 without points."""
    if not len(points):
        return np.ones(x.shape)
    at, factors = np.array(points, dtype=np.float64).T
    after = np.searchsorted(at, x, side="right")
    left, right = np.maximum(after - 1, 0), np.minimum(after, len(at) - 1)
    width = at[right] - at[left]
    weight = np.where(width > 0, (x - at[left]) / np.where(width > 0, width, 1), 0)
    return np.asarray(factors[left] + weight * (factors[right] - factors[left]))


def _check_keys(prefix: str, options: Mapping[str, Any], target: type) -> None:
    known = [field.name for field in fields(target)]
    if not isinstance(options, Mapping):
        raise ValueError(f"{prefix.rstrip('.')} must have the keys {', '.join(known)}, got {options!r}")
    for key in options:
        if key not in known:
            raise ValueError(f"{prefix}{key} is not a key; there are {', '.join(known)}")
    if known[0] not in options:
        raise ValueError(f"{prefix}{known[0]} is missing")


def _check_list(key: str, value: object) -> None:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{key} must be a list of numbers, got {value!r}")


def _check_number(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key} must be a number of at least 0, got {value!r}")


def _check_points(key: str, points: object) -> None:
    if not isinstance(points, list | tuple):
        raise ValueError(f"{key} must be a list of points [tokens, factor], got {points!r}")
    for index, point in enumerate(points):
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise ValueError(f"{key}[{index}] must be a point [tokens, factor], got {point!r}")
        for value in point:
            _check_number(f"{key}[{index}]", value)
    for index, (before, point) in enumerate(pairwise(points), start=1):
        if point[0] < before[0]:
            raise ValueError(f"{key}[{index}] is at {point[0]} tokens, before {key}[{index - 1}] at {before[0]}")
