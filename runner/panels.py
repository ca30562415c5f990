"""The four panels of a plot. Line styles, hatches and words tell things apart, never a colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .timeline import PARTS_PER_BIN, Float64, Series, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (10.0, 8.0)
BAND = "0.84"
HATCH = "0.6"
TITLE_CHARS, SUBTITLE_CHARS = 66, 118
OFF = 0.9
"""A bin is hatched where more of its decoding time than this was without drafts: probes do not make it look on, nor
drafters that now and then find nothing make it look off."""
BELOW = 0.03
"""Of a panel's height, so that a line at 0 is seen."""
_UNITS = (("h", 3600.0, 2.0), ("min", 60.0, 3.0), ("s", 1.0, 0.0))
"""Name, seconds, and of how many the time must be at least for it to be written in this unit."""


def draw(time: Timeline, report: Mapping[str, Any]) -> Figure:
    """The four panels; `report` is the job's, for the title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES)
    panels = list(figure.subplots(4, sharex=True, gridspec_kw={"height_ratios": (1.15, 1.0, 1.0, 1.15)}))
    figure.subplots_adjust(left=0.085, right=0.855, top=0.875, bottom=0.095, hspace=0.42)
    unit, unit_s = _unit(float(time.edges[-1]))
    edges = time.edges / unit_s
    batch, draft_len, acceptance, tokens = panels
    _batch_size(batch, edges, time)
    _draft_length(draft_len, edges, time)
    _acceptance(acceptance, edges, time)
    _tokens_per_s(tokens, edges, time)
    for axes in panels:
        if not time.num_steps:
            _say(axes, 0.5, "no steps")
        axes.set_xlim(0, edges[-1] or 1)
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(color="0.3", length=3)
    tokens.set_xlabel(f"job time ({unit}) since the engine began to run")
    _mark_attempts(panels, time, unit_s)
    _title(figure, time, report)
    return figure


def _batch_size(axes: Axes, edges: Float64, time: Timeline) -> None:
    per = " of one shard" if time.num_shards > 1 else ""
    _head(axes, f"Batch size (requests{per})")
    _line(axes, edges, time.decoding, "decoding")
    # Broad and below the other, so that it is seen where they meet.
    style: dict[str, Any] = {"color": "0.45", "linewidth": 2.2, "linestyle": (0, (2.5, 1.5)), "zorder": 1.5}
    axes.stairs(time.waiting.mean, edges, baseline=None, label="waiting", **style)
    _legend(axes)
    _from_zero(axes, [time.decoding.most, time.waiting.mean], is_whole=True)
    mean = _over(time.totals["request_s"], time.totals["step_s"])
    _margin(axes, "decoding", f"mean {_number(mean)}", f"most {_number(_most(time.decoding))}")


def _draft_length(axes: Axes, edges: Float64, time: Timeline) -> None:
    from matplotlib.patches import Patch

    _head(axes, "Draft length (verified tokens per decoding request)")
    _line(axes, edges, time.draft_len, "mean")
    spans = [(edges[first], edges[last]) for first, last in _runs(time.off_share > OFF)]
    for left, right in spans:
        axes.axvspan(left, right, facecolor="none", edgecolor=HATCH, hatch="///", linewidth=0)
    if spans:
        _legend(axes, [Patch(facecolor="none", edgecolor=HATCH, hatch="////", linewidth=0.5, label="speculation off")])
    _from_zero(axes, [time.draft_len.most], is_whole=True)
    if spans:
        left, right = max(spans, key=lambda span: span[1] - span[0])
        if right - left > 0.12 * edges[-1]:
            _say(axes, (left + right) / 2 / edges[-1], "off")
    mean = _over(time.totals["num_draft_tokens"], time.totals["request_steps"])
    off = _over(time.totals["off_s"], time.totals["decoding_s"])
    _margin(
        axes, f"mean {_number(mean)}", f"most {_number(_most(time.draft_len))}", f"off {_percent(off)}", "of the time"
    )


def _acceptance(axes: Axes, edges: Float64, time: Timeline) -> None:
    _head(axes, "Acceptance rate (% of verified draft tokens)")
    percent = Series(*(100 * part for part in (time.acceptance.mean, time.acceptance.least, time.acceptance.most)))
    _line(axes, edges, percent, "mean")
    axes.set_ylim(-100 * BELOW, 105)
    axes.set_yticks([0, 25, 50, 75, 100])
    if time.num_steps and np.isnan(percent.mean).all():
        _say(axes, 0.5, "no drafts were verified")
    accepted, drafted = time.totals["num_accepted_tokens"], time.totals["num_draft_tokens"]
    _margin(axes, f"overall {_percent(_over(accepted, drafted))}", f"of {_number(drafted)}", "draft tokens")


def _tokens_per_s(axes: Axes, edges: Float64, time: Timeline) -> None:
    per = ", one shard" if time.num_shards > 1 else ""
    _head(axes, f"Output (tokens/s{per})")
    _line(axes, edges, time.tokens_per_s, "mean")
    _from_zero(axes, [time.tokens_per_s.most])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    tokens = time.totals["num_generation_tokens"]
    _margin(axes, f"overall {_number(_over(tokens, time.totals['active_s']))} /s", f"{_number(tokens)} tokens")


def _line(axes: Axes, edges: Float64, series: Series, label: str) -> None:
    """The mean on a band from the least to the most."""
    axes.stairs(series.most, edges, baseline=series.least, fill=True, color=BAND, linewidth=0)
    axes.stairs(series.mean, edges, baseline=None, color="black", linewidth=1.3, label=label)


def _say(axes: Axes, x: float, text: str, size: float = 9.0) -> None:
    """A word in the middle of a panel, at x of its width, 0 to 1."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2.0}
    axes.text(x, 0.52, text, transform=axes.transAxes, ha="center", va="center", fontsize=size, bbox=box)


def _head(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", pad=6)


def _legend(axes: Axes, handles: list[Any] | None = None) -> None:
    """Over the panel, to the right, where no line can run into it."""
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 0.985),
        ncols=3,
        frameon=False,
        borderaxespad=0,
        handlelength=2.6,
    )


def _margin(axes: Axes, *lines: str) -> None:
    """Numbers of the whole job beside its panel."""
    axes.text(1.02, 0.96, "\n".join(lines), transform=axes.transAxes, va="top", linespacing=1.35, color="0.15")


def _from_zero(axes: Axes, values: list[Float64], is_whole: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    top = max((float(np.nanmax(part)) for part in values if not np.isnan(part).all()), default=0.0)
    axes.set_ylim(-BELOW * (top or 1), 1.08 * top or 1)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=is_whole))


def _mark_attempts(panels: Sequence[Axes], time: Timeline, unit_s: float) -> None:
    """A dotted line through all panels where a job went on after it had been stopped; named where there is room."""
    named = 0.0
    for began_s, attempt in time.attempts[1:]:
        for axes in panels:
            axes.axvline(began_s / unit_s, color="0.25", linewidth=0.9, linestyle=(0, (1, 2)))
        x = began_s / float(time.edges[-1])
        if named + 0.09 < x < 0.95:
            _say(panels[0], named := x, f"attempt {attempt}", size=8)


def _title(figure: Figure, time: Timeline, report: Mapping[str, Any]) -> None:
    where = f"{report['model']} on {report['device'] or '-'} in {report['dtype'] or '-'}"
    what = f"drafts: {report['method']}, policy: {report['policy']}"
    title: dict[str, Any] = {"va": "center", "parse_math": False}
    figure.text(0.085, 0.965, _cut(str(report["job"] or "job"), TITLE_CHARS), fontsize=14, fontweight="bold", **title)
    figure.text(0.085, 0.934, _cut(f"{where} · {what}", SUBTITLE_CHARS), color="0.25", **title)
    figure.text(0.085, 0.018, _caption(time), va="center", fontsize=8, color="0.35")


def _caption(time: Timeline) -> str:
    """How to read the lines."""
    if not time.num_steps:
        return "the engine ran no step: there was nothing to do"
    bin_s = float(time.edges[1] - time.edges[0])
    part_s = bin_s / PARTS_PER_BIN
    shards = f", {time.num_shards:,} shards side by side" if time.num_shards > 1 else ""
    steps = f"{time.num_steps:,} step{'s' * (time.num_steps > 1)}{shards}"
    bands = f"grey: least to most of single steps (upper two panels), of {_seconds(part_s)} (lower two)"
    return f"{steps} · lines: means over {_seconds(bin_s)} · {bands}"


def _unit(time_s: float) -> tuple[str, float]:
    return next((name, unit_s) for name, unit_s, least in _UNITS if time_s >= least * unit_s)


def _seconds(value: float) -> str:
    for name, unit_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= unit_s:
            return f"{value / unit_s:.3g} {name}"
    return f"{value * 1e6:.3g} µs"


def _cut(text: str, length: int) -> str:
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def _runs(is_in: Any) -> list[tuple[int, int]]:
    """First and one past the last of each run of True in a [N] bool array."""
    steps = np.flatnonzero(np.diff(np.concatenate([[0], is_in.astype(np.int8), [0]])))
    return [(int(first), int(last)) for first, last in steps.reshape(-1, 2)]


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _most(series: Series) -> float | None:
    return None if np.isnan(series.most).all() else float(np.nanmax(series.most))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:,.3g} M" if value < 1e9 else f"{value / 1e9:,.3g} G"
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
