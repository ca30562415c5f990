"""RMSNorm by torch's own operator, where a model's module computes the same bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight in one call instead of seven."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def swap_norms(model: nn.Module) -> None:
    """Replace every *RMSNorm whose output torch's operator reproduces bit for bit; families round differently."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight, eps = getattr(child, "weight", None), getattr(child, "variance_epsilon", None)
            if not type(child).__name__.endswith("RMSNorm") or weight is None or eps is None:
                continue
            swapped = RMSNorm(weight, eps)
            probe = torch.randn(4, *weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
            if torch.equal(child(probe), swapped(probe)):
                setattr(parent, name, swapped)
