"""What makes a group unusable is found before anything is trained, and named; the other groups are not touched."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash

from vime.common.v1 import tensor_pb2, trajectory_pb2
from vime.common.v1.trajectory_pb2 import RoutingSegment, RoutingTrace, Sample, SamplingParams, TrajectoryGroup
from vime.trainer.v1 import rank_service_pb2 as pb
from vime_trainer.algorithm_config import AlgorithmConfig
from vime_trainer.engine.config import EngineConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.rank.training import BatchTraining
from vime_trainer.tools import fresh_model

pytestmark = pytest.mark.engine

LAYERS, EXPERTS, TOP_K = 2, 8, 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model whose MoE layers are 0 and 1, of 8 experts."""
    folder = tmp_path_factory.mktemp("model")
    fresh_model.write(folder, fresh_model.config(layers=LAYERS, hidden=64), seed=0)
    held = Engine.from_hf(folder, EngineConfig())
    assert (held.model_shape.moe_layers, held.model_shape.num_experts, held.model_shape.top_k) == ((0, 1), 8, 2)
    return held


def experts(rows: int, dtype: type[np.integer] = np.uint8) -> np.ndarray:
    """[rows, layers, top_k]: distinct within each row."""
    first = np.arange(rows * LAYERS).reshape(rows, LAYERS, 1) % (EXPERTS - 1)
    return np.concatenate([first, first + 1], axis=2).astype(dtype)


def trace(rows: np.ndarray) -> RoutingTrace:
    raw = rows.tobytes()
    dtype = tensor_pb2.DTYPE_UINT8 if rows.dtype == np.uint8 else tensor_pb2.DTYPE_UINT16
    ref = tensor_pb2.TensorRef(dtype=dtype, shape=rows.shape, inline=raw, digest=xxhash.xxh3_128_hexdigest(raw))
    segment = RoutingSegment(first_token=0, rows=rows.shape[0], experts=ref)
    return RoutingTrace(segments=[segment], moe_layer_ids=[0, 1], num_experts=EXPERTS)


def group(group_id: str) -> TrajectoryGroup:
    samples = [
        Sample(
            group_id=group_id,
            sample_index=i,
            prompt_token_ids=[5, 6],
            response_token_ids=[10 + i, 11, 12],
            rollout_logprobs=[-0.5] * 3,
            status=trajectory_pb2.SAMPLE_STATUS_COMPLETED,
            reward=float(i),
            routed_experts=trace(experts(4)),
        )
        for i in range(2)
    ]
    return TrajectoryGroup(group_id=group_id, sampling=SamplingParams(temperature=1.0), samples=samples)


def change(**fields: object) -> Callable[[Sample], None]:
    def apply(sample: Sample) -> None:
        for name, value in fields.items():
            sample.ClearField(name)
            if isinstance(value, list):
                getattr(sample, name).extend(value)
            elif isinstance(value, RoutingTrace):
                getattr(sample, name).CopyFrom(value)
            else:
                setattr(sample, name, value)

    return apply


def entry(row: int, ids: list[int]) -> Callable[[Sample], None]:
    rows = experts(4)
    rows[row, 1] = ids
    return change(routed_experts=trace(rows))


def by_handle(sample: Sample) -> None:
    sample.routed_experts.segments[0].experts.handle.SetInParent()


def of_layers(sample: Sample) -> None:
    sample.routed_experts.moe_layer_ids[:] = [1, 2]


def of_512(sample: Sample) -> None:
    sample.routed_experts.num_experts = 512


def fork_of_the_other(sample: Sample) -> None:
    """Its trajectory is that of sample 0, whose reward is another."""
    sample.trajectory_id = "t"


def half_a_number(sample: Sample) -> None:
    ref = sample.routed_experts.segments[0].experts
    ref.dtype, ref.inline = tensor_pb2.DTYPE_UINT16, ref.inline[:-1]
    ref.digest = xxhash.xxh3_128_hexdigest(ref.inline)


def two_widths(sample: Sample) -> None:
    sample.routed_experts.CopyFrom(trace(experts(2)))
    segment = trace(experts(2)[:, :1]).segments[0]
    segment.first_token = 2
    sample.routed_experts.segments.append(segment)


POISONS: dict[str, tuple[Callable[[Sample], None], str]] = {
    "vocabulary": (change(response_token_ids=[10, 4_000_000, 12]), "token ids 5..4000000 leave the vocabulary of 32"),
    "repeated expert": (entry(2, [3, 3]), r"experts \[3, 3\] at row 2, MoE layer 1 repeat"),
    "no such expert": (entry(1, [0, 8]), "expert 8 at row 1, MoE layer 1; the model has 8 experts"),
    "handle": (by_handle, "routing rows by handle are not supported"),
    "no routes": (lambda sample: sample.ClearField("routed_experts"), "the sample has 0 of 4 routing rows"),
    "a row too few": (change(routed_experts=trace(experts(3))), "4 consumed tokens but 3 routing rows"),
    "layers": (of_layers, r"of MoE layers \[1, 2\], the model's are \[0, 1\]"),
    "experts": (of_512, "of 512 experts, the model has 8"),
    "half a number": (half_a_number, "buffer size must be a multiple"),
    "two widths": (two_widths, "must match exactly"),
    "one index twice": (change(sample_index=0), "group bad holds sample bad#0 twice"),
    "another group's": (change(group_id="other"), "group bad holds sample other#1, which is of another group"),
    "length": (change(rollout_logprobs=[-0.5]), "3 response tokens but rollout_logprobs"),
    "no probability": (change(rollout_logprobs=[-0.5, 3.0, -0.5]), "is not the logarithm of a probability"),
    "forks": (fork_of_the_other, "samples 0 and 1 forked from trajectory 't' but have rewards 0.0 and 1.0"),
    "too long": (
        change(response_token_ids=[10] * 9000, rollout_logprobs=[-0.5] * 9000, routed_experts=trace(experts(9001))),
        "9001 tokens exceed the model's",
    ),
}


@pytest.mark.parametrize("name", POISONS)
def test_a_poisoned_group_is_named_and_nothing_is_trained(engine: Engine, name: str) -> None:
    poison, reason = POISONS[name]
    bad = group("bad")
    bad.samples[0].trajectory_id = "t"
    poison(bad.samples[1])
    groups = [group("good"), bad]
    before = [tensor.clone() for _, tensor in engine.export()]
    command = pb.TrainCommand(group_ids=["good", "bad"])
    result = BatchTraining(engine, AlgorithmConfig()).run(command, groups, [0, 1], 0.0)
    assert set(result.unusable_groups) == {"bad"}

    assert re.search(reason, result.unusable_groups["bad"]), result.unusable_groups["bad"]
    assert result.skipped
    assert not result.trained_samples
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, engine.export(), strict=True))


def test_a_batch_of_good_groups_is_trained(engine: Engine) -> None:
    command = pb.TrainCommand(group_ids=["a", "b"])
    result = BatchTraining(engine, AlgorithmConfig()).run(command, [group("a"), group("b")], [0, 1], 0.0)
    assert not result.unusable_groups
    assert not result.skipped
    assert sorted(result.trained_samples) == ["a#0", "a#1", "b#0", "b#1"]
