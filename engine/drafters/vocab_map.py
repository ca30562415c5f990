"""Between two vocabularies: a draft model reads and writes its own token ids, the engine those of the target.

Tokens with the same bytes are the same (token-level intersection, arXiv 2502.05202). The draft model's logits are laid
out over the target's ids before anything is sampled, so penalties, filters and noise are those of the target's ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...policies.base import Int64
from ..errors import ModelError

MIN_SHARE = 0.1
"""Smallest share of the smaller vocabulary that the two must have in common. Related byte-level vocabularies share 70 %
and more; below this, hardly a draft token could be right."""

Pairs = Iterable[tuple[int, int]]
"""(target id, draft id)"""


@dataclass(frozen=True, slots=True)
class SameVocab:
    """One vocabulary; the two models may have padded it differently."""

    draft_size: int

    def to_target(self, logits: Tensor, target_size: int) -> Tensor:
        """[L, draft_size] -> [L, target_size]"""
        missing = target_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=_never(logits)) if missing > 0 else logits[:, :target_size]

    def to_draft(self, token_ids: Int64) -> Int64:
        """[T] -> [T]; an id that the draft model has no embedding for becomes 0."""
        return np.where(token_ids < self.draft_size, token_ids, 0)


@dataclass(frozen=True, slots=True)
class VocabMap:
    """Two vocabularies and what they have in common."""

    target_ids: Int64
    """[M] target id of each common token."""
    draft_ids: Int64
    """[M] draft id of each common token."""
    fed_as: Int64
    """[V] what the draft model reads for each target id."""
    unk: int
    """What it reads for an id past those."""
    _on_device: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def between(
        cls,
        target_bytes: Sequence[bytes],
        draft_bytes: Sequence[bytes],
        unk: int,
        target_eos: Iterable[int] = (),
        draft_eos: Iterable[int] = (),
        specials: Pairs = (),
    ) -> VocabMap | None:
        """Match two tables token id -> bytes, b"" for special tokens; None when they are one vocabulary up to its end.

        End-of-sequence ids are matched from the highest down (the end of a turn has a higher id than the end of a
        text); `specials` are further pairs (target id, draft id), such as role markers of the same name. A target token
        that the draft model lacks is fed as its longest ending that is a draft token, or as draft id `unk`.
        Raises ModelError when the vocabularies share too little.
        """
        if all(target == draft for target, draft in zip(target_bytes, draft_bytes, strict=False)):
            return None
        by_bytes = _ids_by_bytes(draft_bytes)
        common = list(_common(_ids_by_bytes(target_bytes), by_bytes))
        _refuse_strangers(len(common), target_bytes, draft_bytes)
        ends = list(zip(sorted(target_eos, reverse=True), sorted(draft_eos, reverse=True), strict=False))
        fed_as = _fed_as(target_bytes, by_bytes, unk)
        pairs = np.array(list({**dict(common), **dict(specials), **dict(ends)}.items()), dtype=np.int64)
        fed_as[pairs[:, 0]] = pairs[:, 1]
        if ends:
            fed_as[sorted(set(target_eos) - {target for target, _ in ends})] = ends[-1][1]
        return cls(pairs[:, 0], pairs[:, 1], fed_as, unk)

    def to_target(self, logits: Tensor, target_size: int) -> Tensor:
        """[L, draft vocabulary] -> [L, target_size]; a token that the draft model lacks is never its choice."""
        target_ids, draft_ids = self._pairs(target_size, logits.shape[-1], logits.device)
        out = logits.new_full((logits.shape[0], target_size), _never(logits))
        return out.index_copy_(1, target_ids, logits.index_select(1, draft_ids))

    def to_draft(self, token_ids: Int64) -> Int64:
        """[T] target ids -> [T] draft ids."""
        known = token_ids < len(self.fed_as)
        return np.where(known, self.fed_as[np.where(known, token_ids, 0)], self.unk)

    def _pairs(self, target_size: int, draft_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Common ids that both models have rows for, kept on the device of the logits."""
        key = (target_size, draft_size, device)
        if key not in self._on_device:
            known = (self.target_ids < target_size) & (self.draft_ids < draft_size)
            pairs = np.stack([self.target_ids[known], self.draft_ids[known]])
            self._on_device[key] = tuple(torch.from_numpy(pairs).to(device))
        return self._on_device[key]


def _never(logits: Tensor) -> float:
    """Finite, so that a grammar that allows none of the draft model's tokens still leaves its own."""
    return torch.finfo(logits.dtype).min


def _ids_by_bytes(table: Sequence[bytes]) -> dict[bytes, list[int]]:
    ids: dict[bytes, list[int]] = {}
    for token, piece in enumerate(table):
        if piece:
            ids.setdefault(piece, []).append(token)
    return ids


def _common(target: dict[bytes, list[int]], draft: dict[bytes, list[int]]) -> Pairs:
    """Where several ids have the same bytes, from the last: a byte that stands for itself comes before the token that a
    tokenizer uses."""
    for piece, ids in target.items():
        yield from zip(reversed(ids), reversed(draft.get(piece, [])), strict=False)


def _refuse_strangers(num_common: int, target_bytes: Sequence[bytes], draft_bytes: Sequence[bytes]) -> None:
    smaller = min(sum(map(bool, target_bytes)), sum(map(bool, draft_bytes)))
    if num_common < MIN_SHARE * smaller or not num_common:
        raise ModelError(
            f"the vocabularies of the model and the draft model have only {num_common} tokens in common; choose a "
            "draft model with the model's own tokenizer or a related one, or speculation.method suffix or ngram"
        )


def _fed_as(target_bytes: Sequence[bytes], by_bytes: dict[bytes, list[int]], unk: int) -> Int64:
    """[V] for each target id the draft token with its bytes, else with the longest ending of them, else unk.

    With SmolLM2 as its own draft model and 28 % of the rarer tokens taken from it, endings gave 0.73-0.88 acceptance,
    beginnings 0.69-0.87 and unk 0.50: what comes next depends most on the bytes just before it.
    """
    fed_as = np.full(len(target_bytes), unk, dtype=np.int64)
    for token, piece in enumerate(target_bytes):
        for start in range(len(piece)):
            if ids := by_bytes.get(piece[start:]):
                fed_as[token] = ids[-1]
                break
    return fed_as
