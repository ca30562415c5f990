"""KV blocks: nobody's block is given away, equal prefixes are shared, and everything comes back."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from specrun.engine import Request, SamplingParams
from specrun.engine.block_manager import Admission, BlockManager


def request(tokens, output=()) -> Request:
    return Request(0, list(tokens), SamplingParams(), output_token_ids=list(output))


def compute(blocks: BlockManager, r: Request, num_tokens: int | None = None) -> None:
    """As after a step that computed the request's leading num_tokens tokens."""
    r.num_computed_tokens = len(r.prompt_token_ids) if num_tokens is None else num_tokens
    blocks.commit(r)


def admitted(blocks: BlockManager, tokens) -> Request:
    r = request(tokens)
    assert blocks.admit(r) is Admission.ADMITTED
    return r


def finished(blocks: BlockManager, tokens) -> None:
    r = admitted(blocks, tokens)
    compute(blocks, r)
    blocks.free(r)


def test_admission_takes_blocks_for_all_tokens_or_nothing():
    blocks = BlockManager(4, 4)
    first = admitted(blocks, range(9))
    assert len(first.block_table) == 3 and blocks.num_free == 1
    second = request(range(50, 56))
    assert blocks.admit(second) is Admission.NO_ROOM
    assert second.block_table == [] and blocks.num_free == 1
    blocks.free(first)
    assert blocks.num_free == 4 and blocks.usage == 0


def test_growing_and_rolling_back():
    blocks = BlockManager(3, 4)
    r = admitted(blocks, range(4))
    assert blocks.grow(r, 9) and len(r.block_table) == 3
    assert not blocks.grow(r, 13) and len(r.block_table) == 3
    r.output_token_ids.append(4)
    compute(blocks, r, 4)
    assert len(r.block_table) == 2, "room for five tokens; what drafts left unused goes back"
    assert blocks.num_free == 1


def test_equal_prefix_is_shared_by_reference():
    blocks = BlockManager(16, 4)
    leader = admitted(blocks, range(10))
    compute(blocks, leader)
    follower = admitted(blocks, [*range(8), 50, 51])
    assert follower.block_table[:2] == leader.block_table[:2]
    assert follower.num_computed_tokens == 8
    assert set(follower.block_table[2:]).isdisjoint(leader.block_table)
    blocks.free(leader)
    assert blocks.num_free == 16 - 3, "the follower still holds the shared blocks"


def test_the_last_token_is_always_computed():
    """Its logits are wanted, so a prompt that is cached whole still runs its last block."""
    blocks = BlockManager(16, 4)
    finished(blocks, range(8))
    assert admitted(blocks, range(8)).num_computed_tokens == 4


def test_the_same_tokens_after_another_prefix_are_not_shared():
    blocks = BlockManager(16, 4)
    finished(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    finished(blocks, [2, 2, 2, 2, 8, 8, 8, 8, 0])
    assert admitted(blocks, [1, 1, 1, 1, 8, 8, 8, 8, 0]).num_computed_tokens == 4
    assert admitted(blocks, [7, 7, 7, 7, 0]).num_computed_tokens == 0


def test_a_follower_waits_for_the_block_that_its_leader_computes():
    blocks = BlockManager(16, 4)
    leader = admitted(blocks, range(12))
    follower = request([*range(8), 60])
    assert blocks.admit(follower) is Admission.WAITS_FOR_PREFIX
    compute(blocks, leader, 6)
    assert blocks.admit(follower) is Admission.WAITS_FOR_PREFIX, "the second block is not there yet"
    compute(blocks, leader, 8)
    assert blocks.admit(follower) is Admission.ADMITTED
    assert follower.num_computed_tokens == 8


def test_a_promise_ends_with_its_leader():
    blocks = BlockManager(16, 4)
    leader = admitted(blocks, range(12))
    follower = request([*range(8), 60])
    assert blocks.admit(follower) is Admission.WAITS_FOR_PREFIX
    blocks.free(leader)
    assert blocks.admit(follower) is Admission.ADMITTED
    assert follower.num_computed_tokens == 0


def test_output_tokens_are_shared_too():
    blocks = BlockManager(16, 4)
    r = admitted(blocks, range(6))
    compute(blocks, r)
    for token in range(6, 10):
        r.output_token_ids.append(token)
        assert blocks.grow(r, r.num_tokens)
        compute(blocks, r, r.num_tokens - 1)
    blocks.free(r)
    assert admitted(blocks, range(10)).num_computed_tokens == 8


def test_eviction_takes_the_longest_unused_first_and_the_tail_of_a_prefix_before_its_head():
    blocks = BlockManager(6, 4)
    finished(blocks, range(8))  # two cached blocks, the elder
    finished(blocks, range(20, 28))  # two cached blocks, the younger
    r = admitted(blocks, range(40, 52))  # three blocks: two that hold nothing, then the elder's tail
    blocks.free(r)
    assert admitted(blocks, [*range(8), 99]).num_computed_tokens == 4
    assert admitted(blocks, [*range(20, 28), 99]).num_computed_tokens == 8


def test_a_hit_makes_a_block_young_again():
    blocks = BlockManager(4, 4)
    finished(blocks, [*range(4), 90])
    finished(blocks, [*range(10, 14), 90])
    finished(blocks, [*range(4), 91])  # the first prefix again
    r = admitted(blocks, range(40, 52))  # three blocks: all but the youngest
    blocks.free(r)
    assert admitted(blocks, [*range(4), 92]).num_computed_tokens == 4


def test_without_prefix_caching_nothing_is_kept_or_waited_for():
    blocks = BlockManager(16, 4, enable_prefix_caching=False)
    first = admitted(blocks, range(12))
    assert admitted(blocks, range(12)).num_computed_tokens == 0
    compute(blocks, first)
    blocks.free(first)
    assert admitted(blocks, range(12)).num_computed_tokens == 0


def check_invariants(blocks: BlockManager, running: list[Request], history: dict[int, tuple[int, ...]]) -> None:
    uses = Counter(block for r in running for block in r.block_table)
    assert all(len(set(r.block_table)) == len(r.block_table) for r in running)
    assert blocks.num_free == blocks.num_blocks - len(uses)
    for r in running:
        tokens = r.prompt_token_ids + r.output_token_ids
        for index, block in enumerate(r.block_table):
            whole = (index + 1) * blocks.block_size
            if whole <= r.num_computed_tokens:
                history[block] = tuple(tokens[:whole])
            else:
                assert uses[block] == 1, "a block that is still written has one user"
    for r in running:
        tokens = r.prompt_token_ids + r.output_token_ids
        for index in range(r.num_computed_tokens // blocks.block_size):
            assert history[r.block_table[index]] == tuple(tokens[: (index + 1) * blocks.block_size])


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_random_operations_keep_the_invariants(seed, enable_prefix_caching):
    """Few token values and small blocks, so that prefixes meet often; `history` is what each block really holds."""
    rng = random.Random(seed)
    blocks = BlockManager(24, 2, enable_prefix_caching)
    running: list[Request] = []
    history: dict[int, tuple[int, ...]] = {}
    answers: Counter[Admission] = Counter()
    num_cached = 0
    for _ in range(1500):
        action = rng.random()
        if action < 0.3:
            r = request(rng.choices(range(2), k=rng.randrange(1, 14)))
            answer = blocks.admit(r)
            answers[answer] += 1
            if answer is Admission.ADMITTED:
                running.append(r)
                num_cached += r.num_computed_tokens
                for index in range(r.num_computed_tokens // 2):
                    assert history[r.block_table[index]] == tuple(r.prompt_token_ids[: 2 * index + 2])
            else:
                assert r.block_table == [] and r.num_computed_tokens == 0
        elif action < 0.85 and running:
            r = rng.choice(running)
            if r.num_uncomputed_tokens > 1:  # a prefill chunk
                r.num_computed_tokens += rng.randint(1, r.num_uncomputed_tokens)
            if r.num_uncomputed_tokens <= 1 and blocks.grow(r, r.num_tokens + 1 + rng.randrange(4)):
                new = rng.choices(range(2), k=rng.randint(1, len(r.block_table) * 2 - r.num_tokens))
                r.output_token_ids += new
                r.num_computed_tokens = r.num_tokens - 1
            blocks.commit(r)
        elif running:
            r = running.pop(rng.randrange(len(running)))
            blocks.free(r)
            assert r.block_table == [] and r.num_computed_tokens == 0
        check_invariants(blocks, running, history)
    assert answers[Admission.NO_ROOM] and answers[Admission.ADMITTED] > 50
    assert bool(answers[Admission.WAITS_FOR_PREFIX]) == bool(num_cached) == enable_prefix_caching
    for r in running:
        blocks.free(r)
    assert blocks.num_free == blocks.num_blocks and blocks.usage == 0
    assert not blocks._promised, "no promise outlives its leader"
