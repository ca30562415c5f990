"""Small jobs of SmolLM2 on which a policy can go wrong: where drafts pay, where they cost, where they do one after the
other, and some of the adversarial workloads with drafts of a set acceptance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from examples.benchmarks.real_text import MODEL, read_lines

PROMPTS = Path(__file__).parent.parent / "quickstart" / "prompts.jsonl"
DRAFTERS = ("ngram", "suffix", "draft_model")
FREE = ("chat", "code")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """A job with one drafter: what one `specrun bench` compares policies on."""

    job: str
    drafter: str
    what: str
    """For the table."""
    rows: list[Row]
    batch: int
    lengths: tuple[int, ...]
    """Fixed draft lengths that are compared; the longest is speculation.max_draft_tokens."""
    temperature: float = 0.0
    synthetic: dict[str, Any] = field(default_factory=dict)
    """speculation.synthetic without `replay`; over_time has shares of the job's tokens in place of tokens."""

    @property
    def name(self) -> str:
        """As --only has it."""
        return f"{self.job}/{self.drafter}"

    @property
    def policies(self) -> list[str]:
        """Contenders."""
        return ["never", *(f"always:{k}" for k in self.lengths), "goodput"]

    @property
    def num_tokens(self) -> int:
        """Output tokens of a run: the same under every policy, since rows go past any end-of-sequence."""
        return sum(row["max_tokens"] for row in self.rows)

    def write(self, folder: Path, draft_model: Path, recording: Path, method: str | None = None) -> Path:
        """The job's files; method none makes the recording for a synthetic one. Returns the job file."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows]
        (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        method = method or self.drafter
        out = recording if method == "none" else folder / "out"
        speculation: dict[str, Any] = {"method": method, "max_draft_tokens": max(self.lengths)}
        if method == "draft_model":
            speculation["model"] = str(draft_model)
        if method == "synthetic":
            speculation["synthetic"] = {"replay": str(recording), "confidence": "none", **self.synthetic}
            points = self.synthetic.get("over_time", [])
            speculation["synthetic"]["over_time"] = [[share * self.num_tokens, factor] for share, factor in points]
        job = {
            "version": 1,
            "name": f"{self.job}-{method}",
            "model": {"path": MODEL, "dtype": "bfloat16"},
            "speculation": {**speculation, "policy": "never" if method == "none" else "goodput"},
            "input": {"path": str(folder / "rows.jsonl"), "columns": {"id": "id", "prompt": "prompt", "group": "set"}},
            "sampling": {"ignore_eos": True, "temperature": self.temperature},
            "output": {"path": str(out), "if_exists": "overwrite", "token_ids": True},
            "engine": {"max_num_seqs": self.batch, "deterministic": self.drafter == "synthetic"},
            "run": {"order": "input"},
        }
        path = folder / f"{method}.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return path


def cells() -> list[Cell]:
    """All of them, in the order of the table."""
    return [*_real(), *_synthetic()]


def _real() -> list[Cell]:
    found = []
    for drafter in DRAFTERS:
        # Each of its drafts costs five sixths of a plain step, so long ones only make the table late.
        slow = drafter == "draft_model"
        few, many = ((1, 2, 3), (1, 2, 3)) if slow else ((1, 2, 3, 5), (1, 2, 3, 5, 8))
        found += [
            Cell("on-1", drafter, "copying, one row at a time", _copies(1 if slow else 3, 96), 1, many),
            Cell("on-4", drafter, "copying, 4 rows at a time", _copies(4 if slow else 8, 96), 4, many),
            Cell("off", drafter, "free text at temperature 0.7", _free(64, 48 if slow else 80), 64, few, 0.7),
            Cell("mixed", drafter, "60 short rows of free text, 4 long copies", _mixed(80 if slow else 112), 64, many),
        ]
    return sorted(found, key=lambda cell: ("on-1", "on-4", "off", "mixed").index(cell.job))


def _synthetic() -> list[Cell]:
    """Workloads of the simulator's suite, cut down to what a CPU does in a quarter of a minute."""
    falls = {"acceptance_rates": [0.85], "over_time": _steps((0.3, 1.0), (0.7, 0.2 / 0.85), (1.0, 1.0))}
    blocks = {"acceptance_rates": [0.9], "groups": {"factors": [1.0, 0.1 / 0.9], "rows_per_group": 8}}
    lengths = (1, 2, 3, 5)
    return [
        Cell("A2", "synthetic", "acceptance 0.85, 0.2, 0.85 by turns", _free(32, 48), 8, lengths, synthetic=falls),
        Cell("A4", "synthetic", "blocks of 8 rows of 0.9 and 0.1", _blocks(48, 8, 32), 8, lengths, synthetic=blocks),
        Cell(
            *("A6", "synthetic", "2 of 64 rows are 12 times as long, acceptance 0.8", _long_tail(64, 2, 12, 144), 64),
            lengths,
            synthetic={"acceptance_rates": [0.8]},
        ),
        Cell(
            *("A14", "synthetic", "4 rows at a time, acceptance 0.25", _free(8, 96), 4, lengths),
            synthetic={"acceptance_rates": [0.25]},
        ),
    ]


def _steps(*levels: tuple[float, float]) -> list[list[float]]:
    """Points of a factor that jumps: it is the second of each pair up to the first, a share of the job's tokens."""
    points, start = [], 0.0
    for share, factor in levels:
        points += [[start, factor], [share, factor]]
        start = share
    return points


def _prompts(*tasks: str) -> list[str]:
    return [row["prompt"] for row in read_lines(PROMPTS) if row["task"] in tasks]


def _rows(prompts: Sequence[str], lengths: Sequence[int], sets: Sequence[str]) -> list[Row]:
    """One row for each length; prompts that come again have another id and so other noise."""
    return [
        {"id": f"row-{i}", "prompt": prompts[i % len(prompts)], "max_tokens": length, "set": sets[i]}
        for i, length in enumerate(lengths)
    ]


def _copies(count: int, length: int) -> list[Row]:
    return _rows(_prompts("rewrite"), [length] * count, ["copy"] * count)


def _free(count: int, length: int) -> list[Row]:
    return _rows(_prompts(*FREE), [length] * count, ["free"] * count)


def _blocks(count: int, size: int, length: int) -> list[Row]:
    """Two data sets in turns, told apart by the job's group column."""
    return _rows(_prompts(*FREE), [length] * count, [f"set-{i // size % 2}" for i in range(count)])


def _mixed(length: int) -> list[Row]:
    """The long rows first, as run.order would have them. Each copies a paragraph; of two this model copies only one."""
    short = _rows(_prompts(*FREE), [16 + i % 9 for i in range(60)], ["free"] * 60)
    return [*_copies(4, length), *({**row, "id": f"short-{row['id']}"} for row in short)]


def _long_tail(count: int, num_long: int, length: int, longest: int) -> list[Row]:
    """The long rows lie in the middle, where they lie in a job whose lengths nobody knows."""
    middle = range(count // 2, count // 2 + num_long)
    return _rows(_prompts(*FREE), [longest if i in middle else length for i in range(count)], ["free"] * count)
