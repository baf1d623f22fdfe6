"""Which metrics people are shown, under the names that the trainer gives them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

REWARD = "rollout/raw_reward"
PARTS = "rollout/reward/"
"""Before the name of a part of the reward."""
UNSCORED = "rollout/unscored"
SAMPLES = "rollout/samples"
LOSS = "train/loss"
DIFF = "train/train_rollout_logprob_abs_diff"
SPLIT = (
    ("wait", "perf/train_wait_time"),
    ("logprobs", "perf/log_probs_time"),
    ("train", "perf/actor_train_time"),
    ("publish", "perf/update_weights_time"),
    ("other", "perf/other_time"),
)
"""Parts of a step's time."""
LEARNING = (
    ("loss", LOSS),
    ("critic loss", "train/critic-loss"),
    ("entropy", "train/entropy_loss"),
    ("gradient norm", "train/grad_norm"),
    ("KL to the old policy", "train/ppo_kl"),
    ("KL to the reference", "train/kl_loss"),
    ("clip fraction", "train/pg_clipfrac"),
)
"""What tells how the training itself goes."""


def is_supervised(names: Collection[str]) -> bool:
    """True if the metrics of a step are those of learning from demonstrations: a loss, but neither a policy's nor a
    critic's. Their samples were written, not sampled: the rewards say nothing about the model."""
    return LOSS in names and not {"train/pg_loss", "train/opd_reverse_kl", DIFF, "train/critic-loss"} & set(names)


def parts_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Means of the parts of the reward, by their names."""
    return {name.removeprefix(PARTS): value for name, value in metrics.items() if name.startswith(PARTS)}
