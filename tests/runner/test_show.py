"""What a running job shows: the progress line and the Prometheus endpoint."""

import io
import socket
import time
import urllib.request

import pytest

from specrun.engine.trace import EngineStats
from specrun.jobs.counts import RowCounts
from specrun.jobs.errors import ConfigError
from specrun.runner.progress import duration, progress_line, show_progress
from specrun.runner.status import JobStatus
from specrun.runner.telemetry import prometheus_text, serve


@pytest.fixture
def status():
    counts = RowCounts()
    status = JobStatus(200, lambda: counts)
    stats = EngineStats(
        num_generation_tokens=500, num_drafts=40, num_draft_tokens=80, num_accepted_tokens=60, num_running=8
    )
    stats.spec_on_s, stats.spec_off_s = 3.0, 1.0
    status.begin(stats)
    status.started_at = time.monotonic() - 10
    for _ in range(99):
        counts.add("stop", None, 5, 5)
    counts.add("error", "null_prompt", 0, 0)
    return status


def test_progress_line(status):
    line = "100/200 rows · 1 failed · 50 tok/s · 8 running · acceptance 75% · speculating 75% · ETA 10s"
    assert progress_line(status) == line
    assert progress_line(JobStatus(200, RowCounts)) == "loading the model"
    assert [duration(s) for s in (0, 59.6, 200, 7500)] == ["0s", "1m00s", "3m20s", "2h05m"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_and_a_live_one(status):
    for stream in (io.StringIO(), Terminal()):
        with show_progress(status, stream, interval_s=0.05):
            deadline = time.monotonic() + 5
            while "100/200 rows" not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.02)
        assert "100/200 rows" in stream.getvalue()
        if not stream.isatty():
            assert stream.getvalue().endswith("\n") and "\r" not in stream.getvalue()


def test_prometheus_names(status):
    text = prometheus_text(status).decode()
    for line in (
        "specrun_spec_decode_num_drafts_total 40.0",
        "specrun_spec_decode_num_draft_tokens_total 80.0",
        "specrun_spec_decode_num_accepted_tokens_total 60.0",
        "specrun_generation_tokens_total 500.0",
        "specrun_prompt_tokens_total 0.0",
        "specrun_num_requests_running 8.0",
        "specrun_num_requests_waiting 0.0",
        "specrun_kv_cache_usage_perc 0.0",
        'specrun_speculation_seconds_total{state="on"} 3.0',
        'specrun_rows_total{outcome="null_prompt"} 1.0',
        'specrun_rows_total{outcome="stop"} 99.0',
    ):
        assert f"\n{line}\n" in text
    assert "job=" not in text


def test_a_running_job_is_served(status):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics\.prometheus_port {port}: "), serve(status, port):
            pass
    with serve(status, port):
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert "specrun_generation_tokens_total 500.0" in text
