"""Trajectories of a batch: one numbering for all data-parallel ranks, and the mini-batches that they are cut into."""

from collections.abc import Sequence

import torch

from vime_trainer.algorithms.index import Index, digest, global_index
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.engine.sample import Sample


def global_trajectories(samples: Sequence[Sample], reduce: Reduce, device: torch.device | None = None) -> Index:
    """Which samples fork from one trajectory, numbered alike on every rank: the one numbering that statistics,
    denominators and mini-batches go by. Every rank must call it."""
    return global_index([sample.trajectory for sample in samples], reduce, device)


def cut(
    samples: Sequence[Sample], trajectories: Index, mini_batches: int, seed: str, reduce: Reduce
) -> list[list[int]]:
    """Positions of this rank's samples in each of `mini_batches` mini-batches of the global batch.

    Trajectories with something to train are shuffled, by `seed` and their names alone, and dealt out in equal numbers
    (within one): the cut depends neither on the order of the groups nor on which rank holds them, and no trajectory is
    divided. With fewer trajectories than mini-batches, some are empty. Every rank must call it. Raises ValueError for
    fewer than one mini-batch.
    """
    if mini_batches < 1:
        raise ValueError(f"mini_batches = {mini_batches} must be at least 1")
    if mini_batches == 1:
        return [list(range(len(samples)))]
    rank_J = torch.full((trajectories.size,), -1, dtype=torch.int64, device=trajectories.ids_B.device)
    owners = trajectories.ids_B.tolist()
    for sample, j in zip(samples, owners, strict=True):
        if bool(sample.loss_mask.any()):
            rank_J[j] = digest((seed, sample.group_id, *sample.trajectory[1:]))
    rank_J = reduce.max(rank_J)
    trained = int((rank_J >= 0).sum())
    # Untrained trajectories stand first, with places below 0, and go with the first mini-batch.
    place_J = torch.argsort(torch.argsort(rank_J, stable=True)) - (trajectories.size - trained)
    part_J = (place_J.clamp(min=0) * mini_batches // max(trained, 1)).tolist()
    parts: list[list[int]] = [[] for _ in range(mini_batches)]
    for position, j in enumerate(owners):
        parts[part_J[j]].append(position)
    return parts
