"""A job's report for people: the table at the end of a run and of `specrun report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TextIO

from ..jobs.counts import RowCounts
from ..jobs.errors import InputMissing
from ..jobs.folder import OutputFolder
from ..jobs.index import JobIndex
from ..jobs.metrics import JobMetrics, read_report
from ..jobs.shard import Shard
from .progress import duration

Line = tuple[str, str]
SHOWN_DIGITS = 12
"""Of a hash."""


def load_report(location: str) -> dict[str, Any]:
    """report.json of an output folder; while shards are still to come, the sum of what they have reported.

    InputMissing where there is nothing of the kind.
    """
    output = OutputFolder(location)
    if (report := read_report(output.store)) is not None:
        return report
    index = JobIndex.read(output)
    if index is None:
        raise InputMissing(f"{location} has no report.json; give the output.path of a job that has run")
    shards = [output.shard(Shard(i, index.num_shards)) for i in range(index.num_shards)]
    reports = [report for shard in shards if (report := read_report(output.store, shard.report)) is not None]
    if not reports:
        raise InputMissing(f"{location} has no report yet: its job still runs, or was killed; submit it again to go on")
    rows = RowCounts()
    for report in reports:
        rows.update(RowCounts(**{field.name: report[field.name] for field in fields(RowCounts)}))
    totals = JobMetrics.of_shards(reports, rows)
    totals.state = f"{sum(report['state'] == 'done' for report in reports)} of {index.num_shards} shards done"
    return {**totals.to_row(), "files": {name: path for report in reports for name, path in report["files"].items()}}


def summary_lines(report: Mapping[str, Any]) -> list[Line]:
    """What most people want to know."""
    lines = [
        ("rows", f"{report['num_rows']:,}"),
        ("failed", _failed(report)),
        ("prompt tokens", f"{report['num_prompt_tokens']:,}"),
        ("output tokens", f"{report['num_output_tokens']:,}"),
        ("tokens/s", _number(report["output_tokens_per_s"])),
        ("acceptance", _acceptance(report)),
        ("speculation on", _share(report["spec_on_fraction"], "of decoding time")),
    ]
    return [*lines, *((name.replace("_", " "), str(path)) for name, path in report["files"].items())]


def full_lines(report: Mapping[str, Any]) -> list[Line]:
    """The summary and where, with what and in which time."""
    reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(report["finish_reasons"].items()))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return [
        ("job", report["job"]),
        ("state", _state(report)),
        ("model", f"{report['model']} on {report['device'] or '-'} in {report['dtype'] or '-'}"),
        ("model files", _files(report.get("revision"), report.get("content_hash"))),
        ("speculation", f"{report['method']}, policy {report['policy']}"),
        *_drafting_lines(report),
        *_policy_lines(report),
        *summary_lines(report),
        ("finish reasons", reasons or "-"),
        ("tokens from cache", f"{report['num_cached_tokens']:,} prompt tokens"),
        ("steps", f"{report['num_steps']:,}, {report['num_preemptions']:,} preemptions"),
        ("time", _times(report)),
        *_forecast_lines(report),
        ("peak memory", f"{report['peak_rss_bytes'] / 1e6:,.0f} MB"),
        ("versions", versions),
    ]


def _drafting_lines(report: Mapping[str, Any]) -> list[Line]:
    """Who drafts and why, and what the drafter says about itself."""
    lines = []
    if report.get("method_reason"):
        lines.append(("chosen by auto", report["method_reason"]))
    if report.get("draft_model"):
        lines.append(("draft model", report["draft_model"]))
        lines.append(("draft model files", _files(report["draft_revision"], report["draft_content_hash"])))
    facts = dict(report.get("drafter_facts") or {})
    if "index_tokens" in facts:
        tokens, rows, seeded = (facts.pop(name, 0) for name in ("index_tokens", "index_rows", "seeded_tokens"))
        size = f"{facts.pop('index_bytes', 0) / 1e6:,.0f} MB"
        lines.append(("suffix index", f"{tokens:,.0f} tokens of {rows:,.0f} rows, {seeded:,.0f} seeded, {size}"))
    lines += _set_and_realised(facts)
    return [*lines, *_other_facts("drafter", facts)]


def _policy_lines(report: Mapping[str, Any]) -> list[Line]:
    """What the policy says about itself."""
    lines = []
    facts = dict(report.get("policy_facts") or {})
    off_s, measured_s = facts.pop("predicted_off_s", None), facts.pop("measured_s", None)
    if off_s and measured_s:
        text = f"{_short_time(off_s)} by the cost model, {_short_time(measured_s)} taken"
        lines.append(("without drafts", f"{text}: {off_s / measured_s:.2f} times as fast with them"))
    p50, p95 = facts.pop("cost_error_p50", None), facts.pop("cost_error_p95", None)
    if p50 is not None and p95 is not None:
        lines.append(("cost model's error", f"{p50:.1%} of a step in the median, {p95:.1%} at the 95th percentile"))
    if (brier := facts.pop("acceptance_brier", None)) is not None:
        lines.append(("acceptance model", f"Brier score {brier:.3f} of its chances, 0 being certain and right"))
    return [*lines, *_other_facts("policy's facts", facts)]


def _forecast_lines(report: Mapping[str, Any]) -> list[Line]:
    """What the job was expected to take, and what it took."""
    seconds, never_s = report.get("forecast_s"), report.get("forecast_never_s")
    if seconds is None or never_s is None:
        return []
    text = f"at step {report['forecast_at_step']:,}: {_short_time(seconds)}"
    if report["method"] != "none":
        text += f" with speculation, {_short_time(never_s)} without"
    taken = f"took {_short_time(report['busy_s'])}" if report["state"] == "done" else "not done yet"
    return [("forecast", f"{text}; {taken}")]


def _other_facts(title: str, facts: Mapping[str, float]) -> list[Line]:
    named = {name.removeprefix("num_").replace("_", " "): value for name, value in facts.items()}
    return [(title, ", ".join(f"{name} {value:,.6g}" for name, value in named.items()))] if named else []


def _set_and_realised(facts: dict[str, float]) -> list[Line]:
    """Acceptance by draft position as method synthetic was told it and as it came; taken out of `facts`."""
    lines = []
    for position in range(len(facts)):
        keys = [
            f"{name}_pos_{position}" for name in ("set_acceptance_rate", "realised_acceptance_rate", "graded_drafts")
        ]
        wanted, realised, count = (facts.pop(key, None) for key in keys)
        if wanted is not None and realised is not None:
            text = f"set to {wanted:.1%}, realised {realised:.1%} of {count or 0:,.0f}"
            lines.append((f"draft {position + 1}", text))
    return lines


def _files(revision: str | None, content_hash: str | None) -> str:
    algorithm, _, digest = (content_hash or "").partition(":")
    parts = [f"revision {revision}"] * bool(revision) + [f"{algorithm} {digest[:SHOWN_DIGITS]}"] * bool(digest)
    return ", ".join(parts) or "-"


def print_lines(lines: list[Line], stream: TextIO) -> None:
    """A table of two columns; names in bold on a terminal."""
    width = max(len(name) for name, _ in lines) + 2
    if not stream.isatty():
        stream.writelines(f"{name:<{width}}{value}\n" for name, value in lines)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)
    for name, value in lines:
        console.print(Text.assemble((f"{name:<{width}}", "bold"), value), soft_wrap=True)


def _state(report: Mapping[str, Any]) -> str:
    code = "" if report["exit_code"] is None else f"exit code {report['exit_code']}, "
    shards = f", {report['shards']} shards" if report["shards"] > 1 else ""
    return f"{report['state']} ({code}attempt {report['attempt']}{shards})"


def _failed(report: Mapping[str, Any]) -> str:
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(report["error_codes"].items()))
    return f"{report['num_failed']:,}" + (f" ({codes})" if codes else "")


def _acceptance(report: Mapping[str, Any]) -> str:
    rate, length = report["acceptance_rate"], report["mean_acceptance_length"]
    return "-" if rate is None else f"{rate:.1%} of draft tokens, {length:.2f} tokens a verification"


def _share(value: float | None, of: str) -> str:
    return "-" if value is None else f"{value:.1%} {of}"


def _short_time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _times(report: Mapping[str, Any]) -> str:
    parts = (("total", "total_s"), ("loading", "load_s"), ("in steps", "busy_s"), ("waiting for input", "input_wait_s"))
    return ", ".join(f"{duration(report[key])} {name}" for name, key in parts)
