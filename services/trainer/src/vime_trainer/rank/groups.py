"""From the contract's groups to the engine's samples, with their advantages. Nothing is dropped without a reason."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
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
from vime_trainer.algorithms.decisions import soft_overlong_penalty, trajectory_lengths
from vime_trainer.algorithms.index import Index
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.trajectories import global_trajectories

_ROUTE_DTYPES = {tensor_pb2.DTYPE_UINT8: np.uint8, tensor_pb2.DTYPE_UINT16: np.uint16}
FINISHED = (trajectory_pb2.SAMPLE_STATUS_COMPLETED, trajectory_pb2.SAMPLE_STATUS_TRUNCATED)


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
    unscored: list[str]
    """Those of them, by name, that lack a reward that is a number, and should have one."""

    @property
    def rewards(self) -> list[float]:
        """Raw rewards of `samples`; NaN for a demonstration without one."""
        return [proto.reward if is_scored(proto) else math.nan for proto in self.protos]

    @property
    def first_of_each(self) -> list[int]:
        """Positions in `samples` of the first sample of each trajectory, to count what belongs to the trajectory."""
        first: dict[Hashable, int] = {}
        for row, sample in enumerate(self.samples):
            first.setdefault(sample.trajectory, row)
        return list(first.values())


def name_of(sample: SampleProto) -> str:
    """`<group_id>#<sample_index>`."""
    return f"{sample.group_id}#{sample.sample_index}"


def is_scored(sample: SampleProto) -> bool:
    """Whether it has a reward that is a number; a missing one is never 0."""
    return sample.HasField("reward") and math.isfinite(sample.reward)


def select(groups: Sequence[TrajectoryGroup], places: Sequence[int], config: AlgorithmConfig) -> Share:
    """The trainable samples of this rank's groups. Nothing is dropped without a reason.

    Args:
        groups: whole groups, so that their statistics are complete here.
        places: position of each group in the batch, the same numbering on every rank.
        config: masks and the choice of old logprobs.

    Raises GroupError for a group whose samples contradict each other, SampleError or RoutingTraceError for a sample
    that contradicts itself.
    """
    every = [sample for group in groups for sample in group.samples]
    unscored = [] if config.objective == "sft" else [name_of(sample) for sample in every if not is_scored(sample)]
    share = Share([], [], [], {}, every, unscored)
    for place, group in zip(places, groups, strict=True):
        reasons = [_unusable(proto, config) for proto in group.samples]
        usable = [proto for proto, why in zip(group.samples, reasons, strict=True) if not why]
        share.left_out.update({name_of(proto): why for proto, why in zip(group.samples, reasons, strict=True) if why})
        if config.objective != "sft":  # which reads no reward
            _check_forks(group.group_id, usable)
        for proto in usable:
            share.samples.append(_sample(group, place, proto, config))
            share.protos.append(proto)
            share.places.append(place)
    return share


def _check_forks(group_id: str, protos: Sequence[SampleProto]) -> None:
    """Samples that forked from one trajectory are judged as one."""
    first: dict[str, SampleProto] = {}
    for proto in protos:
        sibling = first.setdefault(proto.trajectory_id, proto) if proto.trajectory_id else proto
        if proto.reward != sibling.reward:
            raise GroupError(
                f"group {group_id}: samples {sibling.sample_index} and {proto.sample_index} forked from trajectory "
                f"{proto.trajectory_id!r} but have rewards {sibling.reward} and {proto.reward}"
            )


def with_advantages(
    share: Share, batch_groups: int, config: AlgorithmConfig, reduce: Reduce
) -> tuple[list[Sample], Advantages]:
    """The share's samples with their advantages, by group, in float64.

    The statistics of a group count every scored trajectory, also one that is cut off and masked; whitening is over the
    tokens that are trained. Reads the samples' old, reference and teacher logprobs and values where they are set; with
    values, samples get their `returns` too.
    """
    inputs = AdvantageInputs(
        rewards_B=shaped_rewards(share, config),
        loss_mask_BT=_padded([sample.loss_mask for sample in share.samples], torch.bool),
        groups=Index(torch.tensor(share.places, dtype=torch.int64), max(1, batch_groups)),
        trajectories=global_trajectories(share.samples, reduce),
        old_logprobs_BT=_column(share.samples, "old_logprobs"),
        ref_logprobs_BT=_column(share.samples, "reference_logprobs"),
        teacher_logprobs_BT=_column(share.samples, "teacher_logprobs"),
        values_BT=_column(share.samples, "values"),
    )
    made = compute_advantages(inputs, build_advantage(config), reduce)
    return [_with_row(sample, made, row) for row, sample in enumerate(share.samples)], made


def shaped_rewards(share: Share, config: AlgorithmConfig) -> torch.Tensor:
    """What the statistics are taken of, float64 [samples]: the raw rewards, less the punishment of long responses.

    The punishment is the trajectory's, as the reward is: that of its longest response (see `trajectory_lengths`).
    """
    rewards = torch.tensor(share.rewards, dtype=torch.float64)
    overlong = build_overlong(config)
    if overlong is None:
        return rewards
    lengths = [sample.response_token_ids.numel() for sample in share.samples]
    longest = trajectory_lengths([sample.trajectory for sample in share.samples], lengths)
    return rewards + soft_overlong_penalty(torch.tensor(longest, dtype=torch.float64), overlong)


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


def _unusable(sample: SampleProto, config: AlgorithmConfig) -> str:
    if sample.status not in FINISHED:
        return f"status {enum_name(trajectory_pb2.SampleStatus, sample.status)}"
    if not sample.response_token_ids:
        return "empty response"
    if config.objective == "sft" or is_scored(sample):  # a demonstration needs no judgement
        return ""
    if not sample.HasField("reward"):
        reason = enum_name(trajectory_pb2.UnscoredReason, sample.unscored_reason)
        return f"unscored ({reason}): {sample.unscored_detail}"
    return f"unscored: the reward is {sample.reward}"


def _mask(sample: SampleProto) -> torch.Tensor:
    if sample.loss_mask:
        return torch.tensor(sample.loss_mask, dtype=torch.bool)
    return torch.ones(len(sample.response_token_ids), dtype=torch.bool)


def _sample(group: TrajectoryGroup, place: int, proto: SampleProto, config: AlgorithmConfig) -> Sample:
    length = len(proto.response_token_ids)
    logprobs = torch.tensor(proto.rollout_logprobs, dtype=torch.float32)
    if config.objective == "sft" and not proto.rollout_logprobs:
        logprobs = torch.zeros(length)  # a demonstration was not sampled; nothing reads this
    mask = _mask(proto)
    if config.mask_truncated and proto.status == trajectory_pb2.SAMPLE_STATUS_TRUNCATED:
        mask = torch.zeros_like(mask)
    # A demonstration was not sampled at any temperature: its likelihood is that of the model as it is.
    sampled_at = config.objective != "sft" and group.sampling.HasField("temperature")
    return Sample(
        prompt_token_ids=torch.tensor(proto.prompt_token_ids, dtype=torch.int64),
        response_token_ids=torch.tensor(proto.response_token_ids, dtype=torch.int64),
        rollout_logprobs=logprobs,
        loss_mask=mask,
        advantages=torch.zeros(length),
        group_id=proto.group_id,
        sample_index=proto.sample_index,
        trajectory_id=proto.trajectory_id,
        group_place=place,
        temperature=group.sampling.temperature if sampled_at else 1.0,
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
