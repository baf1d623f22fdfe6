"""The looking glass: what a training step does with hand-written trajectories, number by number.

It calls the functions of the training step, with the split of the file: ranks run as threads that meet in the same
reductions, micro-batches add their shares. No formula is repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vime_trainer.algorithms.advantages import Advantages, compute_advantages
from vime_trainer.algorithms.groups import group_statistics
from vime_trainer.algorithms.inspect_format import Document, read_document
from vime_trainer.algorithms.losses import (
    LossOutput,
    PolicyBatch,
    PolicyTokens,
    ValueBatch,
    batch_denominators,
    policy_loss,
    policy_tokens,
    value_loss,
)
from vime_trainer.algorithms.metrics import Metrics, merge, values
from vime_trainer.algorithms.ranks import Reduce, simulate
from vime_trainer.algorithms.reducers import Denominators, denominators, sample_weights


def inspect_advantages(data: Any) -> dict[str, Any]:
    """Advantages of the parsed JSON `data` (docs/inspect.md), as plain numbers. Raises `ValueError` for bad input."""
    document = read_document(data)
    return _advantages_report(document, _advantages(document))


def inspect_loss(data: Any) -> dict[str, Any]:
    """The policy loss (and the value loss, when there are values), its terms and d loss / d logprob per token.

    Needs current `logprobs`. Raises `ValueError` for bad input.
    """
    document = read_document(data)
    advantages = _advantages(document)
    report = {
        "advantages": _advantages_report(document, advantages),
        "loss": _policy_report(document, advantages),
    }
    if "values" in document.columns and advantages.returns_BT is not None:
        report["value_loss"] = _value_report(document, advantages)
    return report


# ---- advantages


def _advantages(document: Document) -> Advantages:
    """As each rank computes its own, put back in the order of the file."""
    inputs = document.inputs
    rows_R = [_rows([b for micro in rank for b in micro]) for rank in document.split]

    def rank(rank: int, reduce: Reduce) -> Advantages:
        return compute_advantages(inputs.rows(rows_R[rank]), document.settings.advantage, reduce)

    parts = simulate(len(document.split), rank)
    back = torch.argsort(torch.cat(rows_R))
    returns = [part.returns_BT for part in parts if part.returns_BT is not None]
    mask_BT = torch.cat([part.loss_mask_BT for part in parts])[back]
    return Advantages(
        advantages_BT=torch.cat([part.advantages_BT for part in parts])[back].to(document.settings.dtype),
        loss_mask_BT=mask_BT,
        returns_BT=torch.cat(returns)[back] if returns else None,
        unscored_B=torch.cat([part.unscored_B for part in parts])[back],
        metrics=merge(part.metrics for part in parts),
    )


def _advantages_report(document: Document, advantages: Advantages) -> dict[str, Any]:
    inputs = document.inputs
    group = group_statistics(inputs.rewards_B, inputs.groups, inputs.trajectories)
    rewards = {"raw_reward": document.raw_rewards_B, "reward": inputs.rewards_B}
    trajectories = []
    for b, name in enumerate(document.ids):
        row: dict[str, Any] = {"id": name, "group_id": document.group_ids[b]}
        row |= {key: _number(x_B[b]) for key, x_B in rewards.items()}
        row["scored"] = not bool(advantages.unscored_B[b])
        row["unscored_reason"] = document.unscored_reasons.get(b)
        row |= {"loss_mask": _cut(advantages.loss_mask_BT.int(), document, b)}
        row["advantages"] = _cut(advantages.advantages_BT, document, b)
        row["returns"] = None if advantages.returns_BT is None else _cut(advantages.returns_BT, document, b)
        trajectories.append(row)
    first = {name: b for b, name in reversed(list(enumerate(document.group_ids)))}
    groups = [
        {"group_id": name, "scored_trajectories": int(group.count_B[b]), "mean": _number(group.mean_B[b]),
         "std": _number(group.std_B[b])}
        for name, b in sorted(first.items(), key=lambda item: item[1])
    ]  # fmt: skip
    return {"trajectories": trajectories, "groups": groups, "metrics": _finite(advantages.metrics)}


# ---- policy loss


@dataclass(frozen=True)
class _Micro:
    """One micro-batch: whose samples, and what the step's functions gave."""

    rank: int
    rows: Tensor
    output: LossOutput
    tokens: PolicyTokens
    weight_B: Tensor


def _policy_report(document: Document, advantages: Advantages) -> dict[str, Any]:
    config = document.settings.loss
    batch = document.policy_batch(advantages.advantages_BT, advantages.loss_mask_BT)
    leaf_BT = batch.logprobs_BT.clone().requires_grad_()
    batch = replace(batch, logprobs_BT=leaf_BT)

    def rank(rank: int, reduce: Reduce) -> tuple[list[_Micro], Denominators]:
        counts, micros = _rank_counts(document, batch, rank, reduce)
        outputs = []
        for rows, places in micros:
            mine, shares = batch.rows(rows), counts.rows(places)
            tokens = policy_tokens(mine, config, shares.correction_mean)
            weight_B = sample_weights(shares, config.reducer, config.fixed_length)
            outputs.append(_Micro(rank, rows, policy_loss(mine, config, shares), tokens, weight_B))
        return outputs, counts

    ranks = simulate(len(document.split), rank)
    micros = [micro for outputs, _ in ranks for micro in outputs]
    loss = torch.stack([micro.output.loss for micro in micros]).sum()
    (gradient_BT,) = torch.autograd.grad(loss, leaf_BT)
    metrics: Metrics = merge(micro.output.metrics for micro in micros)
    reported = _finite(metrics)
    return {
        "loss": reported["loss"],
        "terms": {name: reported.get(name) for name in ("pg_loss", "kl_loss", "entropy_loss")},
        "denominators": _denominators(document, [counts for _, counts in ranks]),
        "micro_batches": [
            {"rank": micro.rank, "ids": [document.ids[b] for b in micro.rows.tolist()],
             "loss": _number(micro.output.loss)}
            for micro in micros
        ],
        "trajectories": _token_rows(document, micros, gradient_BT),
        "gradient_norm": _number(gradient_BT.norm()),
        "metrics": reported,
    }  # fmt: skip


def _rank_counts(
    document: Document, batch: PolicyBatch, rank: int, reduce: Reduce
) -> tuple[Denominators, list[tuple[Tensor, slice]]]:
    """Denominators of the global batch as this rank sees them; its micro-batches as rows of the file and places."""
    mine = _rows([b for micro in document.split[rank] for b in micro])
    assert document.inputs.trajectories is not None  # the document always gives them
    trajectories = document.inputs.trajectories.rows(mine)
    counts = batch_denominators(batch.rows(mine), document.settings.loss, trajectories, reduce)
    micros, start = [], 0
    for micro in document.split[rank]:
        micros.append((_rows(micro), slice(start, start + len(micro))))
        start += len(micro)
    return counts, micros


def _denominators(document: Document, counts_R: Sequence[Denominators]) -> dict[str, Any]:
    order = [b for rank in document.split for micro in rank for b in micro]
    per_trajectory = torch.cat([counts.trajectory_tokens_B for counts in counts_R])
    tokens = {document.ids[b]: int(n) for b, n in zip(order, per_trajectory.tolist(), strict=True)}
    first = counts_R[0]
    return {
        "tokens": int(first.tokens),
        "sequences": int(first.sequences),
        "trajectory_tokens": {name: tokens[name] for name in document.ids},
        "correction_mean": None if first.correction_mean is None else _number(first.correction_mean),
    }


def _token_rows(document: Document, micros: Sequence[_Micro], gradient_BT: Tensor) -> list[dict[str, Any]]:
    """Per trajectory, in the order of the file: every quantity of every token, null where masked."""
    found: dict[int, dict[str, Any]] = {}
    for micro in micros:
        tokens = micro.tokens
        columns = {
            "ratio": tokens.terms.log_ratio_BT.exp(),
            "clipped": tokens.clipped_BT,
            "correction": tokens.correction_BT,
            "pg_loss": tokens.pg_BT,
            "kl": tokens.kl_BT,
            "entropy": tokens.entropy_BT,
        }
        for place, b in enumerate(micro.rows.tolist()):
            mask = tokens.terms.mask.bool_BT[place].tolist()[: document.lengths[b]]
            row: dict[str, Any] = {"id": document.ids[b], "sample_weight": _number(micro.weight_B[place])}
            for name, x_BT in columns.items():
                row[name] = None if x_BT is None else _masked(x_BT[place], mask)
            row["d_loss_d_logprob"] = _cut(gradient_BT, document, b)
            found[b] = row
    return [found[b] for b in sorted(found)]


# ---- value loss


def _value_report(document: Document, advantages: Advantages) -> dict[str, Any]:
    assert advantages.returns_BT is not None  # the caller asked
    leaf_BT = document.columns["values"].clone().requires_grad_()
    old_BT = document.columns.get("old_values", leaf_BT.detach())
    counts = denominators(advantages.loss_mask_BT, document.inputs.trajectories)
    shares = []
    for rows in (_rows(micro) for rank in document.split for micro in rank):
        mine = ValueBatch(leaf_BT[rows], old_BT[rows], advantages.returns_BT[rows], advantages.loss_mask_BT[rows])
        shares.append(value_loss(mine, document.settings.value_loss, counts.rows(rows)))
    (gradient_BT,) = torch.autograd.grad(torch.stack([share.loss for share in shares]).sum(), leaf_BT)
    metrics = _finite(merge(share.metrics for share in shares))
    return {
        "loss": metrics["value_loss"],
        "trajectories": [
            {"id": name, "d_loss_d_value": _cut(gradient_BT, document, b)} for b, name in enumerate(document.ids)
        ],
        "metrics": metrics,
    }


# ---- numbers


def _rows(positions: list[int]) -> Tensor:
    return torch.tensor(positions, dtype=torch.int64)


def _finite(metrics: Metrics) -> dict[str, float | None]:
    """Values of metrics; null for a mean over nothing and for what is not finite."""
    return {
        name: value if value is not None and math.isfinite(value) else None for name, value in values(metrics).items()
    }


def _number(x: Tensor) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(x.detach()) if bool(torch.isfinite(x)) else None


def _cut(x_BT: Tensor, document: Document, b: int) -> list[Any]:
    """Row b without its padding; non-finite as null."""
    row = x_BT[b, : document.lengths[b]]
    return [entry if finite else None for entry, finite in zip(row.tolist(), torch.isfinite(row).tolist(), strict=True)]


def _masked(x_T: Tensor, mask: list[bool]) -> list[float | None]:
    values_T = x_T.detach().expand(max(len(mask), 1))[: len(mask)] if x_T.numel() == 1 else x_T.detach()[: len(mask)]
    return [_number(x) if kept else None for x, kept in zip(values_T, mask, strict=True)]
