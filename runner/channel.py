"""A bounded queue between two threads that can be closed by its producer and cancelled by anyone."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """Nothing more comes out of the channel, or nothing more goes in."""


class Channel(Generic[T]):
    """At most max_items items wait in it. It leaves no thread waiting for one that has died."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing more may be put."""
        return self._closed

    def put(self, item: T) -> None:
        """Add an item, waiting for room. Raises Closed once the channel is closed or cancelled."""
        with self._changed:
            while len(self._items) >= self._max_items and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout_s: float | None = None) -> T:
        """Take an item. Raises Closed after the last one of a closed channel, TimeoutError when none comes in time."""
        with self._changed:
            while not self._items and not self._closed:
                if not self._changed.wait(timeout_s):
                    raise TimeoutError
            if not self._items:
                raise Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """No more items are put; those inside are still taken out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Close it and throw away what is inside."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
