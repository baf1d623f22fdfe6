"""Statistics of a group's rewards: float64, by group id, one value per trajectory, unscored samples left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vime_trainer.algorithms.index import Index, each_alone
from vime_trainer.algorithms.ranks import LOCAL, Reduce

STD_EPS = 1e-6


@dataclass(frozen=True)
class GroupStatistics:
    """What each sample sees of its group. All [B]; float64 unless said.

    `count_B`: scored trajectories. `mean_B`, `std_B`: of their rewards, std unbiased, 0 when undefined.
    `equal_B` (bool): all scored rewards identical (also when one or none is scored), found by comparison, because
    n equal rewards leave a std of 1e-16 that a division by std + 1e-6 would carry into the advantage.
    `scored_B` (bool): this sample has a reward.
    """

    reward_B: Tensor
    scored_B: Tensor
    count_B: Tensor
    mean_B: Tensor
    std_B: Tensor
    equal_B: Tensor

    @property
    def centred_B(self) -> Tensor:
        """R − mean(R), exactly 0 in a group of equal rewards and for unscored samples."""
        return (self.reward_B - self.mean_B).masked_fill(self.equal_B | ~self.scored_B, 0.0)


def group_statistics(
    rewards_B: Tensor, groups: Index, trajectories: Index | None = None, reduce: Reduce = LOCAL
) -> GroupStatistics:
    """Statistics over the global batch.

    `rewards_B`: NaN or infinite means unscored. `trajectories`: samples that forked from one trajectory carry its
    reward and count once; None means that no trajectory forked. Across ranks both indices must be global, so that a
    group may be split over ranks; only `reduce.max` is used.
    Raises `ValueError` when siblings disagree on the reward or the group.
    """
    if trajectories is None:
        if reduce is not LOCAL:
            raise ValueError("statistics over ranks need a global `trajectories` index")
        trajectories = each_alone(len(rewards_B), rewards_B.device)
    reward_B = rewards_B.double()
    scored_B = torch.isfinite(reward_B)
    reward_J = _one_value(reward_B.masked_fill(~scored_B, -torch.inf), trajectories, reduce, "rewards")
    group_J = _one_value(groups.ids_B.double(), trajectories, reduce, "groups")
    scored_J = torch.isfinite(reward_J)
    member_J = group_J.clamp(min=0).long()  # a trajectory without samples is unscored and weighs nothing

    def total_G(x_J: Tensor) -> Tensor:
        zeros_G = torch.zeros(groups.size, dtype=torch.float64, device=x_J.device)
        return zeros_G.index_add(0, member_J, x_J.masked_fill(~scored_J, 0.0))

    count_G = total_G(torch.ones_like(reward_J))
    mean_G = total_G(reward_J) / count_G.clamp(min=1)
    squares_G = total_G((reward_J - mean_G[member_J]) ** 2)
    high_G = _extreme(reward_J, member_J, groups.size)
    low_G = -_extreme((-reward_J).masked_fill(~scored_J, -torch.inf), member_J, groups.size)
    equal_G = (count_G <= 1) | (high_G == low_G)
    # A spread that overflows is not known: NaN makes the step one that is skipped, while a std of inf would make every
    # advantage 0.
    variance_G = squares_G.masked_fill(torch.isinf(squares_G), torch.nan).masked_fill(equal_G, 0.0)
    variance_G = variance_G / (count_G - 1).clamp(min=1)

    ids_B = groups.ids_B
    return GroupStatistics(
        reward_B.masked_fill(~scored_B, 0.0),
        scored_B,
        count_G[ids_B],
        mean_G[ids_B],
        variance_G.sqrt()[ids_B],
        equal_G[ids_B],
    )


def _extreme(x_J: Tensor, member_J: Tensor, size: int) -> Tensor:
    """Maximum of each member, −inf for one without entries."""
    start = torch.full((size,), -torch.inf, dtype=torch.float64, device=x_J.device)
    return start.scatter_reduce(0, member_J, x_J, "amax")


def _one_value(x_B: Tensor, trajectories: Index, reduce: Reduce, name: str) -> Tensor:
    """The one value that all scored siblings of each trajectory share, [J]; −inf where there is none."""
    high_J = reduce.max(_extreme(x_B, trajectories.ids_B, trajectories.size))
    absent_B = torch.isinf(x_B)
    low_J = -reduce.max(_extreme((-x_B).masked_fill(absent_B, -torch.inf), trajectories.ids_B, trajectories.size))
    torn = (high_J != low_J) & torch.isfinite(high_J)
    if bool(torn.any()):
        j = int(torn.nonzero()[0])
        raise ValueError(f"{name} of trajectory {j} disagree among its samples: {low_J[j]:g} and {high_J[j]:g}")
    return high_J
