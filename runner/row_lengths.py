"""How long the outputs of a job's rows are, as far as they have finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..engine.request import FinishReason, Request, RequestOutput

MIN_FINISHED = 16
"""Rows of a group that must have finished before its mean says anything: the first to finish are the short ones."""
SAMPLE_ROWS = 1024


class RowLengths:
    """Sums over the rows that were handed to the engine and over those that have finished, by group.

    One thread expects, another one adds; what a third reads may be a row behind.
    """

    def __init__(self) -> None:
        self._groups: dict[int, int] = {}
        self._finished: dict[int, tuple[int, int]] = {}  # group -> rows, output tokens
        self.num_expected = self.num_refused = 0
        self.num_prompt_tokens = 0
        """Of the rows expected."""
        self.max_output_tokens = 0
        """Of the rows expected, if none ended before its max_tokens."""
        self.num_finished = 0
        self.num_finished_tokens = 0
        """Output tokens of the rows that have finished."""
        self.num_at_limit = 0
        """Rows that have finished because they came to their limit; where others would have ended is not known."""
        self.sample: deque[int] = deque(maxlen=SAMPLE_ROWS)
        """Output tokens of each of the last rows that have finished."""

    def expect(self, requests: Sequence[Request], num_refused: int = 0) -> None:
        """These will run, and so many rows beside them failed before they came to the engine."""
        self.num_refused += num_refused
        self._groups.update([(request.request_id, request.group) for request in requests])
        self.num_expected += len(requests)
        self.num_prompt_tokens += sum([len(request.prompt_token_ids) for request in requests])
        self.max_output_tokens += sum([request.sampling_params.max_tokens for request in requests])

    def add(self, output: RequestOutput) -> None:
        """This one has finished."""
        group, num_tokens = self._groups.pop(output.request_id, 0), len(output.token_ids)
        rows, tokens = self._finished.get(group, (0, 0))
        self._finished[group] = rows + 1, tokens + num_tokens
        self.num_finished += 1
        self.num_finished_tokens += num_tokens
        self.num_at_limit += output.finish_reason is FinishReason.LENGTH
        self.sample.append(num_tokens)

    def mean_output_tokens(self, groups: NDArray[np.int64]) -> NDArray[np.float64]:
        """[N] mean output so far of each of N groups; infinite where too few of its rows have finished."""
        means = np.full(int(groups.max(initial=0)) + 1, np.inf)
        for group, (rows, tokens) in list(self._finished.items()):
            if rows >= MIN_FINISHED and group < len(means):
                means[group] = tokens / rows
        found: NDArray[np.float64] = means[groups]
        return found
