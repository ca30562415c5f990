"""Which requests run in a step, and with how many tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specrun.engine import Request, SamplingParams
from specrun.engine.block_manager import BlockManager
from specrun.engine.request import RequestStatus
from specrun.engine.scheduler import Scheduler


def request(num_prompt: int, start: int = 0, max_tokens: int = 100, request_id: int = 0) -> Request:
    """A prompt that shares nothing with those of another start."""
    return Request(request_id, list(range(start, start + num_prompt)), SamplingParams(max_tokens=max_tokens))


def scheduler(num_blocks=64, block_size=4, max_num_seqs=4, budget=32, prefix=True) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, block_size, prefix), max_num_seqs, budget)


def advance(s: Scheduler, batch, num_new: int = 1) -> None:
    """As the engine does after the forward pass; the target agrees with num_new - 1 drafts."""
    for r, chunk in zip(batch.prefills, batch.chunks, strict=True):
        r.num_computed_tokens += chunk
    complete = [r for r in batch.prefills if r.num_uncomputed_tokens == 0]
    for r in complete:
        r.output_token_ids.append(1000)
    for r in batch.decodes:
        r.output_token_ids += [1000] * num_new
        r.num_computed_tokens += num_new
    for r in batch.requests:
        s.blocks.commit(r)


def test_prefill_in_chunks_then_decode():
    s, r = scheduler(budget=8), request(19)
    s.add(r)
    chunks = []
    for _ in range(3):
        batch = s.schedule()
        chunks.append(batch.chunks)
        advance(s, batch)
    assert chunks == [[8], [8], [3]]
    batch = s.schedule()
    assert batch.decodes == [r] and batch.prefills == []
    assert batch.query_lens.tolist() == [1]


def test_decodes_come_first_and_prefills_share_what_is_left():
    s = scheduler(budget=10)
    first, second, third = request(4), request(7, 100), request(30, 200)
    s.add(first)
    advance(s, s.schedule())
    s.add(second)
    s.add(third)
    batch = s.schedule()
    assert batch.decodes == [first]
    assert batch.prefills == [second, third] and batch.chunks == [7, 2]
    assert batch.requests == [first, second, third]
    assert batch.num_prefill_tokens == 9
    advance(s, batch)
    batch = s.schedule()
    assert batch.decodes == [first, second] and batch.chunks == [8]


def test_admission_is_by_slots_and_slots_are_stable():
    s = scheduler(max_num_seqs=2)
    requests = [request(3, 100 * i) for i in range(3)]
    for r in requests:
        s.add(r)
    batch = s.schedule()
    assert batch.admitted == requests[:2]
    assert {r.slot for r in requests[:2]} == {0, 1} and requests[2].slot == -1
    advance(s, batch)
    slot = requests[0].slot
    s.finish(requests[0])
    batch = s.schedule()
    assert batch.admitted == [requests[2]] and requests[2].slot == slot
    assert batch.decodes == [requests[1]]
    assert requests[0].status is RequestStatus.FINISHED


def test_wants_enough_to_fill_the_slots_and_one_queue_more():
    s = scheduler(max_num_seqs=3)
    assert s.num_wanted == 6
    for i in range(6):
        assert s.num_wanted == 6 - i
        s.add(request(3, 100 * i))
    advance(s, s.schedule())
    assert s.num_wanted == 0
    s.finish(s.running[0])
    assert s.num_wanted == 1


def test_no_room_holds_back_everybody_behind():
    s = scheduler(num_blocks=6)
    big, bigger, small = request(12), request(16, 100), request(2, 300)
    for r in (big, bigger, small):
        s.add(r)
    assert s.schedule().admitted == [big]
    assert list(s.waiting) == [bigger, small], "a small one does not overtake for want of room"


def test_one_that_waits_for_a_prefix_lets_the_next_pass():
    s = scheduler()
    leader, follower, other = request(12), request(10), request(5, 100)
    for r in (leader, follower, other):
        s.add(r)
    batch = s.schedule()
    assert batch.admitted == [leader, other] and list(s.waiting) == [follower]
    advance(s, batch)
    batch = s.schedule()
    assert batch.decodes == [leader, other]
    assert batch.admitted == [follower] and batch.chunks == [2] and follower.num_cached_tokens == 8


def test_preempts_the_youngest_and_runs_it_again_first():
    s = scheduler(num_blocks=4, max_num_seqs=3, prefix=False)
    old, young, queued = request(8), request(7, 100), request(2, 200)
    for r in (old, young):
        s.add(r)
    advance(s, s.schedule())
    s.add(queued)
    batch = s.schedule()
    assert batch.decodes == [old] and batch.num_preemptions == 1
    assert young.status is RequestStatus.PREEMPTED and young.slot == -1 and young.block_table == []
    assert young.num_computed_tokens == 0 and len(young.output_token_ids) == 1
    assert list(s.waiting) == [young, queued]
    advance(s, batch)
    s.finish(old)
    batch = s.schedule()
    assert batch.prefills[0] is young and batch.chunks[0] == 8, "its output is recomputed with its prompt"
    assert batch.admitted == [queued], "prompt tokens are counted at the first admission only"


def test_a_request_may_preempt_itself_when_it_is_the_youngest():
    s = scheduler(num_blocks=5, prefix=False)
    old, young = request(11), request(8, 100)
    s.add(old)
    s.add(young)
    advance(s, s.schedule())
    batch = s.schedule()
    assert batch.decodes == [old]
    assert batch.num_preemptions == 1


def test_drafts_take_only_free_blocks():
    s = scheduler(num_blocks=3, prefix=False)
    first, second = request(3), request(3, 100)
    s.add(first)
    s.add(second)
    advance(s, s.schedule())
    batch = s.schedule()
    fitting = s.reserve_drafts(batch, np.array([3, 3], np.int32)).tolist()
    batch.drafts = [[1, 2, 3][: fitting[0]], [4, 5, 6][: fitting[1]]]
    assert batch.drafts == [[1, 2, 3], []], "the third block goes to the first; nobody is preempted for a guess"
    assert batch.query_lens.tolist() == [4, 1]
    assert s.blocks.num_free == 0
    advance(s, batch)
    assert s.blocks.num_free == 1 or len(first.block_table) == 2


@pytest.mark.parametrize("seed", range(5))
def test_random_runs_finish_and_give_everything_back(seed):
    rng = random.Random(seed)
    s = scheduler(num_blocks=14, max_num_seqs=4, budget=rng.randint(1, 20), prefix=seed % 2 == 0)
    todo = [request(rng.randint(1, 24), 1000 * rng.randrange(3), rng.randint(1, 20), i) for i in range(40)]
    pending, num_preemptions, num_steps = list(todo), 0, 0
    while pending or s.has_unfinished:
        while pending and s.num_wanted:
            s.add(pending.pop(0))
        batch = s.schedule()
        assert batch.requests, "a step always has work"
        assert len({r.slot for r in s.running}) == len(s.running) <= 4
        budgets = np.array([rng.randrange(4) for _ in batch.decodes], np.int32)
        batch.drafts = [[1] * rng.randint(0, fitting) for fitting in s.reserve_drafts(batch, budgets).tolist()]
        for r, n in zip(batch.requests, batch.query_lens.tolist(), strict=True):
            assert len(r.block_table) * 4 >= r.num_computed_tokens + n
        assert batch.num_prefill_tokens <= s.max_num_batched_tokens
        advance(s, batch)
        for r in batch.requests:
            if len(r.output_token_ids) >= r.sampling_params.max_tokens:
                s.finish(r)
        num_preemptions += batch.num_preemptions
        num_steps += 1
        assert num_steps < 5000
    assert all(r.status is RequestStatus.FINISHED for r in todo)
    assert s.blocks.num_free == 14 and sorted(s._free_slots) == [0, 1, 2, 3]
    assert num_preemptions > 0
