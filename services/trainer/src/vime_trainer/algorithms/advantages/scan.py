"""Discounted sums along time without a loop over tokens, and without the masked tokens in between.

    y_t = Σ_{j≥t} f^(j−t) x_j

Cut time into chunks of 32: one product with the triangular matrix f^(j−t) does every chunk at once; what a chunk
takes over from all later ones is the same sum over chunk totals with factor f^32, done by recursion.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_trainer.algorithms.masking import Mask

CHUNK = 32


def suffix_sum(x_BT: Tensor, factor: float) -> Tensor:
    """y_t = Σ_{j≥t} factor^(j−t) x_j along the last dimension; `factor` in [0, 1]."""
    samples, steps = x_BT.shape
    if steps <= CHUNK:
        return x_BT @ _powers(steps, factor, x_BT)
    chunks = -(-steps // CHUNK)
    padded_BCK = torch.nn.functional.pad(x_BT, (0, chunks * CHUNK - steps)).view(samples, chunks, CHUNK)
    within_BCK = padded_BCK @ _powers(CHUNK, factor, x_BT)
    later_BC = suffix_sum(within_BCK[:, :, 0], factor**CHUNK)
    carry_BC = torch.nn.functional.pad(later_BC[:, 1:], (0, 1))
    distance_K = torch.arange(CHUNK, 0, -1, dtype=x_BT.dtype, device=x_BT.device)
    reach_K = torch.tensor(factor, dtype=x_BT.dtype, device=x_BT.device) ** distance_K
    return (within_BCK + carry_BC[:, :, None] * reach_K).view(samples, -1)[:, :steps]


def _powers(steps: int, factor: float, like: Tensor) -> Tensor:
    """M[j, t] = factor^(j−t) for j ≥ t, else 0."""
    place_K = torch.arange(steps, dtype=like.dtype, device=like.device)
    gap_JK = place_K[:, None] - place_K[None, :]
    base = torch.tensor(factor, dtype=like.dtype, device=like.device)
    return torch.where(gap_JK >= 0, base ** gap_JK.clamp(min=0), 0.0)


class Packing:
    """Moves each row's unmasked tokens to the front, in order, and back."""

    def __init__(self, mask_BT: Tensor) -> None:
        self._mask = Mask(mask_BT)
        self._places_BT: Tensor | None = None
        if bool((mask_BT[:, 1:] > mask_BT[:, :-1]).any()):  # no gap before a trained token: they are in front already
            # masked tokens all go to one spare column at the end
            self._places_BT = torch.where(mask_BT, mask_BT.cumsum(-1) - 1, mask_BT.shape[-1])

    def pack(self, x_BT: Tensor) -> Tensor:
        """Unmasked tokens first, zeros after; [B, T], not an alias of `x_BT`."""
        if self._places_BT is None:
            return self._mask.zero(x_BT)
        samples, steps = x_BT.shape
        room_BT = torch.zeros(samples, steps + 1, dtype=x_BT.dtype, device=x_BT.device)
        return room_BT.scatter_(-1, self._places_BT, x_BT)[:, :steps]

    def unpack(self, packed_BT: Tensor) -> Tensor:
        """The inverse of `pack`; 0 at masked tokens."""
        if self._places_BT is not None:
            packed_BT = packed_BT.gather(-1, self._places_BT.clamp(max=packed_BT.shape[-1] - 1))
        return self._mask.zero(packed_BT)
