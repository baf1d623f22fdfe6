"""Dynamic sampling: groups that teach nothing are dropped and replaced, within a bound. DAPO (arXiv 2503.14476).

Pure decisions; who draws, generates and counts is the caller. They read the **raw** reward: a length-shaped reward
has spread even where every answer is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from vime_trainer.algorithms.checks import require


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """Settings of the filter and of the refill."""

    min_std: float = 0.0
    """Keep a group whose rewards differ and whose (unbiased) std is above this."""
    max_attempts: int = 10
    """How many waves of groups may be drawn for one batch, the first included."""
    when_exhausted: Literal["fail", "use_dropped"] = "fail"
    """After max_attempts: end with an error, or fill the batch with dropped groups, which then train with A = 0."""

    def __post_init__(self) -> None:
        require(self.min_std >= 0, self, "min_std", "must be >= 0")
        require(self.max_attempts >= 1, self, "max_attempts", "must be >= 1")
        require(self.when_exhausted in ("fail", "use_dropped"), self, "when_exhausted", "fail or use_dropped")


@dataclass(frozen=True)
class GroupDecision:
    """Keep or drop, with the reason that `dynamic_filter/drop_<reason>` counts; empty when kept."""

    keep: bool
    reason: str = ""


def decide_group(
    raw_rewards: Sequence[float | None],
    config: DynamicSamplingConfig,
    trajectory_ids: Sequence[Hashable] | None = None,
) -> GroupDecision:
    """Whether a group is worth training on. None and NaN are unscored. Samples that forked from one trajectory count
    once; `ValueError` when they disagree on the reward.
    """
    rewards = _per_trajectory(raw_rewards, trajectory_ids)
    if not rewards:
        return GroupDecision(False, "unscored")
    if len(rewards) == 1:
        return GroupDecision(False, "one_scored")
    if min(rewards) == max(rewards):
        return GroupDecision(False, f"zero_std_{rewards[0]:g}")
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return GroupDecision(True) if std > config.min_std else GroupDecision(False, "low_std")


def _per_trajectory(raw: Sequence[float | None], trajectory_ids: Sequence[Hashable] | None) -> list[float]:
    ids = range(len(raw)) if trajectory_ids is None else trajectory_ids
    if len(ids) != len(raw):
        raise ValueError(f"{len(raw)} rewards, {len(ids)} trajectory ids")
    found: dict[Hashable, float] = {}
    for name, reward in zip(ids, raw, strict=True):
        if reward is None or not math.isfinite(reward):
            continue
        if found.setdefault(name, float(reward)) != reward:
            raise ValueError(f"samples of trajectory {name!r} have rewards {found[name]:g} and {reward:g}")
    return list(found.values())


@dataclass(frozen=True)
class RefillDecision:
    """`done`: train on the first `groups_per_step` kept groups. `draw`: draw `groups` more. `use_dropped`: done when
    `groups` of the dropped ones are added. `fail`: give up with `reason`.
    """

    action: Literal["done", "draw", "use_dropped", "fail"]
    groups: int = 0
    reason: str = ""


def decide_refill(
    kept: int, dropped: int, attempts: int, groups_per_step: int, config: DynamicSamplingConfig
) -> RefillDecision:
    """What to do after `attempts` waves left `kept` groups and dropped `dropped`. A batch is exactly
    `groups_per_step` groups or an error with the counts; the refill ends after `max_attempts` waves, always.
    """
    missing = groups_per_step - kept
    if missing <= 0:
        return RefillDecision("done")
    if attempts < config.max_attempts:
        return RefillDecision("draw", missing)
    if config.when_exhausted == "use_dropped" and dropped >= missing:
        return RefillDecision("use_dropped", missing)
    reason = f"{kept} of {groups_per_step} groups kept, {dropped} dropped, after max_attempts={config.max_attempts}"
    return RefillDecision("fail", missing, reason)
