"""The exit codes of `specrun` and what leads to each."""

from __future__ import annotations

from ..engine.errors import EngineError, ModelError
from ..jobs.errors import JobError

DONE = 0
TOO_MANY_FAILED = 2
USAGE = 64
BAD_INPUT = 65
UNAVAILABLE = 69
INTERNAL = 70
TRY_AGAIN = 75
INTERRUPTED = 130


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ends with this error."""
    if isinstance(error, JobError):
        return error.exit_code
    return UNAVAILABLE if isinstance(error, (ModelError, EngineError)) else INTERNAL
