"""A running job's counters for Prometheus, and the same as a text file when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..jobs.errors import ConfigError
from .status import JobStatus


class JobCollector(Collector):
    """Reads a job's status when it is scraped. Metric names follow vLLM's where it has the metric."""

    def __init__(self, status: JobStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Counters since the process started, rows of earlier attempts included in rows_total alone."""
        stats = self._status.stats
        counters = (
            ("spec_decode_num_drafts", "Verifications that carried draft tokens", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens verified", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted", stats.num_accepted_tokens),
            ("generation_tokens", "Tokens generated", stats.num_generation_tokens),
            ("prompt_tokens", "Prompt tokens of admitted rows", stats.num_prompt_tokens),
        )
        for name, text, count in counters:
            yield CounterMetricFamily(f"specrun_{name}", text, value=count)
        gauges = (
            ("num_requests_running", "Rows that decode", stats.num_running),
            ("num_requests_waiting", "Rows that wait for room", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", stats.kv_usage),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"specrun_{name}", text, value=value)
        seconds = CounterMetricFamily("specrun_speculation_seconds", "Seconds of decoding", labels=["state"])
        seconds.add_metric(["on"], stats.spec_on_s)
        seconds.add_metric(["off"], stats.spec_off_s)
        yield seconds
        rows = CounterMetricFamily("specrun_rows", "Rows by finish reason or error code", labels=["outcome"])
        for outcome, count in sorted(self._status.outcomes().items()):
            rows.add_metric([outcome], count)
        yield rows


def prometheus_text(status: JobStatus) -> bytes:
    """All counters in Prometheus' text format."""
    return generate_latest(_registry(status))


@contextmanager
def serve(status: JobStatus, port: int | None) -> Iterator[None]:
    """Serve the counters on `port` (None: do not) while the block runs; ConfigError when the port is taken."""
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, registry=_registry(status))
    except OSError as exc:
        raise ConfigError(f"metrics.prometheus_port {port}: {exc.strerror or exc}; choose a free port or null") from exc
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _registry(status: JobStatus) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(JobCollector(status))
    return registry
