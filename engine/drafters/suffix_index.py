"""Finished outputs, searchable by the tokens that a text ends with.

A ring of tokens and one hash table. The table keeps, for n-grams of a few lengths (the anchors), the newest places of
the ring where something followed that n-gram. A lookup reads one bucket of places for each anchor and compares the
tokens before every place with the text's own. So a collision, or a place that has been overwritten since, is a
candidate that does not match, never a wrong answer. Everything is done for a whole batch of texts or rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...policies.base import Int32, Int64

UInt64 = NDArray[np.uint64]
Row = Sequence[int] | NDArray[np.integer]
"""Token ids."""

MAX_MATCH = 16
"""Longest match that is told apart from longer ones."""
MAX_CONTINUATION = 32
"""Most tokens that a lookup returns after a match."""
SEPARATOR = -1
"""After each row of the ring, and in continuations that have ended."""
NO_TOKEN = -2
"""In contexts that are shorter than a match; equals nothing in the ring."""
BLOCK = 1 << 18
"""Tokens that are inserted at a time, which bounds the temporary memory of loading an index."""
_ORDINAL = np.uint64(32)
_ONE = np.uint64(1)
_LOW = np.uint64((1 << 32) - 1)


class SuffixIndex:
    """The newest rows of a bounded number of tokens; the oldest are overwritten first. Numpy only.

    Costs about 4 bytes a token for the ring, and 8 to 16 a token and anchor for the table.
    """

    def __init__(self, capacity_tokens: int, anchors: Sequence[int] = (1, 2, 4, 8), ways: int = 4) -> None:
        """ways: places of a bucket, a power of two: the newest occurrences of an n-gram that are remembered.

        Raises ValueError.
        """
        anchors = tuple(anchors)
        if not anchors or anchors != tuple(sorted(set(anchors))) or not 1 <= anchors[0] <= anchors[-1] <= MAX_MATCH:
            raise ValueError(f"anchors must ascend, from 1 to {MAX_MATCH} at most, got {anchors}")
        if not MAX_MATCH <= capacity_tokens < 2**31 - 64:
            raise ValueError(f"capacity_tokens must be from {MAX_MATCH} to {2**31 - 65}, got {capacity_tokens}")
        if ways not in (1, 2, 4, 8, 16, 32, 64):
            raise ValueError(f"ways must be a power of two up to 64, got {ways}")
        self.capacity_tokens, self.anchors, self.ways = capacity_tokens, anchors, ways
        self.is_empty = True
        self._head = 0  # where the next row goes; there is a separator before it
        width = MAX_MATCH + 1 + MAX_CONTINUATION
        self._ring = np.full(capacity_tokens + width, SEPARATOR, dtype=np.int32)
        # Row i of the windows has the MAX_MATCH + 1 tokens before place i and MAX_CONTINUATION from it on; the ring is
        # padded on both sides, so every window is whole.
        self._tokens = self._ring[MAX_MATCH + 1 : MAX_MATCH + 1 + capacity_tokens]
        self._windows = np.lib.stride_tricks.as_strided(
            self._ring, (capacity_tokens, width), self._ring.strides * 2, writeable=False
        )
        bits = max(1, (2 * capacity_tokens // ways - 1).bit_length())
        self._places = np.zeros((1 << bits, ways), dtype=np.int32)  # 0 is empty: no n-gram is followed by position 0
        self._num_placed = np.zeros(1 << bits, dtype=np.uint8)  # modulo 256
        self._shift = np.uint64(64 - bits)
        # [longest anchor, A] odd numbers, 0 past an anchor; their product with an n-gram, newest first, is its hash.
        rng = np.random.default_rng(0x5EED)
        odd = rng.integers(1, 2**63, size=(anchors[-1], len(anchors)), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._multipliers = np.where(np.arange(anchors[-1])[:, None] < np.array(anchors), odd, np.uint64(0))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, which do not grow."""
        return self._ring.nbytes + self._places.nbytes + self._num_placed.nbytes

    @property
    def num_tokens(self) -> int:
        """Tokens in the ring; counts them."""
        return int(np.count_nonzero(self._tokens != SEPARATOR))

    @property
    def num_rows(self) -> int:
        """Rows in the ring, one of which may have lost its beginning; counts them."""
        return len(self.rows()[1])

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows of token ids, oldest first."""
        starts = np.zeros(len(rows), dtype=np.int64)
        np.cumsum([len(row) for row in rows[:-1]], out=starts[1:])
        self.extend(np.array([token for row in rows for token in row], dtype=np.int32), starts)

    def extend(self, tokens: Int32, row_starts: Int64) -> None:
        """Add M rows that lie end to end: tokens [N], row_starts [M] ascending from 0, oldest row first.

        Of a row that is longer than the ring the end is kept. Raises ValueError.
        """
        if not len(row_starts):
            if len(tokens):
                raise ValueError("tokens without a row")
            return
        lens = np.diff(row_starts, append=len(tokens))
        if row_starts[0] != 0 or (lens < 0).any() or (len(tokens) and int(tokens.min()) < 0):
            raise ValueError("row_starts must ascend from 0 to at most len(tokens), and token ids not be negative")
        if int(lens.max()) >= self.capacity_tokens:
            keep = np.repeat(np.cumsum(lens), lens) - np.arange(len(tokens)) < self.capacity_tokens
            tokens, lens = tokens[keep], np.minimum(lens, self.capacity_tokens - 1)
        lens = lens[lens > 0]
        ends = np.cumsum(lens)
        done = 0
        while done < len(lens):
            # As many rows as fit before the end of the ring, with separators; one that does not fit starts it anew.
            begin = int(ends[done - 1]) if done else 0
            sizes_end = ends[done:] - begin + np.arange(1, len(ends) - done + 1)
            room = self.capacity_tokens - self._head
            upto = done + int(np.searchsorted(sizes_end, min(room, BLOCK), side="right"))
            if upto == done and sizes_end[0] > room:
                self._overwrite(np.full(room, SEPARATOR, dtype=np.int32))
                self._head = 0
                continue
            upto = max(upto, done + 1)
            self._write(tokens[begin : int(ends[upto - 1])], lens[done:upto])
            done = upto

    def rows(self) -> tuple[Int32, Int64]:
        """All rows end to end and where each starts, oldest first, as `extend` takes them."""
        ring = np.concatenate([self._tokens[self._head :], self._tokens[: self._head]])
        is_token = ring != SEPARATOR
        starts = is_token.copy()
        starts[1:] &= ~is_token[:-1]
        return ring[is_token], np.flatnonzero(starts[is_token])

    def lookup(self, contexts: Int32) -> tuple[Int64, Int32]:
        """Where the last tokens of R texts occur.

        contexts: [R, MAX_MATCH + 1], newest last; the first column, and what a text does not have, is NO_TOKEN.
        Returns, for C candidates each, the number of tokens that match [R, C], at most MAX_MATCH and 0 for no
        candidate, and the place of the token after them [R, C]. No place is a candidate twice.
        """
        newest_first = contexts[:, : MAX_MATCH - len(self._multipliers) : -1].astype(np.uint64)
        newest_first += _ONE
        buckets = ((newest_first @ self._multipliers) >> self._shift).astype(np.int64)
        places = self._places[buckets].reshape(len(contexts), -1)
        places.sort(axis=1)  # a place may stand in the buckets of several anchors
        windows = self._windows[:, : MAX_MATCH + 2][places]
        differs = windows[:, :, MAX_MATCH::-1] != contexts[:, None, ::-1]
        match_lens = differs.argmax(axis=2)
        match_lens *= (match_lens >= self.anchors[0]) & (windows[:, :, -1] != SEPARATOR)
        match_lens[:, 1:] *= places[:, 1:] != places[:, :-1]
        return match_lens, places

    def continuations(self, places: NDArray[np.integer], num_next: int) -> Int32:
        """Tokens from each place on [..., num_next <= MAX_CONTINUATION]; where a row ends SEPARATOR, then anything."""
        after: Int32 = self._windows[:, MAX_MATCH + 1 : MAX_MATCH + 1 + num_next][places]
        return after

    def _write(self, tokens: Int32, lens: Int64) -> None:
        """Put rows that fit between the head and the end of the ring there, with their separators, and index them."""
        flat = np.full(len(tokens) + len(lens), SEPARATOR, dtype=np.int32)
        sizes = lens + 1
        ends = sizes.cumsum()
        num_before = np.arange(len(flat)) - (ends - sizes).repeat(sizes)  # tokens of the same row before each
        is_token = np.ones(len(flat), dtype=bool)
        is_token[ends - 1] = False
        flat[is_token] = tokens
        first = self._head
        self._overwrite(flat)
        longest = len(self._multipliers)
        values = np.zeros(longest + len(flat), dtype=np.uint64)
        values[longest:] = flat
        values += _ONE  # of two n-grams of zeros the longer must not have the same hash
        before = np.ndarray((len(flat), longest), np.uint64, values, offset=8 * (longest - 1), strides=(8, -8))
        buckets = (before @ self._multipliers) >> self._shift
        indexed = is_token[:, None] & (num_before[:, None] >= np.array(self.anchors))
        offsets = indexed.ravel().nonzero()[0]
        self._place(buckets.ravel()[offsets], (offsets // len(self.anchors) + first).astype(np.int32))
        self.is_empty = False

    def _place(self, buckets: UInt64, places: Int32) -> None:
        """Put each place into its bucket, over the oldest there."""
        # Sorting one word of bucket and ordinal is stable, and several times as fast as a stable argsort.
        numbers = np.arange(len(places))
        keys = (buckets << _ORDINAL) | numbers.astype(np.uint64)
        keys.sort()
        sorted_buckets, order = (keys >> _ORDINAL).astype(np.int64), (keys & _LOW).astype(np.int64)
        is_first = np.ones(len(places) + 1, dtype=bool)
        is_first[1:-1] = sorted_buckets[1:] != sorted_buckets[:-1]
        is_last = is_first[1:]
        rank = numbers - np.maximum.accumulate(numbers * is_first[:-1])
        rank += self._num_placed[sorted_buckets]
        # Of places for the same way the last, which is the newest, stays.
        self._places[sorted_buckets, rank % self.ways] = places[order]
        self._num_placed[sorted_buckets[is_last]] = (rank[is_last] + 1) & 255

    def _overwrite(self, flat: Int32) -> None:
        self._tokens[self._head : self._head + len(flat)] = flat
        self._head += len(flat)
