"""On or off: when speculation starts and stops, and how often it may change its mind."""

from __future__ import annotations

GAIN_ON = 0.02
"""Speculation starts where it promises so much more than plain decoding, and stops where it promises less than none,"""
CLEARLY = 0.05
"""on the mean of the last 64 steps, or by so much on that of the last 8."""
GAIN_MEMORY, TREND_MEMORY = 8, 64
LOSS = 0.1
"""Two steps running that would lose more than this end it at once."""
MIN_DWELL = 8
"""Decoding steps that a choice is kept at least, unless being on is a clear loss."""
FLIP_EVERY, MAX_FLIPS = 200, 3
"""Going on, and off again, costs one of at most 3 credits; one comes back every so many steps. Off is always free,"""
BIG_GAIN, MOST_DEBT = 0.2, -3
"""and so much gain is worth going on with up to 3 credits' debt."""
TOO_DEAR = 0.05
"""A single step while on is left plain where it would lose so much; it costs a credit,"""
CLIFF = 0.3
"""but not where it would lose so much."""


class Switch:
    """Follows the gain of speculating over plain decoding, as a share of it. Begins on."""

    def __init__(self) -> None:
        self.is_on = True
        self.gain = GAIN_ON
        """Mean of the last 8 steps or so."""
        self._trend = GAIN_ON
        self._dwell, self._credits = 0, float(MAX_FLIPS)
        self._num_seen = 0
        self._last = self._before = GAIN_ON

    def step(self) -> None:
        """Another decoding step."""
        self._dwell += 1
        self._credits = min(self._credits + 1 / FLIP_EVERY, MAX_FLIPS)

    @property
    def is_settled(self) -> bool:
        """Whether the present choice is an old one."""
        return self._dwell >= TREND_MEMORY

    def doubt(self) -> None:
        """What the gain was says nothing of what it is: acceptance has changed."""
        self._num_seen = 0

    def see(self, gain: float, num_steps: int = 1) -> None:
        """Take the gain of a step, which stands for the num_steps last ones, into the means. The first few weigh more:
        what the job begins with is a guess."""
        self._num_seen += num_steps
        self._before, self._last = self._last, gain
        if self._num_seen == num_steps:
            self._trend = gain
        self.gain += (gain - self.gain) * min(num_steps / min(GAIN_MEMORY, self._num_seen), 1.0)
        self._trend += (gain - self._trend) * min(num_steps / min(GAIN_MEMORY + self._dwell, TREND_MEMORY), 1.0)

    def turn(self) -> bool:
        """Change between on and off where the gain says so, the choice is old enough and changes are not too many;
        returns whether it did."""
        if self.is_on:
            is_loss = max(self._last, self._before) < -LOSS
            wanted = not is_loss and self.gain > -CLEARLY and max(self.gain, self._trend) > 0
            self.gain = min(self.gain, -CLEARLY) if is_loss else self.gain
        else:
            wanted = self.gain > GAIN_ON + CLEARLY or min(self.gain, self._trend) > GAIN_ON
        least = MOST_DEBT if self.gain > BIG_GAIN else 1
        is_early = self._dwell < MIN_DWELL and (wanted or self.gain > -CLEARLY)
        if wanted == self.is_on or is_early or (wanted and self._credits < least):
            return False
        self.is_on, self._dwell, self._trend = wanted, 0, self.gain
        self._credits -= wanted
        return True

    def leaves_out(self, gain: float) -> bool:
        """Whether a step of this gain is left plain though speculation is on; counts it."""
        if not self.is_on or gain >= -(TOO_DEAR if self._credits >= 2 else CLIFF):
            return False
        self._credits = max(self._credits - 1, MOST_DEBT)
        return True
