"""How long the default policy takes a step, its inputs included.

Nothing here fails for being slow. The figures are in what `pytest -s tests/policies/test_policy_speed.py` prints, and
mean something on a machine that does nothing else."""

import time

import numpy as np
import pytest

from specrun.policies import Proposals, SpecDecision, StepFeedback, StepState, make_policy
from specrun.policies.base import Int32

NUM_POSITIONS = 8
WARMUP_STEPS = 256
TIMED_STEPS = 100


class _Stopwatch:
    """A timer that goes on only inside `with stopwatch("part"):`; seconds so far when called."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, part=None):
        if part is None:
            return sum(map(sum, self.seconds.values()))
        self._part = part
        return self

    def __enter__(self):
        self._began = time.perf_counter()

    def __exit__(self, *exc):
        self.seconds.setdefault(self._part, []).append(time.perf_counter() - self._began)


STOPWATCH = _Stopwatch()


class _Steps:
    """An engine's share of a step around a policy: the same arrays, lists and records, without a model."""

    def __init__(self, policy, num_requests, draft_s):
        rng = np.random.default_rng(0)
        self.policy, self.draft_s = policy, draft_s
        self.slots = rng.permutation(num_requests).astype(np.int32)
        self.num_tokens = rng.integers(100, 2000, num_requests).astype(np.int32)
        self.max_num_tokens = np.full(num_requests, 1 << 20, np.int32)
        self.groups = rng.integers(0, 4, num_requests).astype(np.int32)
        self.num_draft_tokens = np.zeros(num_requests, np.int64)
        self.num_accepted_tokens = np.zeros(num_requests, np.int64)
        self.confidence = rng.uniform(0.5, 0.9, (16, num_requests, NUM_POSITIONS)).cumprod(2).astype(np.float32)
        # Drafts that would be accepted one after the other, by step and request.
        self.runs = rng.geometric(0.35, (16, num_requests)).astype(np.int32) - 1
        self.step = 0
        self.decision: SpecDecision | None = None
        self.keep: Int32 | None = None
        self.has_drafted = False

    def __call__(self):
        with STOPWATCH("state"):
            state = self._state()
        with STOPWATCH("decide"):
            self.decision = self.policy.decide(state)
        limit = np.minimum(self.max_num_tokens[state.slots] - state.context_lens - 1, NUM_POSITIONS)
        budgets = np.clip(self.decision.num_draft_tokens, 0, limit).astype(np.int32)
        drafted = proposed = np.zeros(len(self.slots), np.int32)
        self.has_drafted = bool(budgets.any())
        if self.has_drafted:
            proposed, survival = budgets, self._survival(budgets)
            with STOPWATCH("trim"):
                self.keep = self.policy.trim(Proposals(state, budgets, proposed, survival))
            with STOPWATCH("feedback"):
                drafted = np.minimum(np.maximum(self.keep, 0), proposed).astype(np.int32)
        verified = self._verify(proposed, drafted)
        with STOPWATCH("feedback"):
            feedback = self._feedback(state, proposed, drafted, *verified)
        with STOPWATCH("observe"):
            self.policy.observe(feedback)
        self._count(feedback)

    def _state(self):
        slots = self.slots
        at = slots.astype(np.intp)
        return StepState(
            step=self.step,
            num_running=len(slots),
            num_scheduled=len(slots),
            num_waiting=100,
            num_prefill_tokens=0,
            kv_usage=0.5,
            max_draft_tokens=NUM_POSITIONS,
            drafter="draft_model" if self.draft_s else "ngram",
            rolling_acceptance_rate=0.5,
            slots=slots,
            context_lens=self.num_tokens.take(at),
            groups=self.groups.take(at),
            num_draft_tokens=self.num_draft_tokens.take(at),
            num_accepted_tokens=self.num_accepted_tokens.take(at),
        )

    def _survival(self, budgets):
        survival = np.where(np.arange(NUM_POSITIONS) < budgets[:, None], self.confidence[self.step % 16], 0)
        return survival.astype(np.float32)

    def _verify(self, proposed, drafted):
        """What the engine's loop over requests counts, tokens committed and proposals matched [R]; rows of the forward
        pass and its seconds."""
        matched = np.minimum(self.runs[self.step % 16], np.minimum(drafted + 1, proposed)).astype(np.int32)
        committed = np.minimum(matched, drafted) + 1
        num_rows = int(drafted.sum()) + len(drafted)
        verify_s = 0.006 + 3e-6 * max(0, num_rows - 256) + 1e-9 * float(self.num_tokens.sum())
        return committed, matched, num_rows, verify_s

    def _feedback(self, state, proposed, drafted, committed, matched, num_rows, verify_s):
        accepted = np.minimum(matched, drafted)
        return StepFeedback(
            state=state,
            num_proposed_tokens=proposed,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_matched_tokens=matched,
            num_committed_tokens=committed,
            num_batched_tokens=num_rows,
            draft_s=self.draft_s if self.has_drafted else 0.0,
            verify_s=verify_s,
            other_s=0.0005,
        )

    def _count(self, feedback):
        self.num_draft_tokens[self.slots] += feedback.num_draft_tokens
        self.num_accepted_tokens[self.slots] += feedback.num_accepted_tokens
        self.num_tokens[self.slots] += feedback.num_committed_tokens
        self.step += 1


@pytest.mark.benchmark(timer=STOPWATCH)
@pytest.mark.parametrize("draft_s", [0.0, 0.0002, 0.0008], ids=["free", "cheap", "dear"])
@pytest.mark.parametrize("num_requests", [256, 1024])
def test_goodput_with_its_inputs(benchmark, num_requests, draft_s):
    steps = _Steps(make_policy("goodput"), num_requests, draft_s)
    for _ in range(WARMUP_STEPS):
        steps()
    STOPWATCH.seconds.clear()
    benchmark.pedantic(steps, rounds=TIMED_STEPS)
    # The quickest tenth: other processes only ever add to it.
    figures = {part: round(1e6 * float(np.quantile(s, 0.1))) for part, s in sorted(STOPWATCH.seconds.items())}
    benchmark.extra_info.update(figures)
    print(f"\n{num_requests} requests, {NUM_POSITIONS} positions: {sum(figures.values())} microseconds, {figures}")
    assert steps.decision is not None
    assert steps.decision.num_draft_tokens.shape == (num_requests,)
    assert steps.decision.num_draft_tokens.dtype == np.int32
    assert steps.keep is None or steps.keep.shape == (num_requests,)
    assert all(np.isfinite(value) for value in steps.policy.facts().values())
