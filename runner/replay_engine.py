"""The engine without a model: what the target would say is known, and what a step costs is predicted.

Scheduler, KV blocks, drafter, policy and the order of a step are the engine's own, so drafts and acceptance are what
they would be; only the seconds are a model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.request import FinishReason, Request
from ..engine.scheduler import Batch
from ..engine.stop import StopChecker
from ..engine.trace import StepClock
from ..policies.base import Int32, SpecDecision, SpeculationPolicy, StepState
from ..policies.fixed import Always

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter
    from ..engine.target import Target

Float64 = NDArray[np.float64]

UNKNOWN_VOCABULARY = 2**31 - 1
"""More ids than any model has: what was recorded came out of the model, so nothing is left to check."""
NO_TOKEN = -1
"""Stands after the end of a recorded output; equals no draft."""


class StepCosts(Protocol):
    """What a step costs. Numbers or arrays of one shape, seconds."""

    def step_s(
        self, num_rows: Any, num_requests: int, num_context_tokens: float, num_prefill_tokens: int
    ) -> Float64 | float:
        """A step without its drafting: num_rows in the forward pass, of which num_prefill_tokens are prefill, for
        num_requests that decode and hold num_context_tokens between them."""
        ...

    def draft_s(self, num_drafting: int, longest: Any) -> Float64 | float | None:
        """Asking drafts for so many requests, the longest that came of `longest` tokens; None where it is not known."""
        ...

    def without_drafting(self) -> StepCosts:
        """The same where nothing is known about drafting."""
        ...

    def is_known(self, num_rows: int) -> bool:
        """Whether steps of about so many rows were measured."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedTarget:
    """What an engine wants to know of a target that it does not run."""

    device: RecordedDevice
    max_model_len: int
    dtype: str = "none"
    vocab_size: int = UNKNOWN_VOCABULARY
    eos_token_ids: frozenset[int] = frozenset()

    def allocate(self, num_blocks: int) -> None:
        """Nothing to make room for."""
        return None


@dataclass(frozen=True, slots=True)
class RecordedDevice:
    """A device by its name."""

    name: str

    @property
    def type(self) -> str:
        """cpu or cuda."""
        return self.name.partition(":")[0]

    def __str__(self) -> str:
        return self.name


class ReplayEngine(Engine):
    """Runs requests whose outputs are known under any policy and any drafter that needs no model.

    recorded: request id -> all tokens of its output, at least one.
    config: num_kv_blocks must be set.
    """

    def __init__(
        self,
        recorded: Mapping[int, Sequence[int]],
        costs: StepCosts,
        target: RecordedTarget,
        config: EngineConfig,
        policy: SpeculationPolicy,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(cast("Target", target), config, policy, drafter)
        self.stop = RecordedEnd(recorded)
        self.costs = costs
        self._recorded = recorded
        self.clock = ModelledClock()
        self._asked = (0, 0)  # requests that the step asks drafts for, and the longest that came
        self._drafting_s = 0.0

    def draft(self, state: StepState, decision: SpecDecision, batch: Batch) -> None:
        """See Engine."""
        began = perf_counter()
        super().draft(state, decision, batch)
        self._drafting_s = perf_counter() - began
        self._asked = int(np.count_nonzero(decision.num_draft_tokens)), int(batch.num_proposed_tokens.max(initial=0))

    def sample(
        self, batch: Batch, slots: Int32, requests: list[Request], drafts: list[list[int]]
    ) -> tuple[list[int], list[float | None] | None]:
        """The recorded tokens where the target's own would be; the step takes what it is taken to cost."""
        self._set_clock(batch, slots)
        token_ids: list[int] = []
        for request, draft in zip(requests, drafts, strict=True):
            tokens = self.next_tokens(request, len(draft) + 1)
            token_ids += tokens
            token_ids += [NO_TOKEN] * (len(draft) + 1 - len(tokens))
        return token_ids, None

    def _set_clock(self, batch: Batch, slots: Int32) -> None:
        num_running, num_prefill_tokens = len(batch.decodes), batch.num_prefill_tokens
        context = int(self.slots.num_tokens[slots[:num_running]].sum())
        self.clock.seconds["verify"] = float(
            self.costs.step_s(batch.num_rows, num_running, context, num_prefill_tokens)
        )
        num_asked, longest = self._asked
        if num_asked:
            draft_s = self.costs.draft_s(num_asked, longest)
            # Where nobody knows better, what the drafter took here and now.
            self.clock.seconds["draft"] = self._drafting_s if draft_s is None else float(draft_s)

    def next_tokens(self, request: Request, num: int) -> list[int]:
        """How the request goes on, as far as it does."""
        known = len(request.output_token_ids)
        return list(self._recorded[request.request_id][known : known + num])


class OracleEngine(ReplayEngine):
    """The best uniform draft length of each step, found by looking at what would be accepted, no thought of the next
    step. Progress and seconds are weighed as by policies.simulator.Oracle: the mean over requests of log(tokens), and
    what the step takes beyond its prefill. A drafter that cannot be asked twice is asked for the longest.
    """

    def __init__(
        self,
        recorded: Mapping[int, Sequence[int]],
        costs: StepCosts,
        target: RecordedTarget,
        config: EngineConfig,
        drafter: Drafter | None,
    ) -> None:
        super().__init__(recorded, costs, target, config, Always(), drafter)

    def draft(self, state: StepState, decision: SpecDecision, batch: Batch) -> None:
        """See Engine."""
        super().draft(state, decision, batch)
        num_asked, longest = self._asked
        if not num_asked or not longest:
            return
        lengths = np.arange(longest + 1)
        found = batch.num_draft_tokens
        right = np.array([self._num_right(r, d) for r, d in zip(batch.decodes, batch.drafts, strict=True)])
        rows = state.num_running + state.num_prefill_tokens + np.minimum(found, lengths[:, None]).sum(axis=1)
        progress = np.exp(np.log1p(np.minimum(right, lengths[:, None])).mean(axis=1))
        context = int(state.context_lens.sum())
        seconds = self.costs.step_s(rows, state.num_running, context, state.num_prefill_tokens)
        draft_s = self.costs.draft_s(num_asked, lengths)
        seconds = seconds + np.where(lengths > 0, self._drafting_s if draft_s is None else draft_s, 0.0)
        if state.num_prefill_tokens:
            num = state.num_running
            seconds = seconds - (seconds[0] - self.costs.step_s(num, num, context, 0))
        best = int(np.argmax(progress / seconds))
        batch.cut(np.minimum(found, np.int32(best)))
        self._asked = (num_asked if best else 0, best)

    def _num_right(self, request: Request, draft: list[int]) -> int:
        tokens = self.next_tokens(request, len(draft))
        pairs = enumerate(zip(draft, tokens, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(draft), len(tokens)))


class RecordedEnd(StopChecker):
    """A request ends with its recorded output."""

    def __init__(self, recorded: Mapping[int, Sequence[int]]) -> None:
        super().__init__(frozenset(), (), 0)
        self._recorded = recorded

    def check(self, request: Request) -> FinishReason | None:
        """See StopChecker."""
        is_over = len(request.output_token_ids) >= len(self._recorded[request.request_id])
        return FinishReason.STOP if is_over else None


class ModelledClock(StepClock):
    """Seconds that are set, not measured; they add up from step to step."""

    def begin_step(self) -> None:
        """Go on where the last step ended."""
        self.start_s += sum(self.seconds.values())
        self.seconds.clear()

    def lap(self, part: str) -> None:
        """Nothing passes."""
        return None
