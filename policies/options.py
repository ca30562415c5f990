"""Checks of the values that a job gives to a policy; each raises ValueError naming the key."""

from __future__ import annotations

import math


def whole_number(key: str, value: object, minimum: int) -> int:
    """`value` when it is an int of at least `minimum`; True and 3.0 are not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{key} must be a whole number of at least {minimum}, got {value!r}")
    return value


def draft_length(value: object, key: str = "num_draft_tokens") -> int | None:
    """A draft length of at least 1; None stands for the job's speculation.max_draft_tokens."""
    return None if value is None else whole_number(key, value, 1)


def share(key: str, value: object) -> float:
    """`value` as a float when it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 1:
        raise ValueError(f"{key} must be a number from 0 to 1, got {value!r}")
    return float(value)
