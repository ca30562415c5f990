"""Simulated batches are those of the engine's scheduler and block manager, step by step."""

import numpy as np
import pytest

from specrun.engine.block_manager import BlockManager
from specrun.engine.request import Request, SamplingParams
from specrun.engine.scheduler import Scheduler
from specrun.policies.fixed import Always, Never
from specrun.policies.simulator import Acceptance, DraftCost, Workload, simulate, staircase


@pytest.mark.parametrize(
    ("num_blocks", "length", "budget"), [(1000, 0, 64), (1000, 3, 64), (30, 0, 64), (30, 4, 64), (24, 2, 20)]
)
def test_batches_are_those_of_the_engines_scheduler(num_blocks, length, budget):
    rng = np.random.default_rng(num_blocks + length)
    prompts, outputs = (rng.integers(1, most, 40).astype(np.int32) for most in (60, 50))
    job = Workload(
        "small",
        prompts,
        outputs,
        staircase([1], [10.0]),
        DraftCost("ngram"),
        Acceptance.stationary(0.6),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        kv_tokens=8 * num_blocks,
        block_size=8,
        max_draft_tokens=length,
    )
    result = simulate(job, Always(length) if length else Never(), seed=1)
    steps, num_preemptions = engine_steps(job, length, seed=1)
    columns = (result.num_running, result.num_waiting, result.num_prefill_tokens, result.draft_tokens)
    assert steps == [tuple(row) for row in np.stack(columns, axis=1).tolist()]
    assert result.num_preemptions == num_preemptions
    assert bool(num_preemptions) == (num_blocks < 100)


def engine_steps(job, length, seed):
    """The same job through the engine's scheduler and block manager, with the same coins and no model."""
    blocks = BlockManager(job.kv_tokens // job.block_size, job.block_size, enable_prefix_caching=False)
    scheduler = Scheduler(blocks, job.max_num_seqs, job.max_num_batched_tokens)
    guesser = job.process.begin(job.output_lens, seed)
    lengths = zip(job.prompt_lens.tolist(), job.output_lens.tolist(), strict=True)
    source = iter([Request(i, [0] * n, SamplingParams(max_tokens=m)) for i, (n, m) in enumerate(lengths)])
    steps: list[tuple[int, ...]] = []
    num_preemptions = 0
    while True:
        while scheduler.num_wanted and (request := next(source, None)):
            scheduler.add(request)
        if not scheduler.has_unfinished:
            return steps, num_preemptions
        batch = scheduler.schedule()
        num_preemptions += batch.num_preemptions
        waiting = len(scheduler.waiting)
        left = [r.sampling_params.max_tokens - len(r.output_token_ids) for r in batch.decodes]
        wanted = np.minimum(np.array(left, np.int32) - 1, length).astype(np.int32)
        budgets = scheduler.reserve_drafts(batch, wanted) if wanted.any() else wanted
        ids, outputs, contexts = (
            np.array([f(r) for r in batch.decodes], np.int64)
            for f in (lambda r: r.request_id, lambda r: len(r.output_token_ids), lambda r: r.num_tokens)
        )
        matched = guesser.draft(ids, outputs, contexts, budgets, 0.0).num_matched_tokens.tolist()
        steps.append((len(batch.decodes), waiting, batch.num_prefill_tokens, int(budgets.sum())))
        for request, chunk in zip(batch.prefills, batch.chunks, strict=True):
            request.num_computed_tokens += chunk
            if request.num_computed_tokens == request.num_tokens:
                request.output_token_ids.append(0)
        for request, num, most in zip(batch.decodes, matched, left, strict=True):
            request.output_token_ids += [0] * min(num + 1, most)
            request.num_computed_tokens += min(num + 1, most)
        for request in batch.requests:
            blocks.commit(request)
        for request in batch.requests:
            if len(request.output_token_ids) == request.sampling_params.max_tokens:
                scheduler.finish(request)
