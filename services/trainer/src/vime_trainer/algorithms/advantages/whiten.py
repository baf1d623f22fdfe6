"""Whitening over the global batch: masked mean 0, unbiased variance 1.

A ← (A − μ) / √(var + ε)
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.masking import Mask, row_blocks, row_sum
from vime_trainer.algorithms.ranks import LOCAL, Reduce

VARIANCE_EPS = 1e-8


def whiten(x_BT: Tensor, mask_BT: Tensor, reduce: Reduce = LOCAL) -> Tensor:
    """`x_BT` whitened over the unmasked tokens of all ranks, 0 at masked tokens.

    Deviations are taken from a first, rounded mean and corrected by their own (a sum of squares minus a squared sum
    would cancel); two calls of `reduce.sum`, which every rank must make. Fewer than two tokens, or all equal: 0.
    """
    blocks = [(rows, Mask(mask_BT[rows])) for rows in row_blocks(mask_BT)]
    tokens = torch.stack([mask.tokens_B.sum() for _, mask in blocks]).sum()
    total = torch.stack([mask.zero(x_BT[rows]).sum(-1).double().sum() for rows, mask in blocks]).sum()
    count, total = reduce.sum(torch.stack([tokens, total])).unbind()
    about = (total / count.clamp(min=1)).to(x_BT.dtype)

    def deviation(rows: slice, mask: Mask) -> Tensor:
        d_BT = x_BT[rows] - about
        return mask.zero(d_BT, out=d_BT)

    def moments(d_BT: Tensor) -> Tensor:
        return torch.stack([d_BT.sum(-1).double().sum(), row_sum(d_BT, d_BT).double().sum()])

    first, second = reduce.sum(torch.stack([moments(deviation(rows, mask)) for rows, mask in blocks]).sum(0)).unbind()
    rest = first / count.clamp(min=1)  # the mean is `about` + `rest`
    variance = ((second - first * rest) / (count - 1).clamp(min=1)).clamp(min=0)
    variance = torch.where(torch.isinf(variance), torch.nan, variance)  # by overflow; 1 / inf would make all of it 0
    shift, scale = rest.to(x_BT.dtype), torch.rsqrt(variance + VARIANCE_EPS).to(x_BT.dtype)
    whitened_BT = torch.empty(mask_BT.shape, dtype=x_BT.dtype, device=x_BT.device)
    for rows, mask in blocks:
        mask.zero(deviation(rows, mask).sub_(shift).mul_(scale), out=whitened_BT[rows])
    return whitened_BT
