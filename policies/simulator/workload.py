"""A job as the simulator sees it: lengths, limits, what a step costs and which drafts come true."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..base import Int32
from .acceptance_process import AcceptanceProcess
from .surface import CostSurface, DraftCost


@dataclass(frozen=True)
class Workload:
    """N rows in the order in which they are admitted. Raises ValueError naming the field that is wrong."""

    name: str
    prompt_lens: Int32
    """[N] prompt tokens of each row, at least 1."""
    output_lens: Int32
    """[N] tokens that each row writes before it ends, at least 1."""
    surface: CostSurface
    """Seconds of the target's step."""
    draft_cost: DraftCost
    """Seconds of the drafter."""
    process: AcceptanceProcess
    """Which drafts come true."""
    groups: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    """[N] group of each row; empty: one group."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_tokens: int = 1 << 30
    """Tokens that the KV cache holds; what a loaded drafter takes of it is in DraftCost.kv_share."""
    block_size: int = 16
    max_draft_tokens: int = 5
    max_tokens: int | None = None
    """Output limit that the engine knows; None: each row ends at the limit it was given. Drafts may reach past a row's
    end, not past its limit."""
    feedback_delay: int = 0
    """Steps by which `observe` and the rolling acceptance rate are late, as under asynchronous scheduling."""
    description: str = ""
    is_stationary: bool = True
    """Whether acceptance and cost stay the same over the job, so that one fixed draft length may be the best."""

    def __post_init__(self) -> None:
        num_rows = len(self.prompt_lens)
        if not len(self.groups):
            object.__setattr__(self, "groups", np.zeros(num_rows, np.int32))
        if not (num_rows and len(self.output_lens) == len(self.groups) == num_rows):
            raise ValueError("prompt_lens, output_lens and groups must have one entry for each of at least one row")
        if np.min(self.prompt_lens) < 1 or np.min(self.output_lens) < 1:
            raise ValueError("prompt_lens and output_lens must be at least 1")
        if self.max_tokens is not None and np.max(self.output_lens) > self.max_tokens:
            raise ValueError(f"output_lens must not exceed max_tokens {self.max_tokens}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_draft_tokens", "feedback_delay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if -(-int(np.max(self.token_limits)) // self.block_size) > self.num_blocks(True):
            raise ValueError(f"kv_tokens {self.kv_tokens} cannot hold the longest row")

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.prompt_lens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs."""
        return int(np.sum(self.output_lens, dtype=np.int64))

    @property
    def token_limits(self) -> Int32:
        """[N] most tokens, prompt and output, that each row may hold."""
        outputs = self.output_lens if self.max_tokens is None else np.int32(self.max_tokens)
        return np.asarray(self.prompt_lens + outputs, dtype=np.int32)

    def num_blocks(self, load_drafter: bool) -> int:
        """KV blocks that the target's tokens may use."""
        share = self.draft_cost.kv_share if load_drafter else 0.0
        return int(self.kv_tokens * (1 - share)) // self.block_size
