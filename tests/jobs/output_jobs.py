"""A small job's output side, for the tests of parts, shards, resume and retry."""

import random

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from specrun.jobs.fingerprint import Fingerprint
from specrun.jobs.finished import FinishedJob
from specrun.jobs.folder import MANIFEST, SUCCESS, OutputFolder
from specrun.jobs.index import JobIndex
from specrun.jobs.ledger import Ledger, Terms
from specrun.jobs.outputs import OutputWriter
from specrun.jobs.schema import OutputRow
from specrun.jobs.shard import Shard

PASSTHROUGH = pa.schema([("lang", pa.string()), ("n", pa.int64())])
FINGERPRINT = {"model": {"path": "tiny"}, "sampling": {"temperature": 0, "seed": 0}}
FOOTER = {"specrun.job": "nightly", "specrun.model": "tiny"}


def make_ledger(out, num_rows=30, rows_per_part=10, shard="0/1", fingerprint=FINGERPRINT, scan=None, **terms):
    """The ledger of a shard, not yet open."""
    known = fingerprint if isinstance(fingerprint, Fingerprint) else Fingerprint(fingerprint)
    part_of = Shard.of(shard, {})
    index = JobIndex.of(known, part_of, num_rows, rows_per_part, scan or {})
    return Ledger(OutputFolder(str(out)), part_of, index, known, Terms(**terms))


def open_ledger(out, *args, retry_codes=None, **kwargs):
    ledger = make_ledger(out, *args, **kwargs)
    ledger.open(retry_codes)
    return ledger


def writer_of(ledger, passthrough=PASSTHROUGH, **kwargs):
    return OutputWriter(ledger, passthrough, metadata=FOOTER, **kwargs)


def open_writer(
    out, num_rows=30, rows_per_part=10, shard="0/1", passthrough=PASSTHROUGH, token_ids=False, logprobs=False, **kwargs
):
    """A writer under an open ledger; `close()` closes that."""
    ledger = open_ledger(out, num_rows, rows_per_part, shard, **kwargs)
    return writer_of(ledger, passthrough, token_ids=token_ids, logprobs=logprobs)


def close(writer):
    """All that a killed process leaves, without the wait for its lock."""
    writer._ledger.close()


def batch(start, stop):
    rows = range(start, stop)
    columns = [pa.array(["en" if i % 2 else None for i in rows], pa.string()), pa.array(rows, pa.int64())]
    return [f"id-{i}" for i in rows], pa.record_batch(columns, schema=PASSTHROUGH)


def row(index, **values):
    result = {"text": f"text {index}\n\u2028é", "finish_reason": "stop", "prompt_tokens": 3, "output_tokens": 2}
    return OutputRow(index, f"id-{index}", **{**result, **values})


def failed_row(index, code="engine_error"):
    return OutputRow(index, None, finish_reason="error", error_code=code, error_message=f"row {index} failed")


def expect(writer, start=None, stop=None, batch_rows=7):
    """Announces those rows of the shard that are not in committed parts."""
    ranges = writer._ledger.ranges
    stop = ranges.stop if stop is None else stop
    for first in range(ranges.start if start is None else start, stop, batch_rows):
        last = min(first + batch_rows, stop)
        if not writer.range_done(first, last):
            writer.expect(first, *batch(first, last))


def run(writer, seed=0, make_row=row):
    """What a shard does: reads, runs what is not done in any order, finishes. Gives the rows that ran."""
    ranges = writer._ledger.ranges
    expect(writer)
    todo = [i for i in range(ranges.start, ranges.stop) if not writer.is_done(i)]
    random.Random(seed).shuffle(todo)
    for i in range(0, len(todo), 4):
        writer.write([make_row(index) for index in todo[i : i + 4]])
    writer.finish()
    return todo


def run_shard(out, *args, make_row=row, seed=0, **kwargs):
    """A whole attempt at a shard; gives the rows that ran."""
    writer = open_writer(out, *args, **kwargs)
    try:
        ran = run(writer, seed, make_row)
        writer._ledger.complete()
    finally:
        close(writer)
    return ran


def declare_done(out):
    """What finalising the job writes, as far as a ledger looks at it."""
    output = OutputFolder(str(out))
    with output.finalizing() as folder:
        folder.write_json(MANIFEST, FinishedJob.gather(output).manifest("done"))
        folder.write(SUCCESS, b"")


def finish_job(out, *args, **kwargs):
    """A whole job of one shard; gives the rows that ran."""
    ran = run_shard(out, *args, **kwargs)
    declare_done(out)
    return ran


def is_finished(out, fingerprint=FINGERPRINT, if_exists="resume"):
    """Whether a submit would find nothing to do."""
    return Ledger.finished(OutputFolder(str(out)), Fingerprint(fingerprint), if_exists)


def names(out):
    return sorted(path.name for path in (out / "data").iterdir())


def shard_folder(out, shard=0):
    return out / ".specrun" / f"shard-{shard:05d}"


def spill_file(out, sequence, shard=0):
    return shard_folder(out, shard) / "spill" / f"part-{sequence:06d}.jsonl"


def manifest_of(out, shard=0):
    return orjson.loads((shard_folder(out, shard) / "manifest.json").read_bytes())


def read_rows(out):
    """Every row in data/ as a dict, in the order of the part's names."""
    return [row for name in names(out) for row in pq.read_table(out / "data" / name).to_pylist()]


def assert_whole(out, num_rows, text_of=lambda i: row(i).text):
    """Every row once, in input order, with its own id and passthrough values."""
    rows = read_rows(out)
    assert [r["row_index"] for r in rows] == list(range(num_rows))
    assert [r["id"] for r in rows] == [f"id-{i}" for i in range(num_rows)]
    assert [r["n"] for r in rows] == list(range(num_rows))
    assert [r["text"] for r in rows] == [text_of(i) for i in range(num_rows)]
