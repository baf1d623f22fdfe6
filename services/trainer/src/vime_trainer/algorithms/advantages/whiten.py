"""Whitening over the global batch: masked mean 0, unbiased variance 1.

A ← (A − μ) / √(var + ε)
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.masking import Mask, row_blocks
from vime_trainer.algorithms.ranks import LOCAL, Reduce

VARIANCE_EPS = 1e-8


def whiten(x_BT: Tensor, mask_BT: Tensor, reduce: Reduce = LOCAL) -> Tensor:
    """`x_BT` whitened over the unmasked tokens of all ranks, 0 at masked tokens.

    Two passes in float64 (a sum of squares minus a squared sum cancels); two calls of `reduce.sum`, which every rank
    must make. Fewer than two tokens, or all equal: 0.
    """
    blocks = [(rows, Mask(mask_BT[rows])) for rows in row_blocks(mask_BT)]

    def centred(rows: slice, mask: Mask, mean: Tensor | float) -> Tensor:
        return mask.zero(x_BT[rows].double() - mean)

    total = torch.stack([centred(rows, mask, 0.0).sum() for rows, mask in blocks]).sum()
    tokens = torch.stack([mask.tokens_B.sum() for _, mask in blocks]).sum()
    count, total = reduce.sum(torch.stack([tokens, total])).unbind()
    mean = total / count.clamp(min=1)
    squares = torch.stack([centred(rows, mask, mean).square().sum() for rows, mask in blocks]).sum()
    scale = torch.rsqrt(reduce.sum(squares) / (count - 1).clamp(min=1) + VARIANCE_EPS)
    whitened_BT = torch.empty(mask_BT.shape, dtype=x_BT.dtype, device=x_BT.device)
    for rows, mask in blocks:
        whitened_BT[rows] = (centred(rows, mask, mean) * scale).to(x_BT.dtype)
    return whitened_BT
