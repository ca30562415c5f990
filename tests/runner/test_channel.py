"""No thread is left waiting at a channel."""

import threading
import time

import pytest

from specrun.runner.channel import Channel, Closed


def test_order_bound_and_end():
    channel: Channel[int] = Channel(2)
    most = []

    def produce():
        for i in range(100):
            channel.put(i)
            most.append(i)
        channel.close()

    thread = threading.Thread(target=produce)
    thread.start()
    time.sleep(0.05)
    assert len(most) == 2
    assert [channel.get() for _ in range(100)] == list(range(100))
    with pytest.raises(Closed):
        channel.get()
    with pytest.raises(Closed):
        channel.put(1)
    thread.join()


def test_cancel_wakes_both_sides():
    full: Channel[int] = Channel(1)
    full.put(1)
    empty: Channel[int] = Channel(1)
    ended = []

    def wait(work):
        with pytest.raises(Closed):
            work()
        ended.append(work)

    threads = [threading.Thread(target=wait, args=(work,)) for work in (lambda: full.put(2), empty.get)]
    for thread in threads:
        thread.start()
    full.cancel()
    empty.cancel()
    for thread in threads:
        thread.join(5)
    assert len(ended) == 2
    with pytest.raises(Closed):
        full.get()


def test_get_in_time():
    with pytest.raises(TimeoutError):
        Channel[int](1).get(0.01)
