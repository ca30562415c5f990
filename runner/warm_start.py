"""The suffix index across runs: filled before the first step with earlier answers, and kept for the next job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..jobs.answers import Answers, spilled_answers
from ..jobs.earlier_output import EarlierOutput, same_place
from ..jobs.errors import ConfigError, JobError
from ..jobs.folder import DATA, OutputFolder, WorkFolder
from ..jobs.saved_index import vocabulary_hash, write_saved_index
from ..jobs.shard import Shard
from ..jobs.spec import JobSpec
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter
    from ..engine.drafters.suffix import SuffixDrafter

Int32 = NDArray[np.int32]


@runtime_checkable
class EndingTokenizer(Protocol):
    """A tokenizer that knows with which token an answer ends."""

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token; None where there is none."""
        ...


@dataclass(slots=True)
class WarmStart:
    """What an index was filled with."""

    num_rows: int = 0
    num_tokens: int = 0
    num_encoded_tokens: int = 0
    """Those of them that were made of text."""
    seconds: float = 0.0


def warm_start(
    drafter: Drafter | None,
    spec: JobSpec,
    tokenizer: TextTokenizer,
    vocab_size: int,
    warn: Callable[[str], None],
    with_own: bool = True,
) -> WarmStart:
    """Fill the drafter's suffix index, if it has one, with the answers behind speculation.warm_from and then with those
    that this very job has finished in earlier attempts and other shards, so that these are forgotten last.

    vocab_size: the model's; an answer with an id past it is left out, since it could not be drafted from.
    with_own: False leaves out the job's own, as a bench must, which runs rows that may have been run before.
    Raises ConfigError, InputMissing or StorageError where warm_from is no location or cannot be reached. Whatever else
    is wrong with what lies there is a warning.
    """
    facts = WarmStart()
    suffix = suffix_drafter(drafter)
    if suffix is None or suffix.index is None:
        return facts
    began = perf_counter()
    ids = _TokenIds(tokenizer, vocab_size, facts)
    for answers in chain(_earlier(spec, ids, warn), _own(spec, warn) if with_own else ()):
        if rows := ids.rows(answers):
            starts = np.cumsum([0, *map(len, rows[:-1])])
            suffix.index.extend(np.concatenate(rows), starts)
            suffix.num_seeded_tokens += sum(map(len, rows))
    facts.seconds = perf_counter() - began
    return facts


def check_sources(spec: JobSpec) -> None:
    """Raises what warm_start() would say about the locations, before any weights are loaded; reads no file.

    ConfigError also where `overwrite` would remove what the job is to begin with.
    """
    speculation = spec.speculation
    sources = [("warm_from", location) for location in speculation.warm_from or ()]
    if speculation.synthetic is not None:
        sources.append(("synthetic.replay", speculation.synthetic.replay))
    for key, location in sources:
        if spec.output.if_exists == "overwrite" and same_place(location, spec.output.path):
            raise ConfigError(
                f"speculation.{key}: {location} is the job's own output.path, which if_exists: overwrite clears; "
                "choose another output.path"
            )
    if speculation.warm_from is not None:
        _ = EarlierOutput(speculation.warm_from).has_parts


def save_index(
    drafter: Drafter | None,
    folder: WorkFolder,
    shard: Shard,
    tokenizer: TextTokenizer,
    warn: Callable[[str], None],
) -> None:
    """Write what the drafter's suffix index holds to suffix_index/; what goes wrong is a warning."""
    suffix = suffix_drafter(drafter)
    if suffix is None or suffix.index is None:
        return
    try:
        suffix.facts()  # takes in the answers that finished since the last draft
        write_saved_index(folder, shard.index, *suffix.index.rows(), vocabulary_hash(tokenizer.token_bytes()))
    except Exception as exc:  # memory may be short, too; the rows are safe, and that is what counts
        reason = str(exc).partition(";")[0] or type(exc).__name__
        warn(f"speculation.save_index: the index is not saved, the rows are ({reason})")


def suffix_drafter(drafter: Drafter | None) -> SuffixDrafter | None:
    """The part of a drafter that has a suffix index."""
    from ..engine.drafters.hybrid import SuffixThenModel
    from ..engine.drafters.suffix import SuffixDrafter

    if isinstance(drafter, SuffixThenModel):
        drafter = drafter.first
    return drafter if isinstance(drafter, SuffixDrafter) else None


class _TokenIds:
    """Token ids of answers, as the model would have to write them."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, facts: WarmStart) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._facts = facts
        self._eos = tokenizer.eos_token_id if isinstance(tokenizer, EndingTokenizer) else None

    @cached_property
    def _token_bytes(self) -> Sequence[bytes]:
        return self._tokenizer.token_bytes()  # takes a while, and most jobs have nothing to begin with

    @property
    def vocabulary(self) -> str:
        """vocabulary_hash() of the tokenizer."""
        return vocabulary_hash(self._token_bytes)

    def rows(self, answers: Answers) -> list[Int32]:
        """One array for each answer that has tokens."""
        facts = self._facts
        rows = answers.token_ids if answers.token_ids is not None else self._encoded(answers)
        rows = [row for row in rows if len(row) and row.min() >= 0 and row.max() < self._vocab_size]
        if answers.token_ids is None:
            facts.num_encoded_tokens += sum(map(len, rows))
        facts.num_rows += len(rows)
        facts.num_tokens += sum(map(len, rows))
        return rows

    def _encoded(self, answers: Answers) -> list[Int32]:
        texts = [text or "" for text in answers.texts]
        # An answer goes on right after the prompt, without a beginning of its own.
        encoded: Sequence[list[int]] = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        ends = answers.ended.tolist() if self._eos is not None else [False] * len(texts)
        rows: list[Any] = [[*ids, self._eos] if end else ids for ids, end in zip(encoded, ends, strict=True)]
        return [np.array(row, dtype=np.int32) for row in rows if row]


def _earlier(spec: JobSpec, ids: _TokenIds, warn: Callable[[str], None]) -> Iterator[Answers]:
    """Answers of other jobs, the oldest first."""
    speculation = spec.speculation
    if speculation.warm_from is not None:
        earlier = EarlierOutput(speculation.warm_from, ids.vocabulary, exclude=spec.output.path, warn=warn)
        yield from earlier.batches(speculation.index_tokens)


def _own(spec: JobSpec, warn: Callable[[str], None]) -> Iterator[Answers]:
    """Answers of this job: earlier attempts and other shards."""
    output = OutputFolder(spec.output.path)
    try:
        if output.store.list(DATA):
            parts = EarlierOutput(output.location, same_tokenizer=True, warn=warn, key="output.path")
            yield from parts.batches(spec.speculation.index_tokens)
        yield from spilled_answers(output)
    except JobError as exc:
        warn(f"output.path: not all rows that are done can be drafted from: {exc}")
