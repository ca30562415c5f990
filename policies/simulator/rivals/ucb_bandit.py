"""UCB1 over draft lengths: the textbook bandit, which learns from tokens a second alone."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque

from ...base import SpecDecision, SpeculationPolicy, StepFeedback, StepState
from ...options import whole_number

BATCH_GROUPS = (*range(1, 32), *range(32, 128, 8), *range(128, 257, 32))
"""Smallest batch size of each group; a group has arms of its own."""
TRIMMED = 0.1
"""Share of an arm's rewards that its mean leaves out at each end."""
MAX_PENDING = 64


class UcbBandit(SpeculationPolicy):
    """The arm with the highest mean reward + exploration * sqrt(2 ln(pulls of all arms) / pulls of this arm).

    Source: UCB1 (Auer, Cesa-Bianchi and Fischer, 2002), the rule of BanditSpec (arXiv 2505.15141), in the form that
    mit-han-lab/fastrl at bce3df7 ships in eagle_mab.py. Documented there: a bandit for each group of batch sizes (1
    to 31 one by one, to 127 in eights, to 256 in thirty-twos), the last 300 rewards of each arm, their mean without a
    tenth at each end, an arm without rewards first, reward = tokens / seconds of the step. Our reading: the arms are
    the draft lengths from 0 to `StepState.max_draft_tokens`, as in Nightjar (arXiv 2512.22420); the means are divided
    by the largest of the group, since the bound is meant for rewards from 0 to 1; steps with prefills count as well;
    the drafter is kept ready at length 0.

    window: rewards kept for each arm, at least 1.
    exploration: factor of the bound, 0 or more; 1 is UCB1.
    Raises ValueError naming the key that is wrong.
    """

    def __init__(self, window: int = 300, exploration: float = 1.0) -> None:
        self._window = whole_number("window", window, 1)
        if isinstance(exploration, bool) or not exploration >= 0 or math.isinf(exploration):
            raise ValueError(f"exploration must be a number of at least 0, got {exploration!r}")
        self._exploration = exploration
        self._groups: dict[int, list[_Arm]] = {}
        self._pending: dict[int, _Arm] = {}

    def decide(self, state: StepState) -> SpecDecision:
        """The same length for every request: the arm that the bandit of this batch size pulls."""
        group = max(bisect_right(BATCH_GROUPS, state.num_running) - 1, 0)
        arms = self._groups.setdefault(group, [])
        while len(arms) <= state.max_draft_tokens:
            arms.append(_Arm(self._window))
        length = self._pull(arms[: state.max_draft_tokens + 1])
        if len(self._pending) >= MAX_PENDING:
            self._pending.pop(next(iter(self._pending)))
        self._pending[state.step] = arms[length]
        return SpecDecision.uniform(state, length, f"arm {length} of batch {BATCH_GROUPS[group]}")

    def observe(self, feedback: StepFeedback) -> None:
        """Give the step's tokens a second to the arm that was pulled for it."""
        arm = self._pending.pop(feedback.state.step, None)
        seconds = feedback.draft_s + feedback.verify_s + feedback.other_s
        if arm is not None and seconds > 0:
            arm.add(int(feedback.num_committed_tokens.sum()) / seconds)

    def _pull(self, arms: list[_Arm]) -> int:
        for length, arm in enumerate(arms):
            if not arm.rewards:
                return length
        best = max(arm.mean for arm in arms) or 1.0
        bound = 2 * math.log(sum(len(arm.rewards) for arm in arms))
        scores = [arm.mean / best + self._exploration * math.sqrt(bound / len(arm.rewards)) for arm in arms]
        return scores.index(max(scores))


class _Arm:
    def __init__(self, window: int) -> None:
        self.rewards: deque[float] = deque(maxlen=window)
        self.mean = 0.0

    def add(self, reward: float) -> None:
        self.rewards.append(reward)
        cut = int(len(self.rewards) * TRIMMED)
        kept = sorted(self.rewards)[cut : len(self.rewards) - cut]
        self.mean = sum(kept) / len(kept)
