"""A job that is stopped anywhere, by a signal or between any two calls of the system, and run again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import specrun
from specrun.jobs.ledger import Ledger
from specrun.jobs.outputs import OutputWriter
from tests.jobs.output_jobs import (
    FINGERPRINT,
    PASSTHROUGH,
    assert_whole,
    names,
    open_writer,
    run,
)


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("call", ["replace", "fsync", "open"])
def test_a_crash_at_any_system_call_loses_nothing(tmp_path, monkeypatch, call):
    """Stops a job before its nth rename, sync or open of a descriptor, for every n, and runs it again."""
    real, left = getattr(os, call), 0

    def counted(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        return real(*args, **kwargs)

    num_crashes = 0
    for allowed in range(200):
        out = tmp_path / str(allowed)
        left = allowed
        ledger = Ledger(out, FINGERPRINT)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, counted)
            try:
                ledger.open()
                writer = OutputWriter(ledger, PASSTHROUGH, 10)
                run(writer, 12)
                ledger.complete(12)
                crashed = False
            except Crash:
                crashed = True
        ledger.close()
        num_crashes += crashed
        assert crashed or Ledger.finished(out, FINGERPRINT)
        for name in names(out) if (out / "data").exists() else []:
            pq.read_metadata(out / "data" / name)
        writer = open_writer(out)
        if not writer._ledger.is_complete:
            run(writer, 12, seed=1)
        writer.close()
        assert_whole(out, 12)
        if not crashed:
            break
    assert 5 < num_crashes < 200


KILLED = """
import os, random, signal, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from tests.jobs.output_jobs import expect, open_writer, row
out, seed, num_rows = Path(sys.argv[3]), int(sys.argv[4]), 400
writer = open_writer(out, rows_per_part=50)
rng = random.Random(seed)
expect(writer, num_rows)
todo = [i for i in range(num_rows) if not writer.is_done(i)]
rng.shuffle(todo)
die_at = rng.randrange(80, 160)
for n, index in enumerate(todo):
    if n == die_at:
        with open(out / ".specrun" / "spill" / f"part-{todo[n] // 50:06d}.jsonl", "ab") as torn:
            torn.write(b'[%d,"half a' % todo[n])
        os.kill(os.getpid(), signal.SIGKILL)
    writer.write([row(index)])
writer.finish(num_rows)
writer._ledger.complete(num_rows)
writer.close()
print(len(todo))
"""


def test_killed_until_done(tmp_path):
    arguments = [sys.executable, "-c", KILLED, str(Path(specrun.__file__).parents[1]), str(Path(__file__).parents[2])]
    codes = []
    for seed in range(10):
        done = subprocess.run([*arguments, str(tmp_path / "out"), str(seed)], capture_output=True, text=True)
        codes.append(done.returncode)
        for name in names(tmp_path / "out"):
            assert pq.read_table(tmp_path / "out" / "data" / name).num_rows == 50
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert codes[-1] == 0
    assert 3 <= len(codes) <= 6
    assert_whole(tmp_path / "out", 400)
    assert (tmp_path / "out" / "_SUCCESS").exists()
