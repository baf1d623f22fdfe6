"""Demonstrations: supervised fine-tuning goes through the same step as reinforcement learning."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vime_trainer.engine.sample import Sample


@dataclass(frozen=True)
class Demonstration:
    """Token ids with the mask of those to learn, both 1-D of one length.

    Nothing precedes the first: it is not learnt.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor

    def as_sample(self, index: int, place: int) -> Sample:
        """The first token as prompt, the rest as response; no rollout, no routes. `place`: in the global batch."""
        if self.token_ids.shape != self.loss_mask.shape or self.token_ids.dim() != 1:
            shapes = tuple(self.token_ids.shape), tuple(self.loss_mask.shape)
            raise ValueError(f"demonstration {index}: token ids {shapes[0]}, loss mask {shapes[1]}")
        response = self.token_ids[1:]
        return Sample(
            prompt_token_ids=self.token_ids[:1],
            response_token_ids=response,
            rollout_logprobs=torch.zeros(response.numel()),
            loss_mask=self.loss_mask[1:].bool(),
            advantages=torch.ones(response.numel()),
            group_id=f"sft-{index}",
            sample_index=0,
            group_place=place,
        )


def as_samples(demonstrations: Sequence[Demonstration], rank: int = 0, ranks: int = 1) -> list[Sample]:
    """Samples in the order of the demonstrations, which are those of one of `ranks` ranks."""
    return [d.as_sample(i, i * ranks + rank) for i, d in enumerate(demonstrations)]
