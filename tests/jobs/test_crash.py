"""A job that is stopped anywhere, by a signal or between any two calls of the system, and run again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import specrun
from tests.jobs.output_jobs import (
    assert_whole,
    declare_done,
    failed_row,
    finish_job,
    is_finished,
    make_ledger,
    names,
    read_rows,
    row,
    run,
    writer_of,
)

CALLS = ["replace", "fsync", "open", "unlink", "rmdir"]


class Crash(BaseException):
    """The process ends here."""


class Crashing:
    """Stops a process before its nth call of a function of os; calls for its lock do not count.

    os.open opens folders and what is synced; the content of files goes another way.
    """

    def __init__(self, call):
        self._call = call
        self._real = getattr(os, call)
        self._left = 0

    def __call__(self, *args, **kwargs):
        self._left -= not str(args[0]).endswith("/lock")
        if self._left < 0:
            raise Crash
        return self._real(*args, **kwargs)

    def run(self, monkeypatch, allowed, ledger, work):
        """Whether the process was stopped; its lock is given up without a wait."""
        self._left = allowed
        with monkeypatch.context() as patch:
            patch.setattr(os, self._call, self)
            try:
                work(ledger)
                return False
            except Crash:
                return True
            finally:
                patch.undo()
                ledger.close()


@pytest.mark.parametrize("call", CALLS)
def test_a_crash_at_any_system_call_loses_nothing(tmp_path, monkeypatch, call):
    """Stops a job before its nth rename, sync, removal or open of a descriptor, for every n, and runs it again."""

    def work(ledger):
        ledger.open()
        run(writer_of(ledger))
        ledger.complete()
        declare_done(ledger.output.location)

    crashing, num_crashes = Crashing(call), 0
    for allowed in range(200):
        out = tmp_path / str(allowed)
        crashed = crashing.run(monkeypatch, allowed, make_ledger(out, 12), work)
        num_crashes += crashed
        for name in names(out) if (out / "data").exists() else []:
            pq.read_metadata(out / "data" / name)
        if not is_finished(out):
            assert crashed
            finish_job(out, 12, seed=1)
        assert is_finished(out)
        assert_whole(out, 12)
        if not crashed:
            break
    assert 3 < num_crashes < 200


def outcome(index):
    return failed_row(index, "timeout" if index == 7 else "engine_error") if index in (3, 7, 25) else row(index)


def all_rows(out):
    return {r["row_index"]: r for r in read_rows(out)}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("codes", [[], ["engine_error"]], ids=["all", "engine_error"])
def test_a_crash_at_any_system_call_of_a_retry_doubles_nothing(tmp_path, monkeypatch, call, codes):
    """At every moment each part is the old one or the new one, and the retry goes on where it was."""
    chosen = [3, 25] if codes else [3, 7, 25]
    ran: list[int] = []

    def again(index):
        ran.append(index)
        return row(index, text=f"again {index}")

    def work(ledger):
        ledger.open(codes)
        run(writer_of(ledger), make_row=again)
        ledger.complete()
        declare_done(ledger.output.location)

    crashing, num_crashes = Crashing(call), 0
    for allowed in range(200):
        out = tmp_path / str(allowed)
        finish_job(out, 30, make_row=outcome)
        before, untouched = all_rows(out), (out / "data" / "part-00000-000001.parquet").read_bytes()
        expected = {i: {**r, "text": f"again {i}"} if i in chosen else r for i, r in before.items()}
        ran.clear()
        crashed = crashing.run(monkeypatch, allowed, make_ledger(out), work)
        num_crashes += crashed

        between = read_rows(out)
        assert [r["row_index"] for r in between] == list(range(30))
        for start in (0, 10, 20):
            texts = [r["text"] for r in between[start : start + 10]]
            assert texts in ([r[i]["text"] for i in range(start, start + 10)] for r in (before, expected))

        if not is_finished(out):
            finish_job(out, make_row=again)  # any submit goes on with a retry that was begun
        if not ran:
            finish_job(out, make_row=again, retry_codes=codes)  # it had not begun
        assert sorted({*ran}) == chosen
        after = all_rows(out)
        assert [i for i in range(30) if after[i] != before[i]] == chosen
        assert_whole(out, 30, lambda i, expected=expected: expected[i]["text"])
        assert (out / "data" / "part-00000-000001.parquet").read_bytes() == untouched
        assert is_finished(out)
        if not crashed:
            break
    assert 3 < num_crashes < 200


KILLED = """
import os, random, signal, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from tests.jobs.output_jobs import close, declare_done, expect, open_writer, row, spill_file
out, seed, num_rows = Path(sys.argv[3]), int(sys.argv[4]), 400
writer = open_writer(out, num_rows, rows_per_part=50)
rng = random.Random(seed)
expect(writer)
todo = [i for i in range(num_rows) if not writer.is_done(i)]
rng.shuffle(todo)
die_at = rng.randrange(80, 160)
for n, index in enumerate(todo):
    if n == die_at:
        with open(spill_file(out, todo[n] // 50), "ab") as torn:
            torn.write(b'[%d,"half a' % todo[n])
        os.kill(os.getpid(), signal.SIGKILL)
    writer.write([row(index)])
writer.finish()
writer._ledger.complete()
close(writer)
declare_done(out)
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
