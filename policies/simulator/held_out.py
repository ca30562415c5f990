"""Workloads B1 to B22: not for choosing constants on.

`goodput` was run once on B1 to B14 (seed 0, H100) while they were written; B15 to B22 were left alone altogether.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .acceptance_process import Acceptance
from .adversarial import Rng, chat
from .case import LOOK_UP, Case, Machine, around, skewed
from .surface import NO_GRAPHS, Distorted
from .workload import Workload

SQUARE_WAVE = tuple(round(0.05 * i, 2) for i in range(1, 20))


def _bursts(machine: Machine, rng: Rng) -> Workload:
    """Twelve times 120 rows of some 8 tokens, then 24 of 400: the batch fills and empties of short rows."""
    lengths = [np.concatenate([around(rng, 120, 8), around(rng, 24, 400)]) for _ in range(12)]
    return replace(chat(machine, rng, 1728, 96, 0.7), output_lens=np.concatenate(lengths), is_stationary=False)


def _two_tails(machine: Machine, rng: Rng) -> Workload:
    """A row whose prompt needs nearly all of the KV cache waits twice until the others are gone: none may pass it."""
    prompts, outputs = around(rng, 802, 60), around(rng, 802, 60)
    outputs[[50, 51, 52, 450, 451, 452]] = 700
    prompts[[400, 801]], outputs[[400, 801]] = 38000, 16
    workload = replace(chat(machine, rng, 802, 128, 0.75), prompt_lens=prompts, output_lens=outputs)
    return replace(workload, kv_tokens=40000, is_stationary=False)


def _second_position_falls(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance(np.array([0.9]), positions=np.array([1.0, 1.0, 0.1]))
    return replace(chat(machine, rng, 320, 64, 0.9), process=process)


def _first_position_is_hard(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance(np.array([0.4]), positions=np.array([1.0, 2.4]))
    return replace(chat(machine, rng, 160, 32, 0.4), process=process)


def _sixty_steps(machine: Machine, rng: Rng) -> Workload:
    return chat(machine, rng, 64, 64, 0.75, output=60)


def _prefill_then_tail(machine: Machine, rng: Rng) -> Workload:
    outputs = around(rng, 300, 8)
    outputs[rng.choice(300, 8, replace=False)] = 900
    workload = replace(chat(machine, rng, 300, 64, 0.75, prompt=6000), output_lens=outputs)
    return replace(workload, is_stationary=False)


def _drafts_dominate(machine: Machine, rng: Rng) -> Workload:
    one_step = float(machine.surface.step_s(2, 2, 500, 0))
    cost = replace(machine.small_model, per_pass_s=0.4 * one_step)
    return replace(chat(machine, rng, 12, 2, 0.9), draft_cost=cost)


def _noisy_pair(machine: Machine, rng: Rng) -> Workload:
    return replace(chat(machine, rng, 12, 2, 0.6), surface=Distorted(machine.surface, noise=0.2))


def _rare_but_right(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance(np.array([0.92]), availability=np.array([0.3]))
    return replace(chat(machine, rng, 160, 32, 0.92), process=process, draft_cost=LOOK_UP)


def _slow_decay(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance.stationary(0.9).with_phases((0.0, 1.0), (1.0, 0.1), is_ramp=True)
    return replace(chat(machine, rng, 480, 96, 0.9), process=process, is_stationary=False)


def _shuffled_groups(machine: Machine, rng: Rng) -> Workload:
    groups = rng.integers(0, 8, 320).astype(np.int32)
    process = Acceptance.by_group(groups, tuple(np.linspace(0.05, 0.95, 8)))
    return replace(chat(machine, rng, 320, 64, 0.5), process=process, groups=groups)


def _square_wave(machine: Machine, rng: Rng) -> Workload:
    phases = tuple((share, 0.1 if i % 2 == 0 else 1.0) for i, share in enumerate(SQUARE_WAVE))
    process = Acceptance.stationary(0.85).with_phases(*phases)
    return replace(chat(machine, rng, 480, 48, 0.85), process=process, is_stationary=False)


def _rows_apart(machine: Machine, rng: Rng) -> Workload:
    rates = np.asarray(rng.beta(0.6, 0.6, 480))
    process = Acceptance(rates, spread=0.5, confidence="exact")
    return replace(chat(machine, rng, 480, 96, 0.5), process=process, output_lens=skewed(rng, 480, 300))


def _copying(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance(np.array([0.97]), positions=np.ones(1), availability=np.array([0.9]))
    return replace(chat(machine, rng, 640, 128, 0.97), process=process, draft_cost=LOOK_UP)


def _worse_model(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance.stationary(0.85).with_phases((0.66, 0.4 / 0.85))
    workload = replace(chat(machine, rng, 130, 24, 0.85), process=process, draft_cost=machine.small_model)
    return replace(workload, is_stationary=False)


def _melting_batch(machine: Machine, rng: Rng) -> Workload:
    lengths = skewed(rng, 256, 350, 1.0)
    return replace(chat(machine, rng, 256, 256, 0.65), output_lens=lengths, is_stationary=False)


def _drafts_turn_up(machine: Machine, rng: Rng) -> Workload:
    availability = np.where(np.arange(320) < 160, 0.1, 0.8)
    process = Acceptance(np.array([0.8]), availability=availability)
    workload = replace(chat(machine, rng, 320, 64, 0.8), process=process, draft_cost=LOOK_UP)
    return replace(workload, is_stationary=False)


def _small_blocks(machine: Machine, rng: Rng) -> Workload:
    groups = (np.arange(240) // 8 % 4).astype(np.int32)
    process = Acceptance.by_group(groups, (0.9, 0.6, 0.3, 0.05))
    return replace(chat(machine, rng, 240, 48, 0.5), process=process, groups=groups, is_stationary=False)


def _no_graphs(machine: Machine, rng: Rng) -> Workload:
    surface = Distorted(replace(machine.surface, capture_sizes=NO_GRAPHS), noise=0.05)
    return replace(chat(machine, rng, 200, 40, 0.65), surface=surface)


def _late_news(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance.stationary(0.8).with_phases((0.5, 0.3 / 0.8))
    workload = replace(chat(machine, rng, 200, 32, 0.8), process=process, feedback_delay=4)
    return replace(workload, is_stationary=False)


def _knowing_head(machine: Machine, rng: Rng) -> Workload:
    process = replace(Acceptance.stationary(0.55), spread=0.8, confidence="exact")
    return replace(chat(machine, rng, 800, 160, 0.55), process=process)


def _three_tokens(machine: Machine, rng: Rng) -> Workload:
    outputs = rng.integers(2, 5, 30000, dtype=np.int32)
    return replace(chat(machine, rng, 30000, 200, 0.8, prompt=30), output_lens=outputs)


HELD_OUT = (
    Case("B1", "bursts of rows of 8 tokens between rows of 400; batch 96", _bursts, True),
    Case("B2", "two tails: rows too large to run beside others hold the queue up twice", _two_tails, True),
    Case("B3", "0.9 at two positions, 0.09 from the third on; batch 64", _second_position_falls, True),
    Case("B4", "0.4 at the first position, 0.96 at all others; batch 32", _first_position_is_hard, True),
    Case("B5", "a whole job of some 60 steps, acceptance 0.75; batch 64", _sixty_steps, True),
    Case("B6", "prompts of 6,000 tokens for 8 tokens of output, and a tail of 8 rows of 900", _prefill_then_tail, True),
    Case("B7", "a draft pass takes 40 % of a step, acceptance 0.9; batch 2", _drafts_dominate, True),
    Case("B8", "steps jitter by 20 %, acceptance 0.6; batch 2", _noisy_pair, True),
    Case("B9", "free drafts, found at 30 % of the steps and then right at 0.92; batch 32", _rare_but_right, True),
    Case("B10", "acceptance falls from 0.9 to 0.09 in a straight line; batch 96", _slow_decay, True),
    Case("B11", "eight known groups of 0.05 to 0.95 in random order; batch 64", _shuffled_groups, True),
    Case("B12", "acceptance jumps between 0.85 and 0.085 every 5 % of the job", _square_wave, True, SQUARE_WAVE),
    Case("B13", "every row its own acceptance, most near 0 or 1, exact confidence; batch 96", _rows_apart, True),
    Case("B14", "free drafts that are nearly always right; batch 128", _copying, True),
    Case("B15", "a draft model of 1B, acceptance 0.85, 0.4 from 66 %; batch 24", _worse_model, True, (0.66,)),
    Case("B16", "256 rows at once, lengths from 30 to 1,750: the batch melts away", _melting_batch, True),
    Case(
        "B17",
        "free drafts, found at 10 % of the steps of the first rows, at 80 % later; batch 64",
        _drafts_turn_up,
        True,
    ),
    Case("B18", "blocks of 8 rows with 0.9, 0.6, 0.3 and 0.05, groups known; batch 48", _small_blocks, True),
    Case("B19", "no padding, steps jitter by 5 %, acceptance 0.65; batch 40", _no_graphs, True),
    Case("B20", "feedback four steps late, acceptance 0.8, 0.3 from 50 %; batch 32", _late_news, True, (0.5,)),
    Case("B21", "tokens easy or hard, exact confidence, acceptance 0.55; batch 160", _knowing_head, True),
    Case("B22", "outputs of 2 to 4 tokens, acceptance 0.8; batch 200", _three_tokens, True),
)
