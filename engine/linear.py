"""Linear layers for CPU: merged, packed once for oneDNN, and with rows that do not depend on the row count.

Packing is what torch's own compiler does to a frozen linear layer; it is faster than F.linear at the row counts of
decoding (examples/benchmarks). The operators are private to torch, so a layer that cannot be packed stays as it is.
Packed rows still change with the row count (oneDNN picks another kernel), hence the tiles of deterministic mode.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACK_HINT = 16
"""Row count that oneDNN is told to lay the weights out for; good for every row count measured, where 1 is not."""
TILE = 16
"""Rows of a tile in deterministic mode."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that transformers' models feed with the same tensor, in the order of their calls."""


class PackedLinear(nn.Module):
    """y = x W^T + b on weights in oneDNN's own layout. float32 or bfloat16, CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACK_HINT)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class TiledLinear(nn.Module):
    """A linear layer run in tiles of a fixed number of rows, so that a row's result never depends on the others."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows = x.reshape(-1, x.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -rows.shape[0] % TILE))
        tiles = [self.linear(tile) for tile in torch.split(padded, TILE)]
        out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return out[: rows.shape[0]].reshape(*x.shape[:-1], -1)


class MergedLinear(nn.Module):
    """One product for sibling layers: the first one called with a tensor computes, the others return their slice."""

    def __init__(self, linear: nn.Module, widths: list[int]) -> None:
        super().__init__()
        self.linear = linear
        self.widths = widths
        self._input: Tensor | None = None
        self._slices: tuple[Tensor, ...] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        """The output of sibling `index` for x; the last one lets go of the tensors."""
        if x is not self._input:
            self._input, self._slices = x, torch.split(self.linear(x), self.widths, dim=-1)
        out = self._slices[index]
        if index == len(self.widths) - 1:
            self._input, self._slices = None, ()
        return out


class LinearPart(nn.Module):
    """Stands where a sibling stood."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged = merged
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return self.merged.part(self.index, x)


def swap_linears(model: nn.Module, deterministic: bool) -> None:
    """Replace the nn.Linear layers of a CPU model by merged, packed and (if deterministic) tiled ones.

    A packed layer is checked against the original on random rows and left alone when it does not agree.
    """
    for parent in list(model.modules()):
        for names in SIBLINGS:
            siblings = [getattr(parent, name, None) for name in names]
            if all(type(s) is nn.Linear and (s.bias is None) == (siblings[0].bias is None) for s in siblings):  # type: ignore[union-attr]
                widths = [s.out_features for s in siblings]  # type: ignore[union-attr]
                merged = MergedLinear(_swapped(_concatenated(siblings), deterministic), widths)  # type: ignore[arg-type]
                for index, name in enumerate(names):
                    setattr(parent, name, LinearPart(merged, index))
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _swapped(child, deterministic))


def _concatenated(linears: list[nn.Linear]) -> nn.Linear:
    whole = nn.Linear(1, 1, bias=False)
    whole.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return whole


def _swapped(linear: nn.Linear, deterministic: bool) -> nn.Module:
    packed = _packed_if_equal(linear)
    return TiledLinear(packed) if deterministic else packed


def _packed_if_equal(linear: nn.Linear) -> nn.Module:
    weight = linear.weight
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return linear
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return linear
    try:
        packed = PackedLinear(linear)
        probe = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        want, got = linear(probe).float(), packed(probe).float()
    except (RuntimeError, AttributeError, NotImplementedError):
        return linear
    tolerance = (1e-4 if weight.dtype is torch.float32 else 2e-2) * float(want.abs().max())
    return packed if torch.allclose(want, got, rtol=0, atol=tolerance) else linear
