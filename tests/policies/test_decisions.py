"""What holds for every policy, whatever the state: shape, dtype and limits."""

from typing import Any

import numpy as np
import pytest

from specrun.policies import Proposals, StepFeedback, StepState, make_policy

POLICIES: dict[str, dict[str, Any]] = {
    "never": {},
    "always": {},
    "always:9": {"num_draft_tokens": 9},
    "batch_threshold": {},
    "batch_threshold:table": {"table": [[1, 16, 8], [17, 64, 2], [80, 128, 0], [129, 256, 1]], "min_dwell": 2},
    "goodput": {},
    "goodput:short": {"num_draft_tokens": 2},
    "acceptance_gate": {},
    "acceptance_gate:eager": {"window": 8, "probe_every": 2, "max_probe_every": 8, "probe_tokens": 2},
}


def random_state(rng: np.random.Generator, step: int) -> StepState:
    num_running = int(rng.choice([0, 1, int(rng.integers(1, 20)), int(rng.integers(1, 300))]))
    num_prefills = int(rng.integers(0, 5))
    drafted = rng.integers(0, 100, num_running)
    return StepState(
        step=step,
        num_running=num_running,
        num_scheduled=num_running + num_prefills,
        num_waiting=int(rng.integers(0, 100)),
        num_prefill_tokens=num_prefills * int(rng.integers(1, 512)),
        kv_usage=float(rng.random()),
        max_draft_tokens=int(rng.integers(0, 9)),
        drafter="ngram",
        rolling_acceptance_rate=None if rng.random() < 0.1 else float(rng.random()),
        slots=rng.permutation(400)[:num_running].astype(np.int32),
        context_lens=rng.integers(1, 4000, num_running).astype(np.int32),
        groups=rng.integers(0, 3, num_running).astype(np.int32),
        num_draft_tokens=drafted,
        num_accepted_tokens=rng.integers(0, drafted + 1),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_decisions_keep_shape_dtype_and_limits(name, seed):
    rng = np.random.default_rng(seed)
    policy = make_policy(name.partition(":")[0], **POLICIES[name])
    for step in range(300):
        state = random_state(rng, step)
        decision = policy.decide(state)
        budget = decision.num_draft_tokens
        assert budget.shape == (state.num_running,)
        assert budget.dtype == np.int32
        assert ((budget >= 0) & (budget <= state.max_draft_tokens)).all()
        assert 0 < len(decision.reason) <= 40
        proposed = rng.integers(0, budget + 1).astype(np.int32)
        survival = np.full((state.num_running, state.max_draft_tokens), 0.5, dtype=np.float32)
        verified = policy.trim(Proposals(state, decision.num_draft_tokens, proposed, survival))
        assert (verified <= proposed).all()
        accepted = rng.integers(0, verified + 1).astype(np.int32)
        policy.observe(StepFeedback(state, verified, verified, accepted, accepted, accepted + 1, 1, 0.0, 0.0, 0.0))
