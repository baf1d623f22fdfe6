"""Whitening over the global batch: masked mean 0, unbiased variance 1.

A ← (A − μ) / √(var + ε)
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.ranks import LOCAL, Reduce

VARIANCE_EPS = 1e-8


def whiten(x_BT: Tensor, mask_BT: Tensor, reduce: Reduce = LOCAL) -> Tensor:
    """`x_BT` whitened over the unmasked tokens of all ranks, 0 at masked tokens.

    Two passes in float64 (a sum of squares minus a squared sum cancels); two calls of `reduce.sum`, which every rank
    must make. Fewer than two tokens, or all equal: 0.
    """
    x64_BT = x_BT.double().masked_fill(~mask_BT, 0.0)
    count, total = reduce.sum(torch.stack([mask_BT.sum().double(), x64_BT.sum()])).unbind()
    centred_BT = (x64_BT - total / count.clamp(min=1)).masked_fill(~mask_BT, 0.0)
    variance = reduce.sum(centred_BT.square().sum()) / (count - 1).clamp(min=1)
    return (centred_BT / torch.sqrt(variance + VARIANCE_EPS)).to(x_BT.dtype)
