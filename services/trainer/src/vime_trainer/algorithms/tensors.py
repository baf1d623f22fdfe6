"""Padded [B, T] tensors: B samples, T response tokens, a mask that says which tokens are trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def last_unmasked(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Place of each row's last unmasked token, int64 [B], and whether there is one, bool [B]. Needs T ≥ 1."""
    # argmax of the reversed row finds the first of the equal maxima
    from_end_B = mask_BT.flip(-1).view(torch.uint8).argmax(-1)
    return mask_BT.shape[-1] - 1 - from_end_B, mask_BT.any(-1)


def pad_rows(**columns: Sequence[Tensor | Sequence[float]]) -> dict[str, Tensor]:
    """Ragged columns (one 1-D row per sample) to right-padded [B, T] tensors under the same names.

    Padding is 0, so a column that holds the mask also marks the padding as masked.
    Raises `ValueError` when two columns disagree on the number of samples or on a sample's length.
    """
    first, *others = columns
    lengths = [len(row) for row in columns[first]]
    for name in others:
        if len(columns[name]) != len(lengths):
            raise ValueError(f"{name} has {len(columns[name])} samples, {first} has {len(lengths)}")
        for sample, (row, length) in enumerate(zip(columns[name], lengths, strict=True)):
            if len(row) != length:
                raise ValueError(f"sample {sample}: {name} has {len(row)} tokens, {first} has {length}")
    return {name: _pad(rows, max(lengths, default=0)) for name, rows in columns.items()}


def _pad(rows: Sequence[Tensor | Sequence[float]], width: int) -> Tensor:
    tensors = [row if isinstance(row, Tensor) else torch.tensor(row) for row in rows]
    if not tensors:
        return torch.zeros(0, width)
    dtype = next((tensor.dtype for tensor in tensors if tensor.numel()), tensors[0].dtype)
    return torch.nn.utils.rnn.pad_sequence([tensor.to(dtype) for tensor in tensors], batch_first=True)
