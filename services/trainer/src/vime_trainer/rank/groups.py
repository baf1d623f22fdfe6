"""From the contract's groups to the engine's samples, with their advantages. Nothing is dropped without a reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vime.common.v1 import tensor_pb2, trajectory_pb2
from vime.common.v1.trajectory_pb2 import RoutingTrace, TrajectoryGroup
from vime.common.v1.trajectory_pb2 import Sample as SampleProto
from vime_trainer.algorithm_config import AlgorithmConfig, build_advantage
from vime_trainer.algorithms.advantages import AdvantageInputs, Advantages
from vime_trainer.algorithms.advantages.compute import compute_advantages
from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.engine.sample import Sample

_ROUTE_DTYPES = {tensor_pb2.DTYPE_UINT8: np.uint8, tensor_pb2.DTYPE_UINT16: np.uint16}
_FINISHED = (trajectory_pb2.SAMPLE_STATUS_COMPLETED, trajectory_pb2.SAMPLE_STATUS_TRUNCATED)


class GroupError(ValueError):
    """A group cannot be trained on as it is; the message names it."""


@dataclass(frozen=True)
class Prepared:
    """This rank's share of a batch. `samples[i]` was made from `protos[i]` of the group at `places[i]`."""

    samples: list[Sample]
    protos: list[SampleProto]
    places: list[int]
    rewards: list[float]
    """Raw rewards of `samples`."""
    left_out: dict[str, str]
    advantages: Advantages
    """Over all samples that have tokens, scored or not."""
    all_protos: list[SampleProto] = field(default_factory=list)
    """Every sample of the share, for counts."""


def name_of(sample: SampleProto) -> str:
    """`<group_id>#<sample_index>`."""
    return f"{sample.group_id}#{sample.sample_index}"


def prepare(
    groups: Sequence[TrajectoryGroup],
    places: Sequence[int],
    batch_groups: int,
    config: AlgorithmConfig,
    reduce: Reduce,
) -> Prepared:
    """Turn this rank's groups into samples with advantages.

    Args:
        groups: whole groups, so that their statistics are complete here.
        places: position of each group in the batch, the same numbering on every rank.
        batch_groups: groups of the whole batch.
        config: estimator and masks.
        reduce: sums over the ranks, for estimators that whiten.
    """
    left_out: dict[str, str] = {}
    usable: list[tuple[int, TrajectoryGroup, SampleProto]] = []
    for place, group in zip(places, groups, strict=True):
        for sample in group.samples:
            why = _unusable(sample)
            if why:
                left_out[name_of(sample)] = why
            else:
                usable.append((place, group, sample))
    advantages = _advantages(usable, batch_groups, config, reduce)
    kept = [i for i, (_, _, sample) in enumerate(usable) if sample.HasField("reward")]
    for i, (_, _, sample) in enumerate(usable):
        if not usable[i][2].HasField("reward"):
            reason = trajectory_pb2.UnscoredReason.Name(sample.unscored_reason).removeprefix("UNSCORED_REASON_")
            left_out[name_of(sample)] = f"unscored ({reason.lower()}): {sample.unscored_detail}"
    return Prepared(
        samples=[_sample(usable[i][1], usable[i][2], advantages, i, config) for i in kept],
        protos=[usable[i][2] for i in kept],
        places=[usable[i][0] for i in kept],
        rewards=[usable[i][2].reward for i in kept],
        left_out=left_out,
        advantages=advantages,
        all_protos=[s for g in groups for s in g.samples],
    )


def _unusable(sample: SampleProto) -> str:
    if sample.status not in _FINISHED:
        status = trajectory_pb2.SampleStatus.Name(sample.status).removeprefix("SAMPLE_STATUS_").lower()
        return f"status {status}"
    if not sample.response_token_ids:
        return "empty response"
    if sample.HasField("reward") and not math.isfinite(sample.reward):
        return f"reward {sample.reward}"
    return ""


def _advantages(
    usable: Sequence[tuple[int, TrajectoryGroup, SampleProto]],
    batch_groups: int,
    config: AlgorithmConfig,
    reduce: Reduce,
) -> Advantages:
    """Statistics over the scored samples of each group, by group, in float64; before any truncation filter."""
    rewards = torch.tensor([s.reward if s.HasField("reward") else math.nan for _, _, s in usable], dtype=torch.float64)
    masks = [_mask(sample) for _, _, sample in usable]
    mask_BT = pad_sequence(masks, batch_first=True) if masks else torch.zeros(0, 1, dtype=torch.bool)
    groups = Index(torch.tensor([place for place, _, _ in usable], dtype=torch.int64), max(1, batch_groups))
    inputs = AdvantageInputs(rewards, mask_BT, groups, _trajectories(usable, batch_groups, reduce))
    return compute_advantages(inputs, build_advantage(config), reduce)


def _trajectories(
    usable: Sequence[tuple[int, TrajectoryGroup, SampleProto]], batch_groups: int, reduce: Reduce
) -> Index:
    """Forked samples share a trajectory; all others stand alone. Numbered by (group, first sample of the trajectory),
    so that the numbers mean the same on every rank."""
    widest = torch.tensor([float(max((s.sample_index for _, _, s in usable), default=0))])
    width = int(reduce.max(widest).item()) + 1
    first: dict[tuple[int, str], int] = {}
    ids = []
    for place, _, sample in usable:
        key = (place, sample.trajectory_id or f"#{sample.sample_index}")
        ids.append(place * width + first.setdefault(key, sample.sample_index))
    return Index(torch.tensor(ids, dtype=torch.int64), max(1, batch_groups) * width)


def _mask(sample: SampleProto) -> torch.Tensor:
    if sample.loss_mask:
        return torch.tensor(sample.loss_mask, dtype=torch.bool)
    return torch.ones(len(sample.response_token_ids), dtype=torch.bool)


def _sample(
    group: TrajectoryGroup, sample: SampleProto, advantages: Advantages, row: int, config: AlgorithmConfig
) -> Sample:
    length = len(sample.response_token_ids)
    logprobs = torch.tensor(sample.rollout_logprobs, dtype=torch.float32)
    mask = advantages.loss_mask_BT[row, :length].clone()
    if config.mask_truncated and sample.status == trajectory_pb2.SAMPLE_STATUS_TRUNCATED:
        mask.zero_()
    temperature = group.sampling.temperature if group.sampling.HasField("temperature") else 1.0
    return Sample(
        prompt_token_ids=torch.tensor(sample.prompt_token_ids, dtype=torch.int64),
        response_token_ids=torch.tensor(sample.response_token_ids, dtype=torch.int64),
        rollout_logprobs=logprobs,
        loss_mask=mask,
        advantages=advantages.advantages_BT[row, :length].float(),
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        trajectory_id=sample.trajectory_id,
        temperature=temperature,
        routed_experts=routes_of(sample),
        old_logprobs=logprobs if config.use_rollout_logprobs else None,
        weight_versions=tuple(span.weight_version.step for span in sample.version_spans),
    )


def bare_sample(sample: SampleProto, temperature: float) -> Sample:
    """A sample to score: no advantages."""
    length = len(sample.response_token_ids)
    return Sample(
        prompt_token_ids=torch.tensor(sample.prompt_token_ids, dtype=torch.int64),
        response_token_ids=torch.tensor(sample.response_token_ids, dtype=torch.int64),
        rollout_logprobs=torch.tensor(sample.rollout_logprobs or [0.0] * length, dtype=torch.float32),
        loss_mask=torch.ones(length, dtype=torch.bool),
        advantages=torch.zeros(length),
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        temperature=temperature,
        routed_experts=routes_of(sample),
    )


def routes_of(sample: SampleProto) -> torch.Tensor | None:
    """The routing trace as uint8 or uint16 [prompt + response - 1, moe_layers, top_k]; None where there is none.

    Raises GroupError for segments that do not join, wrong shapes or bytes with another digest.
    """
    if not sample.HasField("routed_experts"):
        return None
    trace: RoutingTrace = sample.routed_experts
    rows = 0
    parts = []
    for segment in trace.segments:
        if segment.first_token != rows:
            raise GroupError(
                f"{name_of(sample)}: routing segment starts at token {segment.first_token}, the last ended at {rows}"
            )
        parts.append(_rows(name_of(sample), segment))
        rows += segment.rows
    if not parts:
        raise GroupError(f"{name_of(sample)}: a routing trace without segments")
    return torch.from_numpy(np.concatenate(parts))


def _rows(name: str, segment: trajectory_pb2.RoutingSegment) -> np.ndarray:
    import xxhash

    ref = segment.experts
    if ref.dtype not in _ROUTE_DTYPES:
        raise GroupError(f"{name}: routing rows of dtype {tensor_pb2.Dtype.Name(ref.dtype)}, expected uint8 or uint16")
    if ref.WhichOneof("data") != "inline":
        raise GroupError(f"{name}: routing rows by handle are not supported by this trainer")
    if xxhash.xxh3_128_hexdigest(ref.inline) != ref.digest:
        raise GroupError(f"{name}: routing rows do not have the digest {ref.digest} that was announced")
    flat = np.frombuffer(ref.inline, dtype=_ROUTE_DTYPES[ref.dtype])
    shape = tuple(ref.shape)
    if len(shape) != 3 or shape[0] != segment.rows or math.prod(shape) != flat.size:
        raise GroupError(f"{name}: {flat.size} routing entries and {segment.rows} rows for a shape {list(shape)}")
    return flat.reshape(shape)
