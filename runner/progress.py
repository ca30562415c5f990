"""The progress line: alive on a terminal, one plain line every few seconds elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from .status import JobStatus

INTERVAL_S = 5.0
LIVE_INTERVAL_S = 0.25


@contextmanager
def show_progress(status: JobStatus, stream: TextIO, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Show how the job stands on `stream` while the block runs."""
    done = threading.Event()
    show = _show_live if stream.isatty() else _show_plain
    thread = threading.Thread(
        target=show, args=(status, stream, interval_s, done), name="specrun-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show_plain(status: JobStatus, stream: TextIO, interval_s: float, done: threading.Event) -> None:
    while not done.wait(interval_s):
        stream.write(progress_line(status) + "\n")
        stream.flush()


def _show_live(status: JobStatus, stream: TextIO, interval_s: float, done: threading.Event) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as live:
        while not done.wait(LIVE_INTERVAL_S):
            live.update(Text(progress_line(status), overflow="ellipsis", no_wrap=True), refresh=True)


def progress_line(status: JobStatus) -> str:
    """Rows, failures, speed, acceptance and time to go, in one line."""
    if status.started_at is None:
        return "loading the model"
    counts, stats = status.read_counts(), status.stats
    total = "?" if status.num_rows is None else f"{status.num_rows:,}"
    parts = [f"{counts.num_rows:,}/{total} rows", f"{counts.num_failed:,} failed"]
    parts.append(f"{stats.num_generation_tokens / max(status.elapsed_s, 1e-9):,.0f} tok/s")
    parts.append(f"{stats.num_running} running")
    if stats.num_draft_tokens:
        parts.append(f"acceptance {stats.num_accepted_tokens / stats.num_draft_tokens:.0%}")
    if decode_s := stats.spec_on_s + stats.spec_off_s:
        parts.append(f"speculating {stats.spec_on_s / decode_s:.0%}")
    if (eta_s := status.eta_s) is not None:
        parts.append(f"ETA {duration(eta_s)}")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    """As people read it: 45s, 3m20s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
