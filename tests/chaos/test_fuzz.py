"""One output row for each input row, in order, with the right content: whatever the rows, and wherever it crashes."""

import builtins
import io
import os
import random
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from specrun.jobs.spec import JobSpec
from specrun.runner import pipeline
from specrun.runner.run import run_job
from tests.chaos.attempt import ChaosBuilder
from tests.chaos.chaos_job import LINE_ERRORS, ROW_ERRORS, TYPES, ChaosJob, carried_json, make_row
from tests.chaos.invariants import check_complete
from tests.chaos.remains import work_files

MAX_SHARDS = 3
EXAMPLES = int(os.environ.get("SPECRUN_FUZZ_EXAMPLES", "0"))
"""More of them, other ones each time; without it a few, always the same."""


class Crash(BaseException):
    """The process ends here."""


@contextmanager
def crashing(out, call, allowed):
    """From the call after `allowed` calls on, nothing reaches the output any more."""
    left = allowed

    def counted(real, of_path):
        def run(path, *args, **kwargs):
            nonlocal left
            if of_path and (isinstance(path, int) or not str(path).startswith(str(out))):
                return real(path, *args, **kwargs)
            left -= 1
            if left < 0:
                raise Crash
            return real(path, *args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        if call == "open":
            opened = counted(builtins.open, True)
            patch.setattr(builtins, "open", opened)
            patch.setattr(io, "open", opened)
        else:
            patch.setattr(os, call, counted(getattr(os, call), call == "replace"))
        yield


@st.composite
def inputs(draw):
    """Rows of a Parquet or a JSONL file."""
    is_jsonl = draw(st.booleans())
    codes = [*ROW_ERRORS, *(LINE_ERRORS if is_jsonl else ())]
    kinds = draw(st.lists(st.one_of(st.none(), st.sampled_from(codes)), max_size=40))
    rng = random.Random(draw(st.integers(0, 1 << 16)))
    names = draw(st.sets(st.sampled_from(list(carried_json(rng) if is_jsonl else TYPES))))
    rows = [make_row(rng, index, is_jsonl, code) for index, code in enumerate(kinds)]
    rows = [replace(row, carried={name: value for name, value in row.carried.items() if name in names}) for row in rows]
    return is_jsonl, rows


CRASHES = st.tuples(st.sampled_from(["replace", "fsync", "open"]), st.integers(0, 40))


@settings(
    max_examples=EXAMPLES or 25,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    rows=inputs(),
    rows_per_part=st.integers(1, 15),
    extras=st.booleans(),
    stub=st.fixed_dictionaries(
        {"seed": st.one_of(st.none(), st.integers(0, 9)), "max_num_seqs": st.integers(1, 16)},
    ),
    output_rows=st.integers(1, 20),
    crashes=st.lists(CRASHES, max_size=4),
    shards=st.integers(1, MAX_SHARDS),
)
@example(
    rows=(True, []), rows_per_part=3, extras=False, stub={}, output_rows=4, crashes=[("replace", 3)], shards=MAX_SHARDS
)
def test_one_output_row_for_each_input_row(rows, rows_per_part, extras, stub, output_rows, crashes, shards):
    is_jsonl, rows = rows
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if hasattr(pipeline, "OUTPUT_ROWS"):
            patch.setattr(pipeline, "OUTPUT_ROWS", output_rows)
        job = ChaosJob(Path(folder) / "job", rows, is_jsonl, rows_per_part, extras)
        out = job.file.parent / "out"
        for call, allowed in crashes:
            for shard in range(shards):
                run_until_crash(job, out, stub, shard, shards, call, allowed)
        for shard in range(shards):
            result = run_job(spec_of(job, shard, shards), builder=ChaosBuilder(stub))
            assert result.exit_code == 0
        check_complete(job, out, None)


def run_until_crash(job, out, stub, shard, shards, call, allowed):
    """An attempt that may crash; after it, every part that has its name is whole."""
    spec = spec_of(job, shard, shards)
    with suppress(Crash), crashing(out, call, allowed):
        run_job(spec, builder=ChaosBuilder(stub))
    for lock in work_files(out, "lock"):
        lock.unlink()  # its holder is this process, which lives
    for part in (out / "data").glob("*"):
        pq.read_metadata(part)


def spec_of(job, shard, shards):
    """The job, or a shard of it."""
    return JobSpec.load(job.file, [f"run.shard={shard}/{shards}"] if shards > 1 else [])
