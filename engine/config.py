"""How an engine is set up. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and switches of one engine. None means: choose from the model and the free memory."""

    max_num_seqs: int | None = None
    """Most requests that run at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step for decodes and prefill chunks; draft tokens come on top."""
    max_model_len: int | None = None
    """Most tokens, prompt and output, that a request may hold; at most what the model was made for."""
    max_draft_tokens: int = 5
    """Upper limit for the draft tokens of one request in one step."""
    dtype: str = "auto"
    """auto (the checkpoint's, bfloat16 for GGUF), float64, float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory for weights, activations and KV cache (CUDA)."""
    num_kv_blocks: int | None = None
    """KV blocks; sized from free memory when None."""
    block_size: int = 16
    """Tokens in a KV block."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prompt prefixes."""
    deterministic: bool = False
    """Bit-equal logits for a token whatever the batch around it."""
    request_timeout_s: float | None = None
    """Seconds of work after which a request that has not ended is given up; None never does."""
    trust_remote_code: bool = False
    """Let a checkpoint run Python code that it brings along."""
