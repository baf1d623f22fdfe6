"""What one step shows: rewards, lengths, and the mismatch between engine and trainer, reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vime.common.v1 import trajectory_pb2
from vime_trainer.algorithms.metrics import Metric, Metrics, pack, unpack, values
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.engine.sample import Sample
from vime_trainer.rank.groups import Share


def _mean(xs: Sequence[float]) -> Metric:
    return Metric(torch.tensor(sum(xs), dtype=torch.float64), torch.tensor(float(len(xs)), dtype=torch.float64))


def _count(n: float) -> Metric:
    return Metric(torch.tensor(float(n), dtype=torch.float64))


def reduced(metrics: Metrics, reduce: Reduce) -> dict[str, float]:
    """Values over all ranks; every rank must hold the same names. Means over nothing are left out."""
    total = values(unpack(reduce.sum(pack(metrics)), metrics))
    return {name: value for name, value in total.items() if value is not None}


def rollout_measures(share: Share, reduce: Reduce) -> dict[str, float]:
    """Of the batch as it came: rewards, lengths, truncation, failures."""
    samples = share.all_protos
    lengths = [float(len(s.response_token_ids)) for s in samples]
    truncated = [float(s.status == trajectory_pb2.SAMPLE_STATUS_TRUNCATED) for s in samples]
    rewards: dict[int, list[float]] = {}
    for place, reward in zip(share.places, share.rewards, strict=True):
        rewards.setdefault(place, []).append(reward)
    mixed = [float(len(set(group)) > 1) for group in rewards.values()]
    sums: Metrics = {
        "rollout/raw_reward": _mean(share.rewards),
        "rollout/response_len/mean": _mean(lengths),
        "rollout/total_lengths": _mean([len(s.prompt_token_ids) + len(s.response_token_ids) for s in samples]),
        "rollout/truncated_ratio": _mean(truncated),
        "rollout/mixed_groups": _mean(mixed),
        "rollout/zero_std/count": _count(len(mixed) - sum(mixed)),
        "rollout/samples": _count(len(samples)),
        "rollout/unscored": _count(sum(not s.HasField("reward") for s in samples)),
        "rollout/left_out": _count(len(share.left_out)),
        "rollout/response_tokens": _count(sum(lengths)),
        "rollout/cached_tokens": _mean([float(s.cached_tokens) for s in samples]),
        "rollout/reward_time": _mean([s.reward_time.seconds + s.reward_time.nanos / 1e9 for s in samples]),
    }
    extremes = reduce.max(torch.tensor([max(lengths, default=0.0), -min(lengths, default=float("inf"))]))
    return reduced(sums, reduce) | {
        "rollout/response_len/max": float(extremes[0]),
        "rollout/response_len/min": -float(extremes[1]),
    }


def mismatch_measures(
    samples: Sequence[Sample],
    logprobs: Sequence[torch.Tensor],
    policy_step: int,
    suffix: str,
    reduce: Reduce,
) -> dict[str, float]:
    """How far the trainer's logprobs are from the engine's.

    `train_rollout_logprob_abs_diff` is the mean of per-sample means. `_on_policy`: samples of one version, the one
    that scores them: the engine mismatch proper. `_stale`: of one older version; `_mixed`: of several. `mismatch_kl`
    is the k3 estimate of KL(q ‖ π) over the on-policy tokens: exp(δ) - 1 - δ, δ = log π - log q (Schulman 2020).
    """
    kinds: dict[str, list[float]] = {"": [], "_on_policy": [], "_stale": [], "_mixed": []}
    kl_total, kl_tokens = 0.0, 0
    for sample, scored in zip(samples, logprobs, strict=True):
        mask = sample.loss_mask
        if not bool(mask.any()):
            continue
        delta = (scored.double() - sample.rollout_logprobs.double())[mask]
        gap = float(delta.abs().mean())
        versions = set(sample.weight_versions)
        kind = "_mixed" if len(versions) > 1 else "_on_policy" if versions == {policy_step} else "_stale"
        kinds[""].append(gap)
        kinds[kind].append(gap)
        if kind == "_on_policy":
            kl_total += float((delta.exp() - 1 - delta).sum())
            kl_tokens += delta.numel()
    metrics: Metrics = {
        f"train/train_rollout_logprob_abs_diff{kind}{suffix}": _mean(gaps) for kind, gaps in kinds.items()
    }
    metrics[f"train/mismatch_kl{suffix}"] = Metric(
        torch.tensor(kl_total, dtype=torch.float64), torch.tensor(float(kl_tokens), dtype=torch.float64)
    )
    return reduced(metrics, reduce)


def shaping_measures(raw: Sequence[float], shaped: torch.Tensor, reduce: Reduce) -> dict[str, float]:
    """`rollout/rewards`: what the statistics were taken of; `rollout/overlong_penalty`: what was added to them."""
    added = shaped - torch.tensor(raw, dtype=torch.float64)
    return reduced(
        {"rollout/rewards": _mean(shaped.tolist()), "rollout/overlong_penalty": _mean(added.tolist())}, reduce
    )


def value_measures(samples: Sequence[Sample], reduce: Reduce) -> dict[str, float]:
    """The critic before its update, over the unmasked tokens of the batch.

    `rollout/values` and `rollout/returns` are means of per-sample means. `train/critic-explained_variance` is
    1 - Var(G - V) / Var(G): 1 where values foretell the returns, 0 where they say no more than the mean; left out
    where the returns do not vary.
    """
    values, returns, sums = [], [], torch.zeros(5, dtype=torch.float64)
    for sample in samples:
        if sample.values is None or sample.returns is None or not bool(sample.loss_mask.any()):
            continue
        v, g = sample.values.double()[sample.loss_mask], sample.returns.double()[sample.loss_mask]
        values.append(float(v.mean()))
        returns.append(float(g.mean()))
        rest = g - v
        sums += torch.stack(
            [torch.tensor(float(g.numel())), g.sum(), g.square().sum(), rest.sum(), rest.square().sum()]
        )
    found = reduced({"rollout/values": _mean(values), "rollout/returns": _mean(returns)}, reduce)
    count, total, square, rest_total, rest_square = (float(x) for x in reduce.sum(sums))
    if count == 0:
        return found
    spread = square / count - (total / count) ** 2
    if spread > 1e-12:
        unexplained = rest_square / count - (rest_total / count) ** 2
        found["train/critic-explained_variance"] = 1 - unexplained / spread
    return found
