"""vLLM's dynamic speculative decoding: a table from batch size to draft length."""

from __future__ import annotations

from ...batch_threshold import BatchThreshold

EXAMPLE_TABLE = [[1, 64, 3], [65, 128, 1], [129, 512, 0]]
"""The table that vLLM's documentation shows; there is no default one."""


class VllmTable(BatchThreshold):
    """One look-up at each step, with neither hysteresis nor dwell.

    Source: vLLM 0.33, docs/features/speculative_decoding/dynamic_speculative_decoding.md and
    vllm/v1/spec_decode/dynamic/utils.py. Documented: both ends of a row are included, the first row starts at 1, gaps
    and all sizes past the last row carry on with the row before, lengths are cut to num_speculative_tokens, and the
    key is the number of requests scheduled in the step, prefills included. The drafter's prefill runs at length 0
    too, so it stays ready. Our reading: num_speculative_tokens is `StepState.max_draft_tokens`.

    table: rows [first, last, num_draft_tokens]. Raises ValueError naming the row that is wrong.
    """

    def __init__(self, table: list[list[int]] | None = None) -> None:
        super().__init__(table=EXAMPLE_TABLE if table is None else table, hysteresis=0.0, min_dwell=0)
