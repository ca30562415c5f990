"""Workloads A1 to A18: each breaks a kind of policy that was shipped or published.

Chat-like jobs decode 1,000 to 3,000 steps under `never`. `rate` is the conditional acceptance of a first draft;
it falls by a factor of 0.95 from position to position unless said otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .acceptance_process import Acceptance
from .case import LOOK_UP, Case, Machine, around, skewed
from .surface import Distorted
from .workload import Workload

MAX_DRAFT_TOKENS = 7
Rng = np.random.Generator


def chat(
    machine: Machine, rng: Rng, num_rows: int, max_num_seqs: int, rate: float, prompt: int = 100, output: int = 300
) -> Workload:
    """A steady job with an EAGLE-size head, from which the others differ."""
    return Workload(
        name="chat",
        prompt_lens=around(rng, num_rows, prompt, 0.5),
        output_lens=around(rng, num_rows, output),
        surface=machine.surface,
        draft_cost=machine.head,
        process=Acceptance.stationary(rate),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_draft_tokens=MAX_DRAFT_TOKENS,
    )


def _table_edge(machine: Machine, rng: Rng) -> Workload:
    return chat(machine, rng, 2000, 66, 0.75, prompt=90, output=40)


def _collapse(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance.stationary(0.85).with_phases((0.3, 0.2 / 0.85), (0.7, 1.0))
    return replace(chat(machine, rng, 400, 48, 0.85), process=process, is_stationary=False)


def _absorbing_off(machine: Machine, rng: Rng) -> Workload:
    process = Acceptance.stationary(0.8).with_phases((0.25, 0.02), (0.5, 1.0))
    return replace(chat(machine, rng, 1600, 192, 0.8), process=process, is_stationary=False)


def _blocks(machine: Machine, rng: Rng) -> Workload:
    groups = (np.arange(320) // 40 % 2).astype(np.int32)
    process = Acceptance.by_group(groups, (0.9, 0.1))
    return replace(chat(machine, rng, 320, 64, 0.5), process=process, groups=groups, is_stationary=False)


def _mixed(machine: Machine, rng: Rng) -> Workload:
    kinds = rng.integers(0, 2, 320).astype(np.int32)
    return replace(chat(machine, rng, 320, 64, 0.5), process=Acceptance.by_group(kinds, (0.9, 0.2)))


def _long_tail(machine: Machine, rng: Rng) -> Workload:
    outputs = around(rng, 2000, 64)
    outputs[rng.choice(2000, 26, replace=False)] *= 30
    return replace(chat(machine, rng, 2000, 256, 0.75), output_lens=outputs, is_stationary=False)


def _easy_start(machine: Machine, rng: Rng) -> Workload:
    is_easy = np.arange(240) < 24
    process = Acceptance(np.where(is_easy, 0.9, 0.15))
    groups = (np.arange(240) >= 24).astype(np.int32)
    return replace(chat(machine, rng, 240, 128, 0.5, output=200), process=process, groups=groups, is_stationary=False)


def _costly_draft(machine: Machine, rng: Rng) -> Workload:
    one_step = float(machine.surface.step_s(8, 8, 8 * 250, 0))
    cost = replace(machine.small_model, per_pass_s=0.75 * one_step)
    return replace(chat(machine, rng, 48, 8, 0.8), draft_cost=cost)


def _free_draft(machine: Machine, rng: Rng) -> Workload:
    process = replace(Acceptance.stationary(0.2), availability=np.array([0.7]))
    return replace(chat(machine, rng, 1100, 256, 0.2), draft_cost=LOOK_UP, process=process)


def _little_kv(machine: Machine, rng: Rng) -> Workload:
    workload = chat(machine, rng, 48, 128, 0.75, prompt=200, output=1000)
    return replace(workload, kv_tokens=int(0.1 * 128 * 1200), draft_cost=machine.head)


def _prefill_heavy(machine: Machine, rng: Rng) -> Workload:
    return chat(machine, rng, 700, 64, 0.75, prompt=3000, output=64)


def _long_context(machine: Machine, rng: Rng) -> Workload:
    prompts = rng.integers(8192, 32769, 96, dtype=np.int32)
    workload = replace(chat(machine, rng, 96, 48, 0.75, output=800), prompt_lens=prompts)
    return replace(workload, max_num_batched_tokens=8192)


def _decay_with_context(machine: Machine, rng: Rng) -> Workload:
    process = replace(Acceptance.stationary(0.9), context_half_life=1500.0)
    cost = replace(machine.head, per_token_context_s=2.5e-8 * machine.slower)
    workload = chat(machine, rng, 16, 16, 0.9, prompt=300, output=2500)
    return replace(workload, process=process, draft_cost=cost, is_stationary=False)


def _small_and_low(machine: Machine, rng: Rng) -> Workload:
    return chat(machine, rng, 20, 4, 0.25)


def _off_tax(machine: Machine, rng: Rng) -> Workload:
    return replace(chat(machine, rng, 1100, 256, 0.3), draft_cost=replace(machine.head, off_tax=0.2))


def _drifting(machine: Machine, rng: Rng) -> Workload:
    workload = chat(machine, rng, 640, 128, 0.7)
    return replace(workload, surface=Distorted(machine.surface, drift=0.15, noise=0.02))


def _cliff(machine: Machine, rng: Rng) -> Workload:
    workload = chat(machine, rng, 640, 128, 0.8, prompt=50)
    return replace(workload, surface=Distorted(machine.surface, cliff=(512, 5.0)))


def _experts(machine: Machine, rng: Rng) -> Workload:
    """Few rows touch few of 64 experts, so early rows are dear and later ones nearly free; every other tile of 32 rows
    is 8 % slower than the next."""
    rows = np.arange(1, 2049, dtype=np.float64)
    touched = 1 - (1 - 2 / 64) ** rows
    dense_ms = (1.5 + 9 * touched + 0.012 * rows) * np.where(rows // 32 % 2 == 1, 1.08, 1.0)
    surface = replace(machine.surface, rows=rows, dense_s=dense_ms * 1e-3 * machine.slower)
    workload = replace(chat(machine, rng, 260, 96, 0.7), surface=surface, output_lens=skewed(rng, 260, 300, 0.9))
    return replace(workload, is_stationary=False)


def _late_feedback(machine: Machine, rng: Rng) -> Workload:
    return replace(chat(machine, rng, 1100, 256, 0.45), feedback_delay=2)


ADVERSARIAL = (
    Case("A1", "batch hovers at 64 to 66, outputs of 40 tokens", _table_edge),
    Case("A2", "acceptance 0.85, 0.2 from 30 %, 0.85 from 70 %; batch 48", _collapse, changes=(0.3, 0.7)),
    Case("A3", "acceptance 0.8, 0.02 from 25 %, 0.8 from 50 %; batch 192", _absorbing_off, changes=(0.25, 0.5)),
    Case("A4", "blocks of 40 rows with 0.9 and 0.1, groups known; batch 64", _blocks),
    Case("A5", "rows with 0.9 and 0.2 mixed, groups unknown; batch 64", _mixed),
    Case("A6", "1.3 % of the rows write 30 times as much; batch 256, then a tail", _long_tail),
    Case("A7", "the first tenth of a short job accepts 0.9, the rest 0.15; batch 128", _easy_start),
    Case("A8", "a draft pass takes 75 % of a step, acceptance 0.8; batch 8", _costly_draft),
    Case("A9", "free drafts, acceptance 0.2; batch 256", _free_draft),
    Case("A10", "KV for a tenth of 128 rows of 1,200 tokens", _little_kv),
    Case("A11", "prompts of 3,000 and outputs of 64 tokens, chunked; batch 64", _prefill_heavy),
    Case("A12", "contexts of 8k to 33k tokens; batch 48", _long_context),
    Case("A13", "acceptance halves every 1,500 tokens of context, drafts grow dearer; batch 16", _decay_with_context),
    Case("A14", "acceptance 0.25; batch 4", _small_and_low),
    Case("A15", "plain steps take 20 % longer with a drafter loaded, acceptance 0.3; batch 256", _off_tax),
    Case("A16a", "the machine drifts by 15 % and jitters by 2 %; batch 128", _drifting),
    Case("A16b", "more than 512 rows take 5 times as long, acceptance 0.8; batch 128", _cliff),
    Case("A17", "mixture of experts: cost not monotone in rows; batch 96 and a tail", _experts),
    Case("A18", "feedback two steps late, acceptance 0.45; batch 256", _late_feedback),
)  # fmt: skip
