"""Token ids in, token ids out: continuous batching with per-step speculation. Knows no files and no tokenizer."""

from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, resolve_checkpoint
from .config import EngineConfig
from .errors import EngineError, ModelError
from .request import FinishReason, InvalidParameter, Request, RequestOutput, SamplingParams
from .trace import EngineStats, StepRecord

if TYPE_CHECKING:
    from .engine import Engine

__all__ = [
    "Checkpoint",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "InvalidParameter",
    "ModelError",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StepRecord",
    "resolve_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import torch only when the engine itself is asked for."""
    if name == "Engine":
        from .engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
