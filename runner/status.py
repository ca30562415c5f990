"""How a running job stands, for those who show it: the progress line and the Prometheus collector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from ..engine.trace import EngineStats
from ..jobs.counts import RowCounts


@dataclass(slots=True)
class JobStatus:
    """A view of a run; every property may be asked for from any thread."""

    num_rows: int | None
    """Rows of the input where that is known."""
    read_counts: Callable[[], RowCounts]
    """Rows by outcome, earlier attempts included."""
    stats: EngineStats = field(default_factory=EngineStats)
    """The engine's; its own object once there is an engine."""
    started_at: float | None = None
    """When the engine was ready; None before."""
    num_rows_before: int = field(init=False)
    """Rows that earlier attempts had done."""

    def __post_init__(self) -> None:
        self.num_rows_before = self.read_counts().num_rows

    def begin(self, stats: EngineStats) -> None:
        """The engine is ready, and these are its counters."""
        self.stats, self.started_at = stats, monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the engine was ready."""
        return 0.0 if self.started_at is None else monotonic() - self.started_at

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the mean speed so far; None while that is not known."""
        num_done = self.read_counts().num_rows
        num_new = num_done - self.num_rows_before
        if self.num_rows is None or num_new <= 0:
            return None
        return max(0, self.num_rows - num_done) * self.elapsed_s / num_new

    def outcomes(self) -> dict[str, int]:
        """Rows by finish reason where they succeeded and by error code where they failed; adds up to num_rows."""
        counts = self.read_counts()
        return {name: n for name, n in counts.finish_reasons.items() if name != "error"} | counts.error_codes
