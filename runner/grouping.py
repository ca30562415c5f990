"""Which rows are alike, as small numbers on the requests, for policies that learn by group.

The job's own column knows best. Without one, rows are alike that come from like files and whose prompts begin with the
same template. Both are guesses that cost little when they are wrong: a policy shrinks a group to the whole, and no
output depends on the group of its row.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ..engine.request import Request
from ..jobs.input_files import InputFile
from .ordering import WIDTH, prompt_key

MAX_GROUPS = 64
"""Groups that are told apart; what comes after them is spread over them. Policies keep as many."""
MAX_FILE_KINDS = 16
"""Where an input has more, its files are pieces of one thing rather than things of their own."""
MAX_TEMPLATES = 63
MAX_TEMPLATE_TOKENS = 2048
MIN_TEMPLATE_TOKENS = 4
"""Tokens of a template, and tokens by which one must go on behind another: texts that all begin with "The" are no
template of their own."""
MIN_ROWS = 16
MIN_SHARE = 32
"""A template is what begins at least so many rows of a batch, and one in so many of them."""
NO_TEMPLATE = -1

_NUMBERS = re.compile(r"[0-9a-f]*\d[0-9a-f]*")
"""Digits, and hexadecimal hashes, in a file's path."""


class RequestGroups:
    """Gives requests their group, 0 to MAX_GROUPS - 1, in order of first appearance. Bounded memory."""

    def __init__(self, files: Sequence[InputFile] = (), has_column: bool = False) -> None:
        """files: those of the input, in the order in which rows are counted. has_column: the input says itself which
        rows belong together, and nothing else counts."""
        self._has_column = has_column
        self._starts, self._kinds = _file_kinds(files)
        self._templates = PromptTemplates()
        self._numbers: dict[Hashable, int] = {}

    def assign(self, requests: Sequence[Request], values: Mapping[int, Any]) -> None:
        """Set the group of each request. values: request_id -> the value of input.columns.group; not looked at where
        there is no such column."""
        if self._has_column:
            for request in requests:
                request.group = self._number(_digest(values.get(request.request_id)))
            return
        templates = self._templates.find([request.prompt_token_ids for request in requests])
        for request, template in zip(requests, templates, strict=True):
            kind = self._kinds[max(0, bisect_right(self._starts, request.request_id) - 1)]
            request.group = self._number((kind, template))

    def _number(self, key: Hashable) -> int:
        found = self._numbers.get(key)
        if found is None:
            if len(self._numbers) == MAX_GROUPS:
                return crc32(repr(key).encode()) % MAX_GROUPS
            found = self._numbers[key] = len(self._numbers)
        return found


class PromptTemplates:
    """Finds the beginnings that many prompts of a batch share, and knows them again in later ones.

    The template of a prompt is the longest known beginning of it. A text that stands before its instruction hides it:
    for such prompts, name a column.
    """

    def __init__(self) -> None:
        self._known: list[tuple[bytes, int]] = []  # and their numbers, the longest first

    def find(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Number of each prompt's template, from 0; NO_TEMPLATE for a prompt without."""
        keys = [prompt_key(prompt[:MAX_TEMPLATE_TOKENS]) for prompt in prompts]
        self._learn(sorted(keys))
        return [self._template(key) for key in keys]

    def _template(self, key: bytes) -> int:
        for start, number in self._known:
            if key.startswith(start):
                return number
        return NO_TEMPLATE

    def _learn(self, keys: Sequence[bytes]) -> None:
        """Take up the templates of these keys, which are sorted."""
        num_rows = max(MIN_ROWS, len(keys) // MIN_SHARE)
        if len(keys) < num_rows or len(self._known) == MAX_TEMPLATES:
            return
        depths = shared_tokens(keys, num_rows).tolist()
        found = {key[: depth * WIDTH] for key, depth in zip(keys, depths, strict=True)}
        for start in sorted(found, key=len):
            before = next((known for known, _ in self._known if start.startswith(known)), b"")
            if len(start) - len(before) < MIN_TEMPLATE_TOKENS * WIDTH or len(self._known) == MAX_TEMPLATES:
                continue
            self._known.append((start, len(self._known)))
            self._known.sort(key=lambda known: -len(known[0]))


def shared_tokens(keys: Sequence[bytes], num_rows: int) -> NDArray[np.int64]:
    """[len(keys)] tokens of the longest beginning that each key shares with num_rows - 1 others.

    keys: prompt_key() of prompts, sorted, at least num_rows > 1 of them.
    """
    common = np.array([_common_tokens(a, b) for a, b in pairwise(keys)], dtype=np.int64)
    # Sorted, those that share a beginning are neighbours: the best run of num_rows that holds a key tells.
    runs = sliding_window_view(common, num_rows - 1).min(axis=1)
    padded = np.pad(runs, num_rows - 1)
    best: NDArray[np.int64] = sliding_window_view(padded, num_rows).max(axis=1)
    return best


def _common_tokens(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // WIDTH


def _file_kinds(files: Sequence[InputFile]) -> tuple[list[int], list[int]]:
    """The first row of each file, and a number that files share whose paths differ in numbers and hashes alone."""
    starts, kinds, first = [], [], 0
    numbers: dict[str, int] = {}
    for file in files:
        starts.append(first)
        kinds.append(numbers.setdefault(_NUMBERS.sub("#", file.path.lower()), len(numbers)))
        first += file.num_rows or 0
    return (starts, kinds) if 0 < len(numbers) <= MAX_FILE_KINDS else ([0], [0])


def _digest(value: Any) -> int:
    """A value's own number; two values share one in 4 billion cases, which harms nothing."""
    return crc32((value if isinstance(value, str) else repr(value)).encode("utf-8", "replace"))
