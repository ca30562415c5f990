"""The recorded output that method synthetic replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..jobs.earlier_output import EarlierOutput
from ..jobs.errors import ConfigError, InputError
from ..jobs.speculation import SyntheticSpec

if TYPE_CHECKING:
    from ..engine.drafters.synthetic import SyntheticDrafter

KEY = "speculation.synthetic"
ALL_ROWS = range(2**63 - 1)


def synthetic_drafter(spec: SyntheticSpec, vocab_size: int, rows: range = ALL_ROWS) -> SyntheticDrafter:
    """The drafter that replays these rows. Raises as read_recording(), and ConfigError for rates that make no sense."""
    from ..engine.drafters.synthetic import AcceptanceRates, SyntheticDrafter

    options = spec.model_dump(include={"acceptance_rates", "groups", "over_time", "by_context"})
    try:
        rates = AcceptanceRates.parse(options)
    except ValueError as exc:
        raise ConfigError(f"{KEY}.{exc}") from None
    return SyntheticDrafter(read_recording(spec.replay, vocab_size, rows), rates, spec.seed, spec.confidence)


def read_recording(location: str, vocab_size: int, rows: range = ALL_ROWS) -> dict[int, NDArray[np.int32]]:
    """Row index -> token ids of its output, for those of `rows` that did not fail in the job that wrote `location`.

    Raises ConfigError where there is no output, none with token ids, or one of another vocabulary; InputError where a
    part cannot be read, since a replay with holes would measure something else; StorageError.
    """
    problems: list[str] = []
    source = EarlierOutput(location, same_tokenizer=True, warn=problems.append, key=f"{KEY}.replay")
    if not source.has_parts:
        raise ConfigError(f"{KEY}.replay: {location} holds no output; give output.path of a job that has run")
    recorded: dict[int, NDArray[np.int32]] = {}
    for answers in source.batches():
        if answers.token_ids is None:
            raise ConfigError(
                f"{KEY}.replay: {location} holds texts but no token ids; run that job with output.token_ids: true"
            )
        for row_index, token_ids in zip(answers.row_index.tolist(), answers.token_ids, strict=True):
            if row_index in rows:
                recorded[row_index] = token_ids
    if problems:
        raise InputError("\n".join(problems))
    if any(len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size for ids in recorded.values()):
        raise ConfigError(
            f"{KEY}.replay: {location} holds token ids outside the model's vocabulary of {vocab_size}; "
            "replay an output of the same model"
        )
    return recorded
