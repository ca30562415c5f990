"""What drafters without weights cost on the host: microseconds a step, memory and load time of the suffix index.

    python examples/benchmarks/drafter_cost.py [--quick] [--json out/bench-drafter-cost.json]

No model: requests of about 1,000 tokens run through made-up text (words by Zipf's law, and phrases that come back), and
what they draft is compared with how that text goes on. A step is propose, observe and its share of learning finished
outputs; seconds are the processor's, so that other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from specrun.engine.drafters.base import DraftBatch, Drafter
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.drafters.suffix import SuffixDrafter
from specrun.engine.input_batch import SlotTable
from specrun.engine.request import FinishReason, Request, SamplingParams
from specrun.runner.bench_report import markdown_table
from specrun.runner.machine import library_versions, load_average, machine_facts

VOCAB_SIZE = 32_000
BUDGET = 8
NUM_PROMPT, NUM_OUTPUT = 900, 200
ROW_TOKENS = 200
"""Length of the rows that fill the index."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Cost:
    """One cell of the table."""

    drafter: str
    num_requests: int
    index_tokens: int
    step_us: float
    """Median step."""
    mean_us: float
    """Mean step, in which learning has its share."""
    drafted_per_request: float
    acceptance_rate: float


class Text:
    """An endless text: single words by Zipf's law, and phrases of 4 to 40 tokens, some far more common than others."""

    def __init__(self, seed: int = 0, num_phrases: int = 20_000) -> None:
        self._rng = np.random.default_rng(seed)
        frequencies = 1 / (np.arange(VOCAB_SIZE) + 2.7)  # as Mandelbrot's, so the most common word is one in 25
        self._cumulative = np.cumsum(frequencies / frequencies.sum())
        lens = self._rng.integers(4, 41, num_phrases)
        self._phrases = np.split(self._words(int(lens.sum())), np.cumsum(lens)[:-1])

    def take(self, num_tokens: int) -> Tokens:
        """The next num_tokens tokens."""
        parts: list[Tokens] = []
        num = 0
        while num < num_tokens:
            popular = (len(self._phrases) * self._rng.random(1024) ** 3).astype(int).tolist()
            for phrase, num_words in zip(popular, self._rng.integers(0, 30, 1024).tolist(), strict=True):
                parts += [self._phrases[phrase], self._words(num_words)]
                num += len(parts[-1]) + len(parts[-2])
        return np.concatenate(parts)[:num_tokens]

    def _words(self, num: int) -> Tokens:
        return np.searchsorted(self._cumulative[:-1], self._rng.random(num)).astype(np.int32)


class Job:
    """Requests in slots, each with the text that it is going to write; one that is through makes place for another."""

    def __init__(self, drafter: Drafter, text: Text, num_requests: int) -> None:
        self.drafter, self.text = drafter, text
        self.table = SlotTable(num_requests, NUM_PROMPT + NUM_OUTPUT + BUDGET + 1, 16)
        self._requests: list[Request] = []
        self._outputs: list[list[int]] = []
        self.num_drafted = self.num_accepted = self.num_drafts = 0
        for slot in range(num_requests):
            self._start(slot, num_done=(slot * NUM_OUTPUT) // num_requests)

    def step(self) -> float:
        """One decode step of all requests; returns the drafter's seconds."""
        slots = self.table.load(self._requests)
        batch = DraftBatch(self._requests[:], slots, self.table)
        left = [len(o) - len(r.output_token_ids) - 1 for r, o in zip(self._requests, self._outputs, strict=True)]
        budgets = np.clip(left, 0, BUDGET).astype(np.int32)
        started = time.process_time()
        drafts = self.drafter.propose(batch, budgets)
        seconds = time.process_time() - started
        accepted = np.array(
            [self._commit(slot, tokens) for slot, tokens in enumerate(drafts.token_ids)], dtype=np.int32
        )
        self.num_drafts += len(accepted)
        self.num_drafted += int(drafts.num_draft_tokens.sum())
        self.num_accepted += int(accepted.sum())
        started = time.process_time()
        if drafts.num_draft_tokens.any():
            self.drafter.observe(batch, drafts.num_draft_tokens, accepted)
        for request in self._requests:
            if request.finish_reason is not None:
                self.drafter.forget(request)
        seconds += time.process_time() - started
        for slot, request in enumerate(self._requests):
            if request.finish_reason is not None:
                self._start(slot)
        return seconds

    def _commit(self, slot: int, drafts: list[int]) -> int:
        """Append as much of the draft as is right and one token more; returns how much was right."""
        request, output = self._requests[slot], self._outputs[slot]
        at = len(request.output_token_ids)
        num = next((j for j, token in enumerate(drafts) if token != output[at + j]), len(drafts))
        request.output_token_ids += output[at : at + num + 1]
        if len(request.output_token_ids) == len(output):
            request.finish_reason = FinishReason.LENGTH
        return num

    def _start(self, slot: int, num_done: int = 0) -> None:
        tokens = self.text.take(NUM_PROMPT + NUM_OUTPUT).tolist()
        output = tokens[NUM_PROMPT:]
        request = Request(0, tokens[:NUM_PROMPT], SamplingParams(), output_token_ids=output[:num_done], slot=slot)
        self._requests[slot : slot + 1], self._outputs[slot : slot + 1] = [request], [output]


def measure(name: str, drafter: Drafter, text: Text, num_requests: int, num_steps: int, index_tokens: int) -> Cost:
    """Run a job for a while and average its steps."""
    job = Job(drafter, text, num_requests)
    for _ in range(5):
        job.step()
    seconds = [job.step() for _ in range(num_steps)]
    return Cost(
        name,
        num_requests,
        index_tokens,
        1e6 * median(seconds),
        1e6 * sum(seconds) / num_steps,
        job.num_drafted / job.num_drafts,
        job.num_accepted / max(1, job.num_drafted),
    )


def main() -> None:
    """Measure, print Markdown, write JSON."""
    parser = argparse.ArgumentParser(description="Host cost of drafters without weights.")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 1 and 16 requests, up to 1e5 tokens")
    parser.add_argument("--json", type=Path, default=Path("out/bench-drafter-cost.json"), help="where all numbers go")
    arguments = parser.parse_args()
    batches, sizes, num_steps = ((1, 16), (100_000,), 20) if arguments.quick else ((1, 16, 64, 256), SIZES, 200)
    text = Text()
    print(f"{BUDGET} drafts, {NUM_PROMPT} prompt and {NUM_OUTPUT} output tokens; load average {load_average():.2f}\n")
    costs: list[Cost] = []
    for num_requests in batches:
        costs.append(measure("ngram", NgramDrafter(), text, num_requests, num_steps, 0))
        costs.append(measure("suffix, own text", SuffixDrafter(0), text, num_requests, num_steps, 0))
    corpus = text.take(max(sizes))
    loads = []
    for size in sizes:
        drafter = SuffixDrafter(size)
        assert drafter.index is not None
        started = time.process_time()
        drafter.index.extend(corpus[:size], np.arange(0, size, ROW_TOKENS))
        loads.append({"index_tokens": size, "load_s": time.process_time() - started, "bytes": drafter.index.nbytes})
        for num_requests in batches:
            costs.append(measure("suffix", drafter, text, num_requests, num_steps, size))
    print("## Microseconds a step: median (mean)\n\n" + cost_table(costs, batches) + "\n")
    print("## The index\n\n" + load_table(loads))
    content = {
        "machine": machine_facts() | {"load_average_after": load_average()},
        "versions": library_versions(),
        "costs": [asdict(cost) for cost in costs],
        "index": loads,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\nall numbers: {arguments.json}")


SIZES = (100_000, 1_000_000, 10_000_000)


def cost_table(costs: list[Cost], batches: tuple[int, ...]) -> str:
    """A row for each drafter and index size, a column for each number of requests."""
    cells: dict[str, list[str]] = {}
    for cost in costs:
        label = cost.drafter + (f", {cost.index_tokens:.0e} tokens" if cost.index_tokens else "")
        cells.setdefault(label, []).append(f"{cost.step_us:.0f} ({cost.mean_us:.0f})")
    columns = ["drafter", *(f"{n} requests" for n in batches)]
    return markdown_table(columns, [[label, *values] for label, values in cells.items()])


def load_table(loads: list[dict[str, float]]) -> str:
    """Memory and load time by size."""
    rows = [
        [
            f"{load['index_tokens']:.0e}",
            f"{load['bytes'] / 2**20:.0f}",
            f"{load['bytes'] / load['index_tokens']:.1f}",
            f"{load['load_s']:.2f}",
        ]
        for load in loads
    ]
    return markdown_table(["tokens", "MiB", "bytes a token", "load s"], rows)


if __name__ == "__main__":
    main()
