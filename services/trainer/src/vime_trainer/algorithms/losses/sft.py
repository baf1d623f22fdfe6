"""Supervised fine-tuning: −log π of the tokens that the mask selects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vime_trainer.algorithms.checks import same_shape
from vime_trainer.algorithms.losses.batch import LossOutput
from vime_trainer.algorithms.masking import Mask
from vime_trainer.algorithms.metrics import as_sum
from vime_trainer.algorithms.reducers import Denominators, Reducer, sample_weights, weighted_sum


def sft_loss(
    logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    counts: Denominators,
    reducer: str | Reducer = "token_mean",
    fixed_length: int | None = None,
) -> LossOutput:
    """L = Σ_t w_t · (−log π_t); the micro-batch's share."""
    same_shape(logprobs_BT, loss_mask_BT=loss_mask_BT)
    mask = Mask(loss_mask_BT)
    weight_B = sample_weights(counts, reducer, fixed_length)
    loss = weighted_sum(-mask.zero(logprobs_BT), weight_B)
    return LossOutput(loss, {"loss": as_sum(loss)})


def message_mask(lengths: Sequence[int], trained: Sequence[bool]) -> Tensor:
    """Bool [T] of a conversation: message i has `lengths[i]` tokens and is trained when `trained[i]`.

    The template decides the pieces: an assistant's body is trained, its generation prefix and all other roles are
    not, and `trained=False` silences a single assistant message.
    """
    if len(lengths) != len(trained):
        raise ValueError(f"{len(lengths)} message lengths, {len(trained)} flags")
    return torch.repeat_interleave(torch.tensor(trained, dtype=torch.bool), torch.tensor(lengths, dtype=torch.int64))
