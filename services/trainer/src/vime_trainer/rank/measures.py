"""What one step shows: rewards, lengths, and the mismatch between engine and trainer, reduced over the ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from vime.common.v1 import trajectory_pb2
from vime_trainer.algorithms.metrics import Metric, Metrics, pack, unpack, values
from vime_trainer.algorithms.mismatch import mismatch_by_class, mismatch_metrics
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.algorithms.tensors import pad_rows
from vime_trainer.engine.sample import Sample
from vime_trainer.rank.groups import FINISHED, Share

REWARD_PARTS = 16
_GAP = "train_rollout_logprob_abs_diff"


def _mean(xs: Sequence[float]) -> Metric:
    return Metric(torch.tensor(sum(xs), dtype=torch.float64), torch.tensor(float(len(xs)), dtype=torch.float64))


def _count(n: float) -> Metric:
    return Metric(torch.tensor(float(n), dtype=torch.float64))


def reduced(metrics: Metrics, reduce: Reduce) -> dict[str, float]:
    """Values over all ranks; every rank must hold the same names. Means over nothing are left out."""
    total = values(unpack(reduce.sum(pack(metrics)), metrics))
    return {name: value for name, value in total.items() if value is not None}


def rollout_measures(share: Share, reduce: Reduce) -> dict[str, float]:
    """Of the batch as it came: rewards, lengths, truncation, failures.

    Rewards are counted by trajectory, however many samples it forked into; lengths are those of the samples that were
    finished.
    """
    samples = share.all_protos
    finished = [s for s in samples if s.status in FINISHED]
    lengths = [float(len(s.response_token_ids)) for s in finished]
    truncated = [float(s.status == trajectory_pb2.SAMPLE_STATUS_TRUNCATED) for s in samples]
    rewards: dict[int, list[float]] = {}
    for row in share.first_of_each:
        if math.isfinite(share.rewards[row]):
            rewards.setdefault(share.places[row], []).append(share.rewards[row])
    mixed = [float(len(set(group)) > 1) for group in rewards.values()]
    sums: Metrics = {
        "rollout/raw_reward": _mean([reward for group in rewards.values() for reward in group]),
        "rollout/response_len/mean": _mean(lengths),
        "rollout/total_lengths": _mean([len(s.prompt_token_ids) + len(s.response_token_ids) for s in finished]),
        "rollout/truncated_ratio": _mean(truncated),
        "rollout/mixed_groups": _mean(mixed),
        "rollout/zero_std/count": _count(len(mixed) - sum(mixed)),
        "rollout/samples": _count(len(samples)),
        "rollout/unscored": _count(len(share.unscored)),
        "rollout/unscored_samples": _count(len(share.unscored)),
        "rollout/left_out": _count(len(share.left_out)),
        "rollout/response_tokens": _count(sum(len(s.response_token_ids) for s in samples)),
        "rollout/cached_tokens": _mean([float(s.cached_tokens) for s in samples]),
        "rollout/reward_time": _mean([s.reward_time.seconds + s.reward_time.nanos / 1e9 for s in samples]),
    }
    extremes = reduce.max(torch.tensor([max(lengths, default=-math.inf), -min(lengths, default=math.inf)]))
    found = reduced(sums, reduce)
    if bool(torch.isfinite(extremes).all()):
        found |= {"rollout/response_len/max": float(extremes[0]), "rollout/response_len/min": -float(extremes[1])}
    return found


def reward_part_measures(share: Share, reduce: Reduce) -> dict[str, float]:
    """`rollout/reward/<part>`: mean of each part of the reward over the samples that have it, for the first
    `REWARD_PARTS` names; `rollout/reward_parts_left_out`: how many names there are beyond."""
    parts: dict[str, list[float]] = {}
    for sample in share.all_protos:
        for name, value in sample.reward_parts.items():
            if math.isfinite(value):
                parts.setdefault(name, []).append(value)
    told = torch.tensor(list(json.dumps(sorted(parts)).encode()), dtype=torch.int64)
    # A rank may have names that another has not; what is reduced must have the same on all.
    names = sorted({name for there in reduce.gather(told) for name in json.loads(bytes(there.tolist()))})
    if not names:
        return {}
    found = reduced({f"rollout/reward/{name}": _mean(parts.get(name, [])) for name in names[:REWARD_PARTS]}, reduce)
    beyond = len(names) - REWARD_PARTS
    return found | ({"rollout/reward_parts_left_out": float(beyond)} if beyond > 0 else {})


def mismatch_measures(
    samples: Sequence[Sample], logprobs: Sequence[torch.Tensor], policy_step: int, reduce: Reduce
) -> dict[str, float]:
    """How far the trainer's logprobs are from the engine's.

    `train_rollout_logprob_abs_diff` is the mean of per-sample means. `_on_policy`: samples of one version, the one
    that scores them: the engine mismatch proper. `_stale`: of one older version; `_mixed`: of several. `mismatch_kl`
    is the k3 estimate of KL(q ‖ π) over the on-policy tokens: exp(δ) - 1 - δ, δ = log π - log q (Schulman 2020).
    """
    versions = [set(sample.weight_versions) for sample in samples]
    on_policy = [found == {policy_step} for found in versions]
    mixed = [len(found) > 1 for found in versions]
    stale = [not (a or b) for a, b in zip(on_policy, mixed, strict=True)]
    columns = _mismatch_columns(samples, logprobs)
    everyone = {"": [True] * len(samples), "_on_policy": on_policy, "_stale": stale, "_mixed": mixed}
    classes = {name: torch.tensor(chosen, dtype=torch.bool) for name, chosen in everyone.items()}
    found = mismatch_by_class(*columns, classes)
    gaps = {f"train/{_GAP}{name}": found[f"{_GAP}{name}"] for name in classes}
    return reduced(gaps | {"train/mismatch_kl": found["mismatch_kl_on_policy"]}, reduce)


def mismatch_family(
    samples: Sequence[Sample], logprobs: Sequence[torch.Tensor], over_tokens: bool, reduce: Reduce
) -> dict[str, float]:
    """`train/mis_*` over all samples: KL (k1, k3), perplexities and chi-squared, see `algorithms.mismatch`."""
    found = mismatch_metrics(*_mismatch_columns(samples, logprobs), over_tokens)
    return reduced({f"train/{name}": metric for name, metric in found.items() if name.startswith("mis_")}, reduce)


def _mismatch_columns(
    samples: Sequence[Sample], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trainer's logprobs, engine's logprobs and mask, [samples, tokens]."""
    columns = pad_rows(
        ours=[row.double() for row in logprobs],
        theirs=[sample.rollout_logprobs.double() for sample in samples],
        mask=[sample.loss_mask for sample in samples],
    )
    return columns["ours"], columns["theirs"], columns["mask"]


def shaping_measures(share: Share, shaped: torch.Tensor, reduce: Reduce) -> dict[str, float]:
    """`rollout/rewards`: what the statistics were taken of; `rollout/overlong_penalty`: what was added to them. Each
    trajectory counts once."""
    rows = share.first_of_each
    added = shaped - torch.tensor(share.rewards, dtype=torch.float64)
    return reduced(
        {
            "rollout/rewards": _mean([float(shaped[row]) for row in rows]),
            "rollout/overlong_penalty": _mean([float(added[row]) for row in rows]),
        },
        reduce,
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
