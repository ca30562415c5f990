"""A small job's output side, for the tests of parts and of resume."""

import random

import pyarrow as pa
import pyarrow.parquet as pq

from specrun.jobs.ledger import Ledger
from specrun.jobs.outputs import OutputWriter
from specrun.jobs.schema import OutputRow

PASSTHROUGH = pa.schema([("lang", pa.string()), ("n", pa.int64())])
FINGERPRINT = {"sampling": {"seed": 0}}


def open_writer(out, rows_per_part=10, passthrough=PASSTHROUGH, fingerprint=FINGERPRINT, **kwargs):
    ledger = Ledger(out, fingerprint)
    ledger.open()
    return OutputWriter(ledger, passthrough, rows_per_part, job="nightly", model="tiny", **kwargs)


def batch(start, stop):
    rows = range(start, stop)
    columns = [pa.array(["en" if i % 2 else None for i in rows], pa.string()), pa.array(rows, pa.int64())]
    return [f"id-{i}" for i in rows], pa.record_batch(columns, schema=PASSTHROUGH)


def row(index, **values):
    result = {"text": f"text {index}\n\u2028é", "finish_reason": "stop", "prompt_tokens": 3, "output_tokens": 2}
    return OutputRow(index, f"id-{index}", **{**result, **values})


def expect(writer, num_rows, batch_rows=7):
    for start in range(0, num_rows, batch_rows):
        stop = min(start + batch_rows, num_rows)
        if not writer.range_done(start, stop):
            writer.expect(start, *batch(start, stop))


def run(writer, num_rows, seed=0):
    """What a job does: reads, runs what is not done in any order, finishes. Gives the rows that ran."""
    expect(writer, num_rows)
    todo = [i for i in range(num_rows) if not writer.is_done(i)]
    random.Random(seed).shuffle(todo)
    for i in range(0, len(todo), 4):
        writer.write([row(index) for index in todo[i : i + 4]])
    writer.finish(num_rows)
    return todo


def names(out):
    return sorted(path.name for path in (out / "data").iterdir())


def spill_file(out, sequence):
    return out / ".specrun" / "spill" / f"part-{sequence:06d}.jsonl"


def assert_whole(out, num_rows):
    """Every row once, in input order, with its own id and passthrough values."""
    files = sorted((out / "data").iterdir())
    table = pa.concat_tables([pq.read_table(file) for file in files])
    assert table.column("row_index").to_pylist() == list(range(num_rows))
    assert table.column("id").to_pylist() == [f"id-{i}" for i in range(num_rows)]
    assert table.column("n").to_pylist() == list(range(num_rows))
    assert table.column("text").to_pylist() == [row(i).text for i in range(num_rows)]


def crash(writer):
    """All that a killed process leaves, without the wait for its lock."""
    writer.close()
