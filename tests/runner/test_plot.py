"""The plot of a job: what its panels show, and that a file is whole or not there."""

import builtins
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.jobs.errors import ConfigError, OutputError, StorageError
from specrun.jobs.folder import OutputFolder
from specrun.jobs.metrics import JobMetrics, StepWriter, write_report
from specrun.jobs.schema import STEP_SCHEMA
from specrun.jobs.shard import Shard
from specrun.jobs.store import open_store
from specrun.runner.cli import run_command
from specrun.runner.plot import plot_job
from specrun.runner.timeline import MAX_BINS, read_lanes, timeline

ZEROS = dict.fromkeys(STEP_SCHEMA.names, 0) | {"reason": "", "rolling_acceptance_rate": None}


def step(start_s: float, running: int = 4, drafted: int = 0, accepted: int = 0, seconds: float = 1.0, **values: object):
    """The record of a step in which each request gains one token and what was accepted."""
    drafts = {"num_draft_tokens": drafted, "num_accepted_tokens": accepted, "num_drafts": running * (drafted > 0)}
    times = {"start_s": start_s, "verify_s": 0.75 * seconds, "draft_s": 0.25 * seconds}
    committed = {"num_running": running, "num_generation_tokens": running + accepted}
    return ZEROS | drafts | times | committed | values


def write(location, *attempts, shard=0, of=1, job="nightly"):
    """An output folder with these steps, a list for each attempt."""
    folder = OutputFolder(str(location)).shard(Shard(shard, of))
    folder.create()
    for number, steps in enumerate(attempts, start=1):
        writer = StepWriter(folder, Shard(shard, of), number)
        for record in steps:
            writer.append(record)
        writer.flush()
    names = {"job": job, "model": "stub", "method": "ngram", "policy": "goodput", "state": "done"}
    write_report(folder, "report.json", JobMetrics(**names))
    folder.close()
    return str(location)


def lines_of(location):
    return timeline(read_lanes(open_store(location)))


def texts(path: Path) -> str:
    """All text of an SVG that is well-formed."""
    return "\n".join(element.text or "" for element in ET.parse(path).iter() if element.tag.endswith("text"))


def plot(location, path):
    code = run_command(["report", location, "--plot", str(path)])
    assert code == 0
    return path


def tail(num_steps=400):
    """Eight rows without drafts, then two with."""
    early = [step(i, running=8, num_waiting=8 - i // 30) for i in range(num_steps // 2)]
    return early + [step(i, running=2, drafted=8, accepted=4 * (i % 2)) for i in range(num_steps // 2, num_steps)]


def test_the_panels_say_what_the_job_did(tmp_path, capsys):
    path = plot(write(tmp_path / "out", tail()), tmp_path / "sub" / "job.svg")
    assert f"plot               {path}" in re.sub(" {2,}", " " * 15, capsys.readouterr().out)
    shown = texts(path)
    for text in (
        "nightly",
        "stub on - in - · drafts: ngram, policy: goodput",
        "Batch size (requests)",
        "Draft length (verified tokens per decoding request)",
        "Acceptance rate (% of verified draft tokens)",
        "Output (tokens/s)",
        "job time (min) since the engine began to run",
        "speculation off",
        "off 50.0%",
        "overall 25.0%",
    ):
        assert text in shown
    assert [file.name for file in path.parent.iterdir()] == ["job.svg"]


def test_nothing_is_told_by_colour(tmp_path):
    svg = plot(write(tmp_path / "out", tail()), tmp_path / "job.svg").read_text()
    colours = set(re.findall("#[0-9a-f]{6}", svg))
    assert colours and all(colour[1:3] == colour[3:5] == colour[5:7] for colour in colours)
    assert "stroke-dasharray" in svg and "pattern" in svg


@pytest.mark.parametrize(("suffix", "magic"), [("pdf", b"%PDF"), ("PNG", b"\x89PNG")])
def test_the_suffix_is_the_format(tmp_path, suffix, magic):
    assert plot(write(tmp_path / "out", tail(8)), tmp_path / f"job.{suffix}").read_bytes().startswith(magic)


def test_the_same_steps_give_the_same_file(tmp_path):
    location = write(tmp_path / "out", tail(8))
    first, again = (plot(location, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == again


@pytest.mark.parametrize("steps", [[], [step(0.0)], [step(0.0, seconds=0.0)], [step(5.0, running=0)]])
def test_very_short_jobs(tmp_path, steps):
    shown = texts(plot(write(tmp_path / "out", steps), tmp_path / "job.svg"))
    assert ("no steps" if not steps else "no drafts were verified") in shown


def test_a_mean_is_over_time_and_a_rate_over_tokens(tmp_path):
    steps = [step(0, 8, 8, 8, 3.0), step(3, 2, 4, 0, 1.0), step(4, 2, 0, 0, 4.0)]
    time = lines_of(write(tmp_path / "out", steps))
    assert time.edges.tolist() == [0, 8]
    assert time.decoding.mean == pytest.approx([(8 * 3 + 2 * 5) / 8])
    assert (time.decoding.least, time.decoding.most) == (2, 8)
    assert time.draft_len.mean == pytest.approx([12 / 12])
    assert (time.draft_len.least, time.draft_len.most) == (0, 2)
    assert time.acceptance.mean == pytest.approx([8 / 12])
    assert (time.acceptance.least[0], time.acceptance.most[0]) == pytest.approx((0, 1))
    assert time.tokens_per_s.mean == pytest.approx([(16 + 2 + 2) / 8])
    assert time.tokens_per_s.most == pytest.approx([16 / 3])
    assert time.off_share == pytest.approx([0.5])


def test_time_without_steps_is_a_gap_in_the_batch_and_no_output(tmp_path):
    steps = [step(0, 4), step(1, 4), step(2, 4), step(3, 4), *(step(12 + i, 4, 4, 4) for i in range(4))]
    time = lines_of(write(tmp_path / "out", steps))
    assert len(time.edges) == 3 and time.edges[-1] == 16
    time = timeline([*read_lanes(open_store(str(tmp_path / "out")))])
    assert time.tokens_per_s.mean == pytest.approx([16 / 8, 32 / 8])
    assert time.tokens_per_s.least == pytest.approx([0, 0])
    assert time.decoding.mean == pytest.approx([4, 4]) and time.totals["time_s"] == 16


def test_attempts_come_one_after_the_other(tmp_path, monkeypatch):
    location = write(tmp_path / "out", tail(40), tail(40), tail(40))
    time = lines_of(location)
    assert time.attempts == [(0, 1), (40, 2), (80, 3)] and time.num_steps == 120
    assert time.edges[-1] == 120
    assert "attempt 3" in texts(plot(location, tmp_path / "job.svg"))


def test_shards_lie_side_by_side(tmp_path):
    write(tmp_path / "out", [step(i, 4, 4, 4) for i in range(16)], of=2)
    location = write(tmp_path / "out", [step(i, 2) for i in range(8)], shard=1, of=2)
    time = lines_of(location)
    assert (time.num_shards, time.num_steps) == (2, 24)
    assert time.decoding.mean == pytest.approx([3, 3, 4, 4])
    assert time.decoding.least.tolist() == [2, 2, 4, 4] and time.decoding.most.tolist() == [4] * 4
    assert time.tokens_per_s.mean == pytest.approx([5, 5, 8, 8])
    assert time.off_share == pytest.approx([0.5, 0.5, 0, 0])
    shown = texts(plot(location, tmp_path / "job.svg"))
    assert "requests of one shard" in shown and "2 shards side by side" in shown


def test_a_long_job_is_binned(tmp_path):
    location = write(tmp_path / "out", tail(8))
    name = tmp_path / "out/metrics/steps/part-00000-0001-000000.parquet"
    table = pa.concat_tables([pq.read_table(name)] * 5000)
    column = table.column_names.index("start_s")
    pq.write_table(table.set_column(column, "start_s", pa.array(np.arange(40_000.0))), name)
    time = lines_of(location)
    assert len(time.edges) == MAX_BINS + 1 and time.num_steps == 40_000
    assert time.decoding.mean == pytest.approx(np.full(MAX_BINS, 5.0))
    assert set(time.decoding.least) == {2} and set(time.decoding.most) == {8}
    assert time.acceptance.mean == pytest.approx(np.full(MAX_BINS, 0.25))
    assert "job time (h)" in texts(plot(location, tmp_path / "job.svg"))


def test_an_output_in_a_bucket(bucket, tmp_path):
    location = write(f"{bucket.url}/jobs/out", tail(40), tail(40))
    assert "attempt 2" in texts(plot(location, tmp_path / "job.svg"))


def test_any_name_can_be_drawn(tmp_path):
    job = "$x^2$ <b>&amp; 夜 " + "long " * 40
    shown = texts(plot(write(tmp_path / "out", tail(8), job=job), tmp_path / "job.svg"))
    assert job[:30] in shown and "…" in shown
    plot(str(tmp_path / "out"), tmp_path / "job.png")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("job.gif", "the suffix says what to draw; give the file one of .svg, .pdf, .png"),
        ("job", "give the file one of .svg, .pdf, .png"),
        ("s3://bucket/job.svg", "plots are written to local files"),
    ],
)
def test_a_file_that_cannot_be_a_plot(tmp_path, monkeypatch, capsys, name, error):
    monkeypatch.chdir(tmp_path)
    location = write(tmp_path / "out", tail(8))
    assert run_command(["report", location, "--plot", name]) == ConfigError.exit_code
    assert error in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    location = write(tmp_path / "out", tail(8))
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run_command(["report", location]) == 0
    assert run_command(["report", location, "--plot", str(tmp_path / "job.svg")]) == ConfigError.exit_code
    assert "run pip install 'specrun[plot]'" in capsys.readouterr().err


def test_a_plot_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    location = write(tmp_path / "out", tail(8))
    path = tmp_path / "plots" / "job.svg"
    before = plot(location, path).read_bytes()
    report = {"job": "", "model": "", "device": "", "dtype": "", "method": "", "policy": ""}

    def fail(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OutputError, match=r"job.svg: No space left on device; choose another place with --plot"):
            plot_job(location, report, path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1
    with pytest.raises(OutputError, match="Is a directory"):
        (tmp_path / "a.svg").mkdir()
        plot_job(location, report, tmp_path / "a.svg")


def test_steps_that_cannot_be_read(tmp_path):
    location = write(tmp_path / "out", tail(8))
    (tmp_path / "out/metrics/steps/part-00000-0002-000000.parquet").write_bytes(b"PAR1 torn")
    (tmp_path / "out/metrics/steps/notes.txt").write_text("not ours")
    with pytest.raises(StorageError, match=r"part-00000-0002-000000.parquet cannot be read .*; move it away"):
        lines_of(location)
