"""Sampled tokens follow the distribution that the parameters ask for, and the noise is what it says it is."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from specrun.engine import EngineConfig, Request, SamplingParams
from specrun.engine import sampler as sampler_module
from specrun.engine.engine import Engine
from specrun.engine.noise import gumbel, row_key
from specrun.engine.sampler import Sampler, _threshold, count_accepted, penalize
from specrun.engine.target import Target
from tests.engine.tiny_models import OracleDrafter, RandomPolicy, build_model, run

VOCAB_SIZE = 32
PROMPT = [5, 9, 17, 3]
NUM_SEEDS = 4000
CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 6},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "together": {"temperature": 1.4, "top_k": 9, "top_p": 0.85, "min_p": 0.05},
}


@cache
def small_vocabulary() -> Target:
    return Target(build_model("llama", vocab_size=VOCAB_SIZE), EngineConfig())


@cache
def plain_logits(num_tokens: int) -> np.ndarray:
    """[V ** num_tokens, V] logits after the prompt and every continuation of this length, by transformers alone."""
    ids = torch.tensor([PROMPT + list(tail) for tail in itertools.product(range(VOCAB_SIZE), repeat=num_tokens)])
    with torch.inference_mode():
        logits = build_model("llama", vocab_size=VOCAB_SIZE)(input_ids=ids, use_cache=False).logits
    return np.asarray(logits[:, -1])


def distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """[V] probabilities written out: temperature, then min-p, then top-k, then top-p, each over what is left."""
    weights = np.exp((logits - logits.max()) / temperature)
    p = weights / weights.sum()
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        num_kept = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        p[order[num_kept:]] = 0
    return np.asarray(p / p.sum())


def marginals(settings) -> list[np.ndarray]:
    """Exact distribution of the first, second and third token."""
    reach = np.ones(1)
    found = []
    for num_tokens in range(3):
        each = np.array([distribution(row, **settings) for row in plain_logits(num_tokens)])
        joint = reach[:, None] * each
        found.append(joint.sum(0))
        reach = joint.ravel()
    return found


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square, cells that expect fewer than 5 pooled; 0 when something impossible was drawn."""
    observed = np.bincount(tokens, minlength=VOCAB_SIZE).astype(float)
    if observed[expected == 0].any():
        return 0.0
    expected = expected * len(tokens)
    small = expected < 5
    cells = np.append(observed[~small], observed[small].sum()), np.append(expected[~small], expected[small].sum())
    if cells[1][-1] == 0:
        cells = cells[0][:-1], cells[1][:-1]
    return float(stats.chisquare(*cells).pvalue)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_follow_the_exact_distribution(name, monkeypatch):
    """Three tokens a request, so that the second and third come from verified rows; width 4 takes every fallback."""
    monkeypatch.setattr(sampler_module, "_threshold", partial(lambda s, p, width=4: _threshold(s, p, width)))
    params = [SamplingParams(max_tokens=3, ignore_eos=True, seed=seed, **SETTINGS[name]) for seed in range(NUM_SEEDS)]
    config = EngineConfig(max_num_seqs=64, num_kv_blocks=128)
    engine = Engine(small_vocabulary(), config, RandomPolicy(1), OracleDrafter({}, 0, 2, VOCAB_SIZE))
    outputs = run(engine, (Request(i, list(PROMPT), p) for i, p in enumerate(params)))
    tokens = np.array([outputs[i].token_ids for i in range(NUM_SEEDS)])
    assert engine.stats.num_accepted_tokens > 20
    for place, expected in enumerate(marginals(SETTINGS[name])):
        assert p_value(tokens[:, place], expected) > 1e-3, f"token {place}"


def test_the_chi_square_can_fail():
    wrong, right = marginals({"temperature": 1.0})[0], marginals({"temperature": 1.1})[0]
    tokens = np.random.default_rng(0).choice(VOCAB_SIZE, NUM_SEEDS, p=right)
    assert p_value(tokens, right) > 1e-3 > p_value(tokens, wrong)


def noise(seeds, positions, vocab_size) -> np.ndarray:
    return gumbel([row_key(s, p) for s in seeds for p in positions], vocab_size, CPU).numpy()


def test_noise_is_standard_gumbel():
    drawn = noise(range(20), range(10), 5000).ravel()
    assert stats.kstest(drawn, "gumbel_r").pvalue > 1e-3
    assert abs(drawn.mean() - np.euler_gamma) < 4 * math.pi / math.sqrt(6 * len(drawn))
    assert abs(drawn.var() - math.pi**2 / 6) < 0.02


@pytest.mark.parametrize("axis", ["seeds", "positions", "tokens"])
def test_noise_of_neighbours_is_independent(axis):
    """Neighbours along one axis: no correlation of values, and rank pairs fill a 16 x 16 grid evenly."""
    drawn = noise(range(32), range(32), 1024).reshape(32, 32, 1024)
    uniform = np.moveaxis(np.exp(-np.exp(-drawn)), ("seeds", "positions", "tokens").index(axis), 0)
    first, second = uniform[0::2].ravel(), uniform[1::2].ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(len(first))
    cells = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
    assert stats.chisquare(cells).pvalue > 1e-3


@pytest.mark.parametrize("seeds", [[0], [2**63 - 1], [-1], [2**64 - 5]])
def test_argmax_of_noise_is_uniform_from_one_position_to_the_next(seeds):
    winners = noise(seeds, range(8000), 8).argmax(1)
    pairs = np.bincount(winners[0::2] * 8 + winners[1::2], minlength=64)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_the_same_key_gives_the_same_noise_in_any_batch():
    keys = [row_key(seed, position) for seed in (0, -3, 2**64 - 1) for position in (0, 7, 100_000)]
    together = gumbel(keys, 300, CPU)
    for i, key in enumerate(keys):
        assert torch.equal(gumbel([key], 300, CPU)[0], together[i])
        assert torch.equal(gumbel([key], 17, CPU)[0], together[i, :17])
    assert len({row[0].item() for row in together}) == len(keys)


def kept(scores, width=sampler_module.NUCLEUS, **params) -> list[int]:
    """Tokens that a row keeps."""
    row = torch.tensor([scores], dtype=torch.float64)
    threshold = _threshold(row, [SamplingParams(temperature=1.0, **params)], width)
    return (row >= threshold)[0].nonzero()[:, 0].tolist()


def test_threshold_keeps_equal_logits_together():
    scores = [1.0, 3.0, 2.0, 3.0, 2.0, 0.0]
    assert kept(scores, top_k=1) == [1, 3]
    assert kept(scores, top_k=3) == [1, 2, 3, 4]
    assert kept(scores, top_p=1e-9) == [1, 3]
    assert kept([0.5] * 6, top_p=0.2) == list(range(6))


def test_threshold_at_its_ends():
    scores = [1.0, 3.0, 2.0, -math.inf]
    assert kept(scores, top_p=1e-300) == [1]
    assert kept(scores, min_p=1.0) == [1]
    assert kept(scores, top_k=50) == [0, 1, 2, 3]
    assert kept(scores, top_k=-1) == [0, 1, 2, 3]
    assert kept(scores, top_p=0.999999) == [0, 1, 2]


def test_threshold_does_not_depend_on_how_many_candidates_are_sorted_or_on_batch_mates():
    """min-p may keep more than the sorted candidates: then the mass that top-p cuts is not all among them."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(300, 50)) * rng.choice([0.01, 0.5, 3], (300, 1))
    params = [
        SamplingParams(temperature=1.0, top_k=int(k), top_p=float(p), min_p=float(m))
        for k, p, m in zip(
            rng.choice([0, 0, 3, 20], 300),
            rng.choice([1.0, 0.3, 0.9, 0.99], 300),
            rng.choice([0, 0, 0.02, 0.9], 300),
            strict=True,
        )
    ]
    scores = torch.from_numpy(rows)
    together = scores >= _threshold(scores, params, 4)
    for row, p, mask in zip(rows, params, together, strict=True):
        expected = distribution(row, 1.0, p.top_k, p.top_p, p.min_p) > 0
        assert kept(row.tolist(), 4, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p) == np.flatnonzero(expected).tolist()
        assert np.array_equal(mask.numpy(), expected)


def test_penalties_written_out():
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0], dtype=torch.float64)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    got = penalize(logits, params, prompt=[0, 1], output=[3, 3, 4])
    assert got.tolist() == [1.0, -2.0, 0.5, 1.5 - 0.5 - 0.5, -4.0 - 0.25 - 0.5]
    assert logits.tolist() == [2.0, -1.0, 0.5, 3.0, -2.0]


def sample(logits, params, output=(), drafts=()):
    request = Request(0, [1], params, output_token_ids=list(output))
    rows = torch.tensor(logits, dtype=torch.float64).repeat(len(drafts) + 1, 1)
    return Sampler(frozenset({2})).sample(rows, [request], [list(drafts)])


def test_min_tokens_masks_ends_until_the_output_is_long_enough():
    params = SamplingParams(min_tokens=3, stop_token_ids=(3,))
    assert sample([0.0, 1.0, 9.0, 8.0], params, output=[1], drafts=[1, 1])[0] == [1, 1, 2]


def test_logit_bias_and_logprobs_of_the_unmodified_logits():
    logits = [0.0, 1.0, 2.0, 0.5]
    tokens, logprobs = sample(logits, SamplingParams(logit_bias={0: 5.0}, logprobs=0))
    assert tokens == [0]
    assert logprobs == [pytest.approx(-math.log(np.exp(logits).sum()), abs=1e-12)]


def test_a_tiny_temperature_is_greedy():
    for temperature in (1e-5, 1e-40, 1e-300):
        assert sample([0.0, 1.0, 2.0, 1.9], SamplingParams(temperature=temperature, top_p=0.9))[0] == [2]


def test_count_accepted_stops_at_the_first_difference():
    assert count_accepted([], [7]) == 0
    assert count_accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert count_accepted([1, 2, 3], [1, 5, 3, 4]) == 1
    assert count_accepted([1, 2], [5, 2, 3]) == 0
