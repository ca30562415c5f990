"""How many KV blocks fit: measured on the device, not assumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from .config import EngineConfig
from .errors import EngineError

if TYPE_CHECKING:
    from .target import Target

CPU_SHARE = 0.5
"""Share of the memory that is free after loading that the KV cache may take on a CPU, which other processes share,"""
CPU_BYTES = 4 << 30
"""and its limit: more blocks would only hold prefixes that nobody asks for again."""
CUDA_ACTIVATIONS = 1 << 30
"""Bytes kept free on a CUDA device for activations and logits of a step."""


def num_kv_blocks(target: Target, config: EngineConfig, max_num_seqs: int, drafter_bytes: int = 0) -> int:
    """As many blocks as max_num_seqs full-length requests can use, or as fit into free memory, whichever is less.

    drafter_bytes: what each block costs the drafter besides.
    Raises EngineError when not even one full block per request fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    wanted = max_num_seqs * -(-target.max_model_len // config.block_size)
    bytes_per_block = target.kv_layout.bytes_per_block(config.block_size) + drafter_bytes
    fitting = free_bytes(target.device, config) // bytes_per_block
    if fitting < max_num_seqs:
        raise EngineError(
            f"free memory on {target.device} holds {fitting} KV blocks, too few for {max_num_seqs} requests; "
            "lower engine.max_num_seqs, raise engine.gpu_memory_utilization or free memory"
        )
    return min(wanted, fitting)


def free_bytes(device: torch.device, config: EngineConfig) -> int:
    """Bytes that a KV cache may take on the device now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - config.gpu_memory_utilization) * total) - CUDA_ACTIVATIONS)
    return min(CPU_BYTES, int(CPU_SHARE * min(psutil.virtual_memory().available, _cgroup_free())))


def _cgroup_free() -> int:
    """Bytes left under this container's limit; a container may see the whole host's memory as available."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
