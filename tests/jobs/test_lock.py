"""Who holds an output, and when a lock may be taken over; in a folder and in a bucket."""

import os
import socket
import subprocess
import sys
import threading
import time
from copy import copy
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import orjson
import psutil
import pytest

from specrun.jobs import lock as lock_module
from specrun.jobs.errors import StorageError, TemporaryError
from specrun.jobs.lock import Holder, open_lock
from specrun.jobs.object_store import ObjectStore
from specrun.jobs.store import open_store

NAME = ".specrun/shard-00000/lock"
ELSEWHERE = {"hostname": "elsewhere"}


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path):
    at_s3 = request.param == "s3"
    store = open_store(f"{request.getfixturevalue('bucket').url}/out" if at_s3 else str(tmp_path / "out"))
    store.create([NAME.rpartition("/")[0]])
    return store


@pytest.fixture
def opened(store, tmp_path):
    """A new lock on the output at each call."""
    return lambda: open_lock(store, NAME, tmp_path)


@pytest.fixture
def age(store, monkeypatch):
    """Makes the heartbeat so many seconds old."""

    def change(seconds):
        if isinstance(store, ObjectStore):
            modified: Any = store.modified
            before = timedelta(seconds=seconds)
            monkeypatch.setattr(
                store, "modified", lambda name: modified(name) - (before if name == NAME else timedelta())
            )
        else:
            os.utime(store.path(NAME), times=(time.time() - seconds,) * 2)

    return change


def hold(store, tmp_path, **changes):
    """A lock as another process would have left it."""
    store.write(NAME, orjson.dumps({**asdict(Holder.current()), **changes}), tmp_path)


def test_a_live_holder_is_respected(opened, store):
    first = opened()
    first.acquire()
    where = f"{store.path(NAME)}: process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(TemporaryError, match=f"{where} is writing to this output; wait for it, stop it") as caught:
        opened().acquire()
    assert caught.value.exit_code == 75
    first.check()
    first.release()
    assert not store.exists(NAME)
    second = opened()
    second.acquire()
    second.release()
    second.release()


def test_a_live_process_of_another_command_is_respected(opened, store, tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        hold(store, tmp_path, pid=sleeper.pid, start_time=psutil.Process(sleeper.pid).create_time())
        with pytest.raises(TemporaryError, match=f"process {sleeper.pid} on"):
            opened().acquire()
        sleeper.kill()
        while psutil.Process(sleeper.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        lock = opened()
        lock.acquire()  # dead, though its parent has not heard of it
        lock.release()
    finally:
        sleeper.communicate()


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"start_time": 12345.0}, {"boot_id": "before"}])
def test_a_dead_holder_is_replaced(opened, store, tmp_path, changes):
    hold(store, tmp_path, **changes)
    lock = opened()
    lock.acquire()
    lock.check()
    lock.release()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"pid": 1', b"[1]", b"1"])
def test_a_broken_lock_is_replaced(opened, store, tmp_path, content):
    store.write(NAME, content, tmp_path)
    lock = opened()
    lock.acquire()
    lock.check()
    lock.release()


@pytest.mark.parametrize("changes", [ELSEWHERE, {"namespace": "pid:[1]"}, {**ELSEWHERE, "boot_id": "another"}])
@pytest.mark.parametrize(("age_s", "alive"), [(0, True), (110, True), (130, False)])
def test_a_holder_elsewhere_lives_by_its_heartbeat(opened, store, tmp_path, age, changes, age_s, alive):
    # A container that shares our host's name counts pids of its own: to look one up here would find nobody.
    hold(store, tmp_path, pid=2**22 + 1, **changes)
    age(age_s)
    lock = opened()
    if alive:
        with pytest.raises(TemporaryError, match=f"process {2**22 + 1} on"):
            lock.acquire()
    else:
        lock.acquire()
        lock.check()
        lock.release()


@pytest.mark.parametrize("offset_s", [-100_000, 100_000])
def test_our_clock_does_not_matter(opened, store, tmp_path, monkeypatch, offset_s):
    hold(store, tmp_path, **ELSEWHERE)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + offset_s)
    with pytest.raises(TemporaryError, match="on elsewhere"):
        opened().acquire()


def test_a_lock_that_was_taken_over_is_left_alone(opened, store, tmp_path):
    first = opened()
    first.acquire()
    hold(store, tmp_path, **ELSEWHERE)
    with pytest.raises(TemporaryError, match=f"{store.path(NAME)}: process .* on elsewhere has taken over this output"):
        first.check()
    first.release()
    assert orjson.loads(store.read(NAME))["hostname"] == "elsewhere"


def test_a_lock_that_is_gone_is_not_held(opened, store):
    lock = opened()
    with pytest.raises(TemporaryError, match="someone has taken over"):
        lock.check()
    lock.acquire()
    store.delete(NAME)
    with pytest.raises(TemporaryError, match="someone has taken over"):
        lock.check()
    lock.release()


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def beats(lock):
    return [thread for thread in threading.enumerate() if thread is lock._heartbeat]


def test_the_heartbeat_goes_on_until_the_lock_is_lost(opened, store, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    lock = opened()
    lock.acquire()
    heard = iter(range(3))
    refresh = lock._refresh
    monkeypatch.setattr(lock, "_refresh", lambda: (refresh(), next(heard, None)))
    wait_for(lambda: next(copy(heard), None) is None)
    lock.check()
    # Taken over between two beats, as it would be after a long suspension of this process.
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_refresh", lambda: None)
        wait_for(lambda: (hold(store, tmp_path, **ELSEWHERE), not beats(lock))[1])
    with pytest.raises(TemporaryError, match="on elsewhere has taken over"):
        lock.check()
    lock.release()
    assert store.exists(NAME)


def test_a_heartbeat_makes_the_lock_fresh(opened, store, tmp_path):
    lock = opened()
    lock.acquire()
    if isinstance(store, ObjectStore):
        store.delete(NAME)
        lock._refresh()  # written anew, which is what moves its time
    else:
        os.utime(store.path(NAME), times=(0, 0))
        lock._refresh()
        assert os.stat(store.path(NAME)).st_mtime > 0
    lock.check()
    lock.release()


def test_a_heartbeat_survives_an_outage(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    store = open_store(f"{bucket.url}/out")
    lock = open_lock(store, NAME, tmp_path)
    lock.acquire()
    fault = bucket.server.fail("denied", "PUT|GET|HEAD", "lock", times=4)
    wait_for(lambda: fault.hits == 4)
    seen = len(bucket.server.requests)
    wait_for(lambda: any(method == "PUT" for method, _ in bucket.server.requests[seen:]))
    lock.check()
    lock.release()
    assert bucket.names() == []


def test_a_lock_that_cannot_be_read_is_no_lost_lock(bucket, tmp_path):
    lock = open_lock(open_store(f"{bucket.url}/out"), NAME, tmp_path)
    lock.acquire()
    bucket.server.fail("slow", "GET|HEAD", "lock")
    with pytest.raises(StorageError, match=r"SLOW_DOWN|503"):
        lock.check()
    bucket.server.heal()
    lock.check()
    lock.release()


def test_of_two_that_take_it_at_once_one_goes_on(bucket, tmp_path, monkeypatch):
    store = open_store(f"{bucket.url}/out")
    first, second = (open_lock(store, NAME, tmp_path) for _ in range(2))
    another = replace(Holder.current(), hostname="elsewhere")
    put = first._put

    def slow_put(holder):
        with monkeypatch.context() as patch:
            patch.setattr(Holder, "current", lambda: another)
            second.acquire()
        put(holder)

    monkeypatch.setattr(first, "_put", slow_put)
    first.acquire()
    first.check()
    with pytest.raises(TemporaryError, match="has taken over"):
        second.check()
    second.release()
    first.check()
    first.release()


def test_two_processes_do_not_both_take_over_a_folder(tmp_path):
    """Of four that find the holder dead at once, one gets the lock; flock sees to it."""
    store = open_store(str(tmp_path))
    store.create([".specrun/shard-00000"])
    hold(store, tmp_path, pid=2**22 + 1)
    code = (
        "import sys; from pathlib import Path; from specrun.jobs.lock import open_lock;"
        "from specrun.jobs.store import open_store; from specrun.jobs.errors import TemporaryError;"
        f"lock = open_lock(open_store({str(tmp_path)!r}), {NAME!r}, Path({str(tmp_path)!r}));"
        "print('ready', flush=True); input()\n"
        "try: lock.acquire(); print('held', flush=True); input()\n"
        "except TemporaryError: print('refused', flush=True)"
    )
    command = [sys.executable, "-c", code]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes: Any = [subprocess.Popen(command, **pipes) for _ in range(4)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        answers = sorted(process.stdout.readline().strip() for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert answers == ["held", "refused", "refused", "refused"]
