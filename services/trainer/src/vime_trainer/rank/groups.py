"""From the contract's groups to the engine's samples, with their advantages. Nothing is dropped without a reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vime.common.v1 import tensor_pb2, trajectory_pb2
from vime.common.v1.trajectory_pb2 import RoutingTrace, TrajectoryGroup
from vime.common.v1.trajectory_pb2 import Sample as SampleProto
from vime_trainer.adapters.protos import enum_name
from vime_trainer.algorithm_config import AlgorithmConfig, build_advantage, build_overlong
from vime_trainer.algorithms.advantages import AdvantageInputs, Advantages
from vime_trainer.algorithms.advantages.compute import compute_advantages
from vime_trainer.algorithms.decisions import soft_overlong_penalty
from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.engine.sample import Sample

_ROUTE_DTYPES = {tensor_pb2.DTYPE_UINT8: np.uint8, tensor_pb2.DTYPE_UINT16: np.uint16}
_FINISHED = (trajectory_pb2.SAMPLE_STATUS_COMPLETED, trajectory_pb2.SAMPLE_STATUS_TRUNCATED)


class GroupError(ValueError):
    """A group cannot be trained on as it is; the message names it."""


@dataclass(frozen=True)
class Share:
    """This rank's share of a batch: the samples that can be trained. `samples[i]` was made from `protos[i]` of the
    group at place `places[i]` of the batch; its advantages are zero until `with_advantages`."""

    samples: list[Sample]
    protos: list[SampleProto]
    places: list[int]
    left_out: dict[str, str]
    """Samples that cannot be trained, by name, with the reason."""
    all_protos: list[SampleProto]
    """Every sample of the share, for counts."""

    @property
    def rewards(self) -> list[float]:
        """Raw rewards of `samples`."""
        return [proto.reward for proto in self.protos]


def name_of(sample: SampleProto) -> str:
    """`<group_id>#<sample_index>`."""
    return f"{sample.group_id}#{sample.sample_index}"


def select(groups: Sequence[TrajectoryGroup], places: Sequence[int], config: AlgorithmConfig) -> Share:
    """The trainable samples of this rank's groups. Nothing is dropped without a reason.

    Args:
        groups: whole groups, so that their statistics are complete here.
        places: position of each group in the batch, the same numbering on every rank.
        config: masks and the choice of old logprobs.
    """
    share = Share([], [], [], {}, [sample for group in groups for sample in group.samples])
    for place, group in zip(places, groups, strict=True):
        for proto in group.samples:
            why = _unusable(proto)
            if why:
                share.left_out[name_of(proto)] = why
                continue
            share.samples.append(_sample(group, proto, config))
            share.protos.append(proto)
            share.places.append(place)
    return share


def with_advantages(
    share: Share, batch_groups: int, config: AlgorithmConfig, reduce: Reduce
) -> tuple[list[Sample], Advantages]:
    """The share's samples with their advantages, by group, in float64; before any truncation filter.

    Reads the samples' old, reference and teacher logprobs and values where they are set; with values, samples get
    their `returns` too.
    """
    inputs = AdvantageInputs(
        rewards_B=shaped_rewards(share, config),
        loss_mask_BT=_padded([_mask(proto) for proto in share.protos], torch.bool),
        groups=Index(torch.tensor(share.places, dtype=torch.int64), max(1, batch_groups)),
        trajectories=_trajectories(share, batch_groups, reduce),
        old_logprobs_BT=_column(share.samples, "old_logprobs"),
        ref_logprobs_BT=_column(share.samples, "reference_logprobs"),
        teacher_logprobs_BT=_column(share.samples, "teacher_logprobs"),
        values_BT=_column(share.samples, "values"),
    )
    made = compute_advantages(inputs, build_advantage(config), reduce)
    return [_with_row(sample, made, row) for row, sample in enumerate(share.samples)], made


def shaped_rewards(share: Share, config: AlgorithmConfig) -> torch.Tensor:
    """What the statistics are taken of, float64 [samples]: the raw rewards, less the punishment of long responses."""
    rewards = torch.tensor(share.rewards, dtype=torch.float64)
    overlong = build_overlong(config)
    if overlong is None:
        return rewards
    return rewards + soft_overlong_penalty(
        torch.tensor([float(len(proto.response_token_ids)) for proto in share.protos], dtype=torch.float64), overlong
    )


def _with_row(sample: Sample, made: Advantages, row: int) -> Sample:
    length = sample.response_token_ids.numel()
    returns = None if made.returns_BT is None else made.returns_BT[row, :length].float()
    return replace(sample, advantages=made.advantages_BT[row, :length].float(), returns=returns)


def _padded(rows: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return pad_sequence(list(rows), batch_first=True) if rows else torch.zeros(0, 1, dtype=dtype)


def _column(samples: Sequence[Sample], field: str) -> torch.Tensor | None:
    rows = [getattr(sample, field) for sample in samples]
    # A rank without samples cannot tell what the others have: it gives an empty column, which fits everything.
    return None if any(row is None for row in rows) else _padded(rows, torch.float32)


def _unusable(sample: SampleProto) -> str:
    if sample.status not in _FINISHED:
        return f"status {enum_name(trajectory_pb2.SampleStatus, sample.status)}"
    if not sample.response_token_ids:
        return "empty response"
    if not sample.HasField("reward"):
        reason = enum_name(trajectory_pb2.UnscoredReason, sample.unscored_reason)
        return f"unscored ({reason}): {sample.unscored_detail}"
    return "" if math.isfinite(sample.reward) else f"unscored: the reward is {sample.reward}"


def _trajectories(share: Share, batch_groups: int, reduce: Reduce) -> Index:
    """Forked samples share a trajectory; all others stand alone. Numbered by (group, first sample of the trajectory),
    so that the numbers mean the same on every rank."""
    widest = torch.tensor([float(max((proto.sample_index for proto in share.protos), default=0))])
    width = int(reduce.max(widest).item()) + 1
    first: dict[tuple[int, str], int] = {}
    ids = []
    for place, proto in zip(share.places, share.protos, strict=True):
        key = (place, proto.trajectory_id or f"#{proto.sample_index}")
        ids.append(place * width + first.setdefault(key, proto.sample_index))
    return Index(torch.tensor(ids, dtype=torch.int64), max(1, batch_groups) * width)


def _mask(sample: SampleProto) -> torch.Tensor:
    if sample.loss_mask:
        return torch.tensor(sample.loss_mask, dtype=torch.bool)
    return torch.ones(len(sample.response_token_ids), dtype=torch.bool)


def _sample(group: TrajectoryGroup, proto: SampleProto, config: AlgorithmConfig) -> Sample:
    length = len(proto.response_token_ids)
    logprobs = torch.tensor(proto.rollout_logprobs, dtype=torch.float32)
    if config.objective == "sft" and not proto.rollout_logprobs:
        logprobs = torch.zeros(length)  # a demonstration was not sampled; nothing reads this
    mask = _mask(proto)
    if config.mask_truncated and proto.status == trajectory_pb2.SAMPLE_STATUS_TRUNCATED:
        mask = torch.zeros_like(mask)
    temperature = group.sampling.temperature if group.sampling.HasField("temperature") else 1.0
    return Sample(
        prompt_token_ids=torch.tensor(proto.prompt_token_ids, dtype=torch.int64),
        response_token_ids=torch.tensor(proto.response_token_ids, dtype=torch.int64),
        rollout_logprobs=logprobs,
        loss_mask=mask,
        advantages=torch.zeros(length),
        group_id=proto.group_id,
        sample_index=proto.sample_index,
        trajectory_id=proto.trajectory_id,
        temperature=temperature,
        routed_experts=routes_of(proto),
        old_logprobs=logprobs if config.use_rollout_logprobs else None,
        weight_versions=tuple(span.weight_version.step for span in proto.version_spans),
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
        raise GroupError(
            f"{name}: routing rows of dtype {enum_name(tensor_pb2.Dtype, ref.dtype)}, expected uint8 or uint16"
        )
    if ref.WhichOneof("data") != "inline":
        raise GroupError(f"{name}: routing rows by handle are not supported by this trainer")
    if xxhash.xxh3_128_hexdigest(ref.inline) != ref.digest:
        raise GroupError(f"{name}: routing rows do not have the digest {ref.digest} that was announced")
    flat = np.frombuffer(ref.inline, dtype=_ROUTE_DTYPES[ref.dtype])
    shape = tuple(ref.shape)
    if len(shape) != 3 or shape[0] != segment.rows or math.prod(shape) != flat.size:
        raise GroupError(f"{name}: {flat.size} routing entries and {segment.rows} rows for a shape {list(shape)}")
    return flat.reshape(shape)
