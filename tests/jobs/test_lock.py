"""Who holds an output folder, and when a lock may be taken over."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict

import orjson
import psutil
import pytest

from specrun.jobs import lock as lock_module
from specrun.jobs.errors import TemporaryError
from specrun.jobs.ledger import Ledger
from specrun.jobs.lock import FolderLock, Holder


def open_ledger(out, **kwargs):
    ledger = Ledger(out, {"seed": 0}, **kwargs)
    ledger.open()
    return ledger


def hold(out, **changes):
    """A lock as another process would have left it."""
    path = out / ".specrun" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps({**asdict(Holder.current()), **changes}))
    return path


def test_a_live_holder_is_respected(tmp_path):
    ledger = open_ledger(tmp_path)
    with pytest.raises(TemporaryError, match=f"process {os.getpid()} on {socket.gethostname()} is writing") as caught:
        open_ledger(tmp_path, if_exists="overwrite")
    assert caught.value.exit_code == 75
    ledger.check()
    ledger.close()
    open_ledger(tmp_path).close()


def test_a_live_process_of_another_command_is_respected(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        hold(tmp_path, pid=sleeper.pid, start_time=psutil.Process(sleeper.pid).create_time())
        with pytest.raises(TemporaryError, match=f"process {sleeper.pid} on"):
            open_ledger(tmp_path)
        sleeper.kill()
        while psutil.Process(sleeper.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        open_ledger(tmp_path).close()  # dead, though its parent has not heard of it
    finally:
        sleeper.communicate()


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"start_time": 12345.0}])
def test_a_dead_holder_is_replaced(tmp_path, changes):
    hold(tmp_path, **changes)
    ledger = open_ledger(tmp_path)
    ledger.check()
    ledger.close()


def test_a_broken_lock_is_replaced(tmp_path):
    hold(tmp_path).write_bytes(b"{}")
    open_ledger(tmp_path).close()


@pytest.mark.parametrize(("age_s", "alive"), [(0, True), (290, True), (310, False)])
def test_a_holder_elsewhere_lives_by_its_heartbeat(tmp_path, age_s, alive):
    path = hold(tmp_path, hostname="elsewhere")
    os.utime(path, times=(time.time() - age_s,) * 2)
    if alive:
        with pytest.raises(TemporaryError, match="on elsewhere"):
            open_ledger(tmp_path)
    else:
        open_ledger(tmp_path).close()


def test_the_heartbeat_goes_on_until_the_lock_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    path = tmp_path / "lock"
    lock = FolderLock(path)
    lock.acquire()
    os.utime(path, times=(0, 0))
    until = time.monotonic() + 5
    while path.stat().st_mtime == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert path.stat().st_mtime > 0
    path.write_bytes(orjson.dumps({"pid": 1, "hostname": "elsewhere", "start_time": 0.0}))
    os.utime(path, times=(0, 0))
    time.sleep(0.1)
    assert path.stat().st_mtime == 0
    with pytest.raises(TemporaryError, match="process 1 on elsewhere has taken over"):
        lock.check()
    lock.release()
    assert path.exists()


def test_a_lost_lock_keeps_the_ledger_from_writing(tmp_path):
    ledger = open_ledger(tmp_path)
    hold(tmp_path, hostname="elsewhere")
    with pytest.raises(TemporaryError):
        ledger.complete(0)
    assert not (tmp_path / "_SUCCESS").exists()
    ledger.close()
    assert (tmp_path / ".specrun" / "lock").exists()
