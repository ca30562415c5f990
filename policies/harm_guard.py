"""Turns speculation off where the clock shows that it does harm, whatever the model of its cost says."""

from __future__ import annotations

LEAST_STEPS = 200
"""Speculating steps in batches of one size before the clock has a say."""
HARM = 0.98
"""Tokens a second against plain decoding below which it is harm."""
BLOCK_STEPS = 256
MAX_BLOCK_STEPS = 1024
MEMORY = 1 - 1 / 400
"""By step, so that what a batch did long ago does not outvote what it does now."""


class HarmGuard:
    """Running sums by batch tier (sizes 1, 2 to 3, 4 to 7, ...): measured seconds of speculating steps, and the seconds
    that plain decoding would have taken for the same tokens."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float, float]] = {}
        self._blocked: dict[int, int] = {}
        self._next_block: dict[int, int] = {}

    def blocks(self, tier: int) -> bool:
        """Whether batches of this tier must not speculate now."""
        return self._blocked.get(tier, 0) > 0

    def observe(self, tier: int, seconds: float, off_s: float, is_on: bool) -> None:
        """A step: its seconds, those of plain decoding for its tokens, and whether it tells of speculation."""
        if self.blocks(tier):
            self._blocked[tier] -= 1
            return
        if not is_on:
            return
        steps, on_s, plain_s = self._sums.get(tier, (0.0, 0.0, 0.0))
        steps, on_s, plain_s = MEMORY * steps + 1, MEMORY * on_s + seconds, MEMORY * plain_s + off_s
        self._sums[tier] = (steps, on_s, plain_s)
        if steps >= LEAST_STEPS * 0.8 and plain_s < HARM * on_s:
            length = self._next_block.get(tier, BLOCK_STEPS)
            self._blocked[tier], self._next_block[tier] = length, min(2 * length, MAX_BLOCK_STEPS)
            del self._sums[tier]
