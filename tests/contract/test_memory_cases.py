"""Cases t17 and t18: wide files in little memory, and more text in a part than 32-bit offsets reach."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrun.engine.request import RequestOutput
from specrun.jobs.schema import OutputRow
from tests.contract.program import ROOT
from tests.runner.conftest import Job

NUM_ROWS = 50_000
NUM_CHARS = 4_000
MEASURE = """
import sys, threading
from specrun.jobs.prompts import PromptSource
from specrun.jobs.spec import JobSpec

def rss(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) / 1024

spec = JobSpec.load(sys.argv[1])
PromptSource(spec)  # what the first use of everything costs
before = rss("VmRSS:")
num_rows = sum(len(batch.rows) for batch in PromptSource(spec).batches())
print(num_rows, rss("VmHWM:") - before)
"""


def write_wide(job: Job, kind: str) -> Job:
    """Some 200 MB of text that does not compress, in one row group."""
    rng = random.Random(0)
    pool = rng.randbytes(2 << 20).hex()
    starts = [rng.randrange(len(pool) - NUM_CHARS) for _ in range(NUM_ROWS)]
    texts = (pool[start : start + NUM_CHARS] for start in starts)
    if kind == "parquet":
        path = job.folder / "in.parquet"
        table = pa.table({"prompt": pa.array(texts, pa.string())})
        pq.write_table(table, path, row_group_size=NUM_ROWS, compression="zstd", use_dictionary=False)
        assert pq.read_metadata(path).num_row_groups == 1
    else:
        path = job.folder / "in.jsonl"
        with path.open("w") as file:
            file.writelines(f'{{"prompt": "{text}"}}\n' for text in texts)
    job.config["input"]["path"] = str(path)
    return job


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_t17_a_wide_row_group_streams(job: Job, kind: str) -> None:
    write_wide(job, kind)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    command = [sys.executable, "-c", MEASURE, str(job.file)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    num_rows, growth_mb = result.stdout.split()
    assert int(num_rows) == NUM_ROWS and float(growth_mb) < 150


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_t17_the_first_rows_come_before_the_rest_is_read(job: Job, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specrun.jobs.prompts import PromptSource

    texts = ["x" * NUM_CHARS] * 20_000
    if kind == "parquet":
        job.parquet(pa.table({"prompt": texts}))
    else:
        job.jsonl([{"prompt": text} for text in texts])
    batches = PromptSource(job.spec).batches()
    first = next(batches)
    assert first.start == 0 and len(first.rows) <= 4096


@pytest.mark.slow
def test_t18_more_than_two_gigabytes_of_text_in_a_part(job: Job) -> None:
    """2400 rows of 1 MiB, each its own, in one part."""
    num_rows, num_bytes = 2400, 1 << 20
    job.prompts(num_rows).set(output__rows_per_part=num_rows)

    from specrun.runner.outputs import OutputText

    def long_row(self: OutputText, output: RequestOutput, text: str) -> OutputRow:
        row = original(self, output, text)
        row.text = f"{row.row_index:08d}" * (num_bytes // 8)
        return row

    original = OutputText._row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputText, "_row", long_row)
        assert job.run(max_num_seqs=64).exit_code == 0
    (part,) = (job.out / "data").iterdir()
    with pq.ParquetFile(part) as parquet:
        assert parquet.schema_arrow.field("text").type == pa.large_string()
        assert parquet.metadata.num_rows == num_rows and parquet.metadata.num_row_groups > 10
        row_index = 0
        for batch in parquet.iter_batches(64, columns=["row_index", "text"]):
            for row in batch.to_pylist():
                assert row["row_index"] == row_index and row["text"] == f"{row_index:08d}" * (num_bytes // 8)
                row_index += 1
    assert row_index == num_rows
    part.unlink()
