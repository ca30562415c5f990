"""What a grammar is to the engine: which tokens may come next. Importable without torch and without any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a request knows of grammars, and whoever knows of requests need not load numpy
    import numpy as np
    from numpy.typing import NDArray


class GrammarError(Exception):
    """A grammar cannot go on; the engine ends its request, and only that one, with this text as the error."""


class Grammar(Protocol):
    """Where one request's output stands in its grammar. Advances with committed tokens; every other method leaves it
    as it is. Any method may raise GrammarError.

    At the end of the grammar only end-of-sequence ids are legal, and those are legal nowhere but where the output so
    far is complete. Used by one thread at a time.
    """

    def mask(self, drafts: Sequence[int]) -> NDArray[np.uint32]:
        """[ceil(V / 32)] bits, bit i % 32 of word i // 32 set where token i is legal after the output and `drafts`.

        `drafts` are legal themselves. No bit set is a dead end, and so is what comes after an end-of-sequence id.
        """
        ...

    def num_legal(self, drafts: Sequence[int]) -> int:
        """How many leading drafts are legal."""
        ...

    def forced(self, limit: int) -> list[int]:
        """The tokens that must come next, at most `limit`; [] where there is a choice. At the end of the grammar it may
        name one of several end-of-sequence ids: what is forced is verified like any draft."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a committed token, which must be legal."""
        ...
