"""Keyed Gumbel noise: a pure function of (request seed, position, token id), never of a generator's state.

argmax(logit / T + gumbel) is a sample of softmax(logit / T) (the Gumbel-max trick), so the same key gives the same
token in whatever batch, chunk or verification the row is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit words for the token at `position` of a request (splitmix64's finaliser over seed and position)."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return _signed(z & 0xFFFFFFFF), _signed(z >> 32)


def gumbel(keys: Sequence[tuple[int, int]], vocab_size: int, device: torch.device) -> Tensor:
    """[n, vocab_size] float64 standard Gumbel noise, one row for each key of `row_key`.

    The 32-bit hash is murmur3's finaliser applied twice, keyed by one word each time. float64, since float32 is too
    coarse for the tail that decides an argmax over a large vocabulary.
    """
    words = torch.tensor(keys, dtype=torch.int32, device=device).reshape(-1, 2, 1)
    hashed = torch.arange(vocab_size, dtype=torch.int32, device=device) ^ words[:, 0]
    _mix_(hashed)
    hashed ^= words[:, 1]
    _mix_(hashed)
    uniform = hashed.double().add_(2**31 + 0.5).mul_(2.0**-32)  # in (0, 1), both ends excluded
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix_(x: Tensor) -> None:
    """murmur3's 32-bit finaliser in place; int32 products wrap, and masks turn arithmetic shifts into logical ones."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x85EBCA6B)
    x ^= (x >> 13) & 0x7FFFF
    x *= _signed(0xC2B2AE35)
    x ^= (x >> 16) & 0xFFFF


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
