"""Acceptance without a model: drafters that need only token ids, held against outputs that are known already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.engine import FinishReason, Request, SamplingParams
from specrun.engine.drafters.base import DraftBatch, Drafter
from specrun.engine.input_batch import SlotTable
from specrun.engine.sampler import count_accepted

BLOCK_SIZE = 16


@dataclass(slots=True)
class Replayed:
    """What became of the drafts."""

    num_verifications: int = 0
    """Steps that each row took after its first token, with drafts or without."""
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def tokens_per_verification(self) -> float:
        """1 without drafts. Unlike the mean acceptance length it also counts verifications that carried none."""
        return self.num_tokens / max(1, self.num_verifications)


def replay(
    drafter: Drafter, prompts: Sequence[list[int]], outputs: Sequence[list[int]], num_draft_tokens: int, batch: int
) -> Replayed:
    """Let `batch` rows at a time go on as they did, with up to num_draft_tokens drafts for each in every step."""
    result = Replayed()
    longest = max(len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True))
    table = SlotTable(batch, longest + num_draft_tokens, BLOCK_SIZE)
    recorded = {i: output for i, output in enumerate(outputs) if len(output) > 1}
    waiting = (Request(i, prompts[i], SamplingParams(max_tokens=len(recorded[i]))) for i in recorded)
    running: list[Request] = []
    while running := admit(running, waiting, recorded, batch):
        drafts = DraftBatch(running, table.load(running), table)
        left = [len(recorded[r.request_id]) - len(r.output_token_ids) - 1 for r in running]
        proposed = drafter.propose(drafts, np.minimum(left, num_draft_tokens).astype(np.int32)).token_ids
        accepted = [commit(r, tokens, recorded[r.request_id]) for r, tokens in zip(running, proposed, strict=True)]
        drafted = np.array([len(tokens) for tokens in proposed], dtype=np.int32)
        if drafted.any():
            drafter.observe(drafts, drafted, np.array(accepted, dtype=np.int32))
        result.num_verifications += len(running)
        result.num_tokens += len(running) + sum(accepted)
        result.num_drafted += int(drafted.sum())
        result.num_accepted += sum(accepted)
        for request in running:
            if request.finish_reason is not None:
                drafter.forget(request)
    return result


def admit(
    running: list[Request], waiting: Iterator[Request], recorded: dict[int, list[int]], batch: int
) -> list[Request]:
    """Those that are not through, and others in the slots that they leave; each with its first token."""
    running = [request for request in running if request.finish_reason is None]
    free = sorted(set(range(batch)) - {request.slot for request in running})
    for slot, request in zip(free, waiting, strict=False):
        request.slot = slot
        request.output_token_ids.append(recorded[request.request_id][0])
        running.append(request)
    return running


def commit(request: Request, drafts: list[int], recorded: list[int]) -> int:
    """Go on with the recorded tokens as far as the drafts agree and one further; returns how many agree."""
    known = len(request.output_token_ids)
    accepted = count_accepted(drafts, recorded[known : known + len(drafts)])
    request.output_token_ids += recorded[known : known + accepted + 1]
    if len(request.output_token_ids) == len(recorded):
        request.finish_reason = FinishReason.STOP
    return accepted
