"""From the speculation section of a job to the drafter that its engine gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine.checkpoint import Checkpoint
from ..engine.config import EngineConfig
from ..engine.errors import ModelError
from ..jobs.errors import ConfigError
from ..jobs.spec import JobSpec
from ..jobs.speculation import DRAFT_MODEL_METHODS, SpeculationSpec
from .replay_source import synthetic_drafter
from .tokenizer import TextTokenizer, Tokenizer
from .warm_start import warm_start

if TYPE_CHECKING:
    from ..engine.drafters.base import Drafter
    from ..engine.drafters.vocab_map import VocabMap
    from ..engine.target import Target

AUTO = {
    False: ("suffix", "no draft model is given; rows draft from their siblings"),
    True: ("suffix+draft_model", "a draft model is given; it drafts where a row finds nothing among its siblings"),
}
"""Whether there is a draft model -> the method that auto stands for, and why."""
SURE = 0.5
"""Beside a draft model the index speaks only where its next token is more likely right than wrong."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How drafts are made."""

    method: str
    """Any value of speculation.method but auto."""
    reason: str | None = None
    """Why auto chose it; None where the job names it."""

    @property
    def has_draft_model(self) -> bool:
        """Whether speculation.model is run."""
        return self.method in DRAFT_MODEL_METHODS


def choose_method(speculation: SpeculationSpec) -> Choice:
    """The method that a job names, or what auto makes of what is given."""
    if speculation.method != "auto":
        return Choice(speculation.method)
    method, why = AUTO[speculation.model is not None]
    return Choice(method, f"{method}: {why}")


@contextmanager
def about_draft_model() -> Iterator[None]:
    """Has errors about a checkpoint name the draft model's keys."""
    try:
        yield
    except ModelError as exc:
        text = str(exc).replace("model.path", "speculation.model").replace("model.revision", "speculation.revision")
        raise ModelError(text) from exc


class DrafterLoader:
    """Makes drafters for one target, each with nothing learned in another; a draft model's weights are read once."""

    def __init__(
        self,
        spec: JobSpec,
        config: EngineConfig,
        target: Target,
        tokenizer: TextTokenizer,
        draft_checkpoint: Callable[[], Checkpoint],
        warn: Callable[[str], None],
        with_own: bool = True,
    ) -> None:
        """draft_checkpoint: finds the files of speculation.model; called only where a drafter needs them. with_own:
        whether a suffix index may begin with what this very job has written."""
        self._spec, self._config, self._target, self._tokenizer = spec, config, target, tokenizer
        self._draft_checkpoint = draft_checkpoint
        self._warn, self._with_own = warn, with_own
        self._model: Target | None = None
        self._vocab_map: VocabMap | None = None

    def make(self, method: str | None = None) -> Drafter | None:
        """The drafter of a method, by default the job's, its suffix index filled as the job says; None for `none`.

        Raises ModelError for a draft model that does not load; ConfigError, InputError or StorageError for earlier
        outputs that cannot be used.
        """
        drafter = self._make(method or choose_method(self._spec.speculation).method)
        warm_start(drafter, self._spec, self._tokenizer, self._target.vocab_size, self._warn, self._with_own)
        return drafter

    def release(self) -> None:
        """Give back the KV cache of the draft model's last drafter, which is of no use after this."""
        if self._model is not None:
            self._model.allocate(0)

    def _make(self, method: str) -> Drafter | None:
        if method == "ngram":
            from ..engine.drafters.ngram import NgramDrafter

            return NgramDrafter()
        if method == "suffix":
            return self._suffix()
        if method == "suffix+draft_model":
            from ..engine.drafters.hybrid import SuffixThenModel

            return SuffixThenModel(self._suffix(min_survival=SURE), self._draft_model())
        if method == "draft_model":
            return self._draft_model()
        if method == "synthetic":
            synthetic = self._spec.speculation.synthetic
            assert synthetic is not None  # the job's validation sees to it
            if not self._config.deterministic and self._config.dtype != "float64":
                self._warn(
                    "speculation.method: synthetic without engine.deterministic: true; a row gets no more drafts "
                    "once rounding has made it differ from the recording"
                )
            return synthetic_drafter(synthetic, self._target.vocab_size)
        return None

    def _suffix(self, **options: float) -> Drafter:
        from ..engine.drafters.suffix import SuffixDrafter

        num_tokens = self._spec.speculation.index_tokens
        try:
            return SuffixDrafter(num_tokens, **options)
        except MemoryError:
            raise ConfigError(f"speculation.index_tokens: no memory for {num_tokens:,} tokens; lower it") from None

    def _draft_model(self) -> Drafter:
        from ..engine.drafters.draft_model import DraftModelDrafter

        if self._model is None:
            with about_draft_model():
                checkpoint = self._draft_checkpoint()
                tokenizer = Tokenizer.from_checkpoint(checkpoint, self._config.trust_remote_code)
                self._model = DraftModelDrafter.load(checkpoint, self._config, self._target).model
            self._vocab_map = vocab_map(self._target, self._tokenizer, self._model, tokenizer)
        limit = self._config.max_num_batched_tokens
        return DraftModelDrafter(self._model, self._target, self._vocab_map, max_catch_up_tokens=limit)


def vocab_map(
    target: Target, tokenizer: TextTokenizer, model: Target, draft_tokenizer: TextTokenizer
) -> VocabMap | None:
    """Between the token ids of a target and a draft model; None where they are the same. ModelError for strangers."""
    from ..engine.drafters.vocab_map import VocabMap

    names, draft_names = (getattr(t, "special_token_ids", {}) for t in (tokenizer, draft_tokenizer))
    unk = getattr(draft_tokenizer, "unk_token_id", None)
    return VocabMap.between(
        tokenizer.token_bytes(),
        draft_tokenizer.token_bytes(),
        unk if unk is not None else min(model.eos_token_ids, default=0),
        target.eos_token_ids,
        model.eos_token_ids,
        [(names[name], draft_names[name]) for name in names.keys() & draft_names.keys()],
    )
