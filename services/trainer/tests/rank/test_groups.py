"""From the contract's groups to samples with advantages: nothing is lost without a reason, nothing counts as 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from vime.common.v1 import tensor_pb2, trajectory_pb2
from vime.common.v1.trajectory_pb2 import RoutingSegment, RoutingTrace, Sample, SamplingParams, TrajectoryGroup
from vime_trainer.algorithm_config import AlgorithmConfig, OverlongSettings
from vime_trainer.algorithms.ranks import LOCAL
from vime_trainer.engine.errors import RoutingTraceError, SampleError
from vime_trainer.engine.trajectories import global_trajectories
from vime_trainer.rank.groups import GroupError, routes_of, select, shaped_rewards, with_advantages
from vime_trainer.rank.measures import (
    mismatch_family,
    mismatch_measures,
    reward_part_measures,
    rollout_measures,
    shaping_measures,
)

DONE, CUT = trajectory_pb2.SAMPLE_STATUS_COMPLETED, trajectory_pb2.SAMPLE_STATUS_TRUNCATED


def sample(index: int, reward: float | None, tokens: int = 3, group: str = "g", **fields) -> Sample:
    made = Sample(
        group_id=group,
        sample_index=index,
        prompt_token_ids=[5, 6],
        response_token_ids=list(range(10, 10 + tokens)),
        rollout_logprobs=[-0.5] * tokens,
        status=fields.pop("status", DONE),
        **fields,
    )
    if reward is not None:
        made.reward = reward
    return made


def group(*samples: Sample, temperature: float = 1.0) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=samples[0].group_id, sampling=SamplingParams(temperature=temperature), samples=samples
    )


def routes(array: np.ndarray, first: int = 0, digest: str | None = None) -> RoutingSegment:
    raw = array.tobytes()
    ref = tensor_pb2.TensorRef(
        dtype=tensor_pb2.DTYPE_UINT8,
        shape=array.shape,
        inline=raw,
        digest=digest or xxhash.xxh3_128_hexdigest(raw),
    )
    return RoutingSegment(first_token=first, rows=array.shape[0], experts=ref)


def advantages(groups, config=None):
    config = config or AlgorithmConfig()
    share = select(groups, range(len(groups)), config)
    samples, made = with_advantages(share, len(groups), config, LOCAL)
    return share, samples, made


def test_k10_an_aborted_and_an_unscored_sample_stay_out_and_are_named():
    aborted = sample(1, 0.0, status=trajectory_pb2.SAMPLE_STATUS_ABORTED)
    failed = sample(2, None, unscored_reason=trajectory_pb2.UNSCORED_REASON_RAISED, unscored_detail="ConnectionError")
    share, samples, _ = advantages([group(sample(0, 1.0), aborted, failed, sample(3, 0.0))])
    assert [s.sample_index for s in samples] == [0, 3]
    assert [round(float(s.advantages[0]), 4) for s in samples] == [0.7071, -0.7071]  # statistics over the scored ones
    assert share.left_out == {"g#1": "status aborted", "g#2": "unscored (raised): ConnectionError"}


def test_a_reward_that_is_not_finite_is_unscored_not_zero():
    share, samples, _ = advantages([group(sample(0, 1.0), sample(1, float("nan")), sample(2, 0.0))])
    assert [s.sample_index for s in samples] == [0, 2]
    assert share.left_out == {"g#1": "unscored: the reward is nan"}


def test_both_counts_of_unscored_samples_are_those_that_are_left_out():
    share, _, made = advantages([group(sample(0, 1.0), sample(1, float("nan")), sample(2, None), sample(3, 0.0))])
    measured = rollout_measures(share, LOCAL)
    assert len(share.left_out) == 2
    assert measured["rollout/unscored"] == measured["rollout/unscored_samples"] == 2
    assert measured["rollout/raw_reward"] == 0.5
    assert made.metrics["singleton_group_samples"].value == 0


def test_an_id_that_looks_like_a_default_key_is_another_trajectory():
    """Three trajectories of rewards 1, 1, 0: A = R - 2/3; taken for one, the first two would give 1/2, 1/2, -1/2."""
    alike = [sample(0, 1.0, trajectory_id="#1"), sample(1, 1.0), sample(2, 0.0)]
    _, samples, _ = advantages([group(*alike)], AlgorithmConfig(estimator="dr_grpo"))
    assert [float(s.advantages[0]) for s in samples] == pytest.approx([1 / 3, 1 / 3, -2 / 3])


@pytest.mark.parametrize("second", ["h", "g"])
def test_trajectory_ids_are_the_groups_own_whatever_the_groups_are_called(second):
    """Two groups of ids t0 and t1, no fork: four trajectories in statistics and in denominators."""
    batch = [
        group(*(sample(i, float(i), 1 + i, group=name, trajectory_id=f"t{i}") for i in range(2)))
        for name in ("g", second)
    ]
    _, samples, _ = advantages(batch, AlgorithmConfig(estimator="dr_grpo"))
    assert [float(s.advantages[0]) for s in samples] == [-0.5, 0.5, -0.5, 0.5]
    index = global_trajectories(samples, LOCAL)
    assert (len(set(index.ids_B.tolist())), index.size) == (4, 4)


def test_the_overlong_penalty_is_the_trajectorys_that_of_its_longest_fork():
    config = AlgorithmConfig(estimator="dr_grpo", overlong=OverlongSettings(max_length=6, cache=4))
    forked = [sample(0, 1.0, 3, trajectory_id="t"), sample(1, 1.0, 5, trajectory_id="t"), sample(2, 1.0, 2)]
    share, samples, _ = advantages([group(*forked)], config)
    assert shaped_rewards(share, config).tolist() == [0.25, 0.25, 1.0]  # 5 tokens: -(5 - 2) / 4
    assert [float(s.advantages[0]) for s in samples] == [-0.375, -0.375, 0.375]
    shaped = shaping_measures(share, shaped_rewards(share, config), LOCAL)
    assert shaped == {"rollout/rewards": 0.625, "rollout/overlong_penalty": -0.375}  # by trajectory


def test_forks_of_unequal_reward_are_refused_naming_the_group():
    forked = [sample(0, 1.0, trajectory_id="t"), sample(1, 0.0, trajectory_id="t")]
    with pytest.raises(GroupError, match=r"group g: samples 0 and 1 forked from trajectory 't' .* rewards 1.0 and 0.0"):
        select([group(*forked)], [0], AlgorithmConfig())


def test_a_trajectory_counts_once_in_the_raw_reward():
    forked = [sample(0, 1.0, trajectory_id="t"), sample(1, 1.0, trajectory_id="t"), sample(2, 0.0)]
    share, _, _ = advantages([group(*forked)])
    assert rollout_measures(share, LOCAL)["rollout/raw_reward"] == 0.5


def test_a_failed_sample_has_no_length():
    failed = sample(2, None, tokens=0, status=trajectory_pb2.SAMPLE_STATUS_FAILED)
    share, _, _ = advantages([group(sample(0, 1.0, 4), sample(1, 0.0, 8), failed)])
    measured = rollout_measures(share, LOCAL)
    assert (measured["rollout/response_len/min"], measured["rollout/response_len/mean"]) == (4, 6)
    assert measured["rollout/unscored"] == 1
    share, _, _ = advantages([group(failed)])
    assert "rollout/response_len/min" not in rollout_measures(share, LOCAL)


def test_whitening_is_over_what_is_trained():
    """Statistics hold all four; the two that are trained get mean 0 and variance 1 over their tokens."""
    config = AlgorithmConfig(estimator="grpo", whiten=True, mask_truncated=True)
    cut = [sample(i, -1.0, status=CUT) for i in (2, 3)]
    _, samples, made = advantages([group(sample(0, 1.0), sample(1, 0.5), *cut)], config)
    trained = torch.cat([s.advantages for s in samples[:2]])
    assert float(trained.mean()) == pytest.approx(0, abs=1e-6)
    assert float(trained.var()) == pytest.approx(1, abs=1e-5)
    assert made.advantages_BT[2:].abs().sum() == 0


def test_a_demonstration_is_learnt_without_a_reward_and_at_temperature_1():
    config = AlgorithmConfig(objective="sft")
    share = select([group(sample(0, None), sample(1, float("nan")), temperature=0.6)], [0], config)
    assert [s.temperature for s in share.samples] == [1.0, 1.0]
    assert not share.left_out
    measured = rollout_measures(share, LOCAL)
    assert measured["rollout/unscored"] == 0
    assert "rollout/raw_reward" not in measured


@pytest.mark.parametrize("rewards", [[1e308, 1e308, 1e308, -1e308], [1e200, 0.0], [1e39, 0.0]])
def test_rewards_that_overflow_give_no_number_and_no_error(rewards):
    """The step is skipped, as for any loss that is not finite; an advantage of 0 would hide it."""
    config = AlgorithmConfig(estimator="dr_grpo" if rewards[0] == 1e39 else "grpo")
    _, samples, _ = advantages([group(*(sample(i, r) for i, r in enumerate(rewards)))], config)
    assert not any(bool(torch.isfinite(s.advantages).any()) for s in samples)


def test_equal_rewards_are_equal_however_large():
    _, samples, _ = advantages([group(*(sample(i, 1e308) for i in range(4)))])
    assert all(float(s.advantages.abs().sum()) == 0 for s in samples)


def test_the_mismatch_family_is_reported():
    _, samples, _ = advantages([group(sample(0, 1.0), sample(1, 0.0))])
    found = mismatch_family(samples, [s.rollout_logprobs + 0.1 for s in samples], True, LOCAL)
    assert found["train/mis_kl"] == pytest.approx(-0.1, rel=1e-5)
    assert found["train/mis_rollout_ppl"] == pytest.approx(np.exp(0.5))
    assert found["train/mis_training_ppl"] == pytest.approx(np.exp(0.4))
    assert found["train/mis_chi2_token"] == pytest.approx(np.exp(0.2) - 1, rel=1e-5)


def test_an_empty_response_is_left_out_with_the_reason():
    share, samples, _ = advantages([group(sample(0, 1.0), sample(1, 0.0, tokens=0))])
    assert len(samples) == 1
    assert share.left_out == {"g#1": "empty response"}


def test_groups_are_told_apart_by_id_whatever_their_sizes():
    _, samples, _ = advantages(
        [group(sample(0, 1.0), sample(1, 0.0)), group(*(sample(i, 1.0 * (i == 0), group="h") for i in range(4)))]
    )
    got = [round(float(s.advantages[0]), 4) for s in samples]
    assert got == [0.7071, -0.7071, 1.5, -0.5, -0.5, -0.5]


def test_k11_a_masked_truncated_sample_keeps_its_ids_and_leaves_loss_and_denominators():
    config = AlgorithmConfig(mask_truncated=True)
    share, samples, _ = advantages([group(sample(0, 1.0), sample(1, 0.0, status=CUT))], config)
    assert samples[1].response_token_ids.tolist() == [10, 11, 12]
    assert not samples[1].loss_mask.any()
    assert samples[0].loss_mask.all()
    measured = rollout_measures(share, LOCAL)
    assert measured["rollout/truncated_ratio"] == 0.5
    assert measured["rollout/response_len/mean"] == 3


def test_k11_length_metrics_count_every_sample():
    share, _, _ = advantages([group(sample(0, 1.0, 10), sample(1, 0.0, 20, status=CUT), sample(2, 0.0, 30))])
    measured = rollout_measures(share, LOCAL)
    assert (measured["rollout/response_len/mean"], measured["rollout/response_len/max"]) == (20, 30)
    assert measured["rollout/response_len/min"] == 10
    assert measured["rollout/truncated_ratio"] == pytest.approx(1 / 3)


def test_k02_logprobs_of_another_length_are_refused_with_both_numbers():
    bad = sample(0, 1.0)
    del bad.rollout_logprobs[:]
    bad.rollout_logprobs.extend([-0.1] * 4)
    with pytest.raises(SampleError, match=r"3 response tokens but rollout_logprobs has shape \(4,\)"):
        select([group(bad)], [0], AlgorithmConfig())


def test_k04_routing_rows_must_cover_the_consumed_tokens():
    short = sample(0, 1.0)
    short.routed_experts.CopyFrom(RoutingTrace(segments=[routes(np.zeros((3, 2, 2), np.uint8))]))
    with pytest.raises(RoutingTraceError, match="4 consumed tokens but 3 routing rows"):
        select([group(short)], [0], AlgorithmConfig())


def test_segments_join_in_token_order_and_keep_their_bytes():
    whole = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    made = sample(0, 1.0)
    made.routed_experts.segments.extend([routes(whole[:1]), routes(whole[1:], first=1)])
    assert torch.equal(routes_of(made), torch.from_numpy(whole))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (routes(np.zeros((4, 2, 2), np.uint8), first=1), "starts at token 1, the last ended at 0"),
        (routes(np.zeros((4, 2, 2), np.uint8), digest="00" * 16), "do not have the digest"),
    ],
)
def test_a_segment_that_lies_is_refused(segment, message):
    made = sample(0, 1.0)
    made.routed_experts.segments.append(segment)
    with pytest.raises(GroupError, match=message):
        routes_of(made)


def test_the_mismatch_is_split_by_what_the_versions_say():
    def versioned(index, *steps):
        made = sample(index, float(index % 2))
        for at, step in enumerate(steps):
            span = made.version_spans.add(first_token=at)
            span.weight_version.step = step
        return made

    _, samples, _ = advantages([group(versioned(0, 5), versioned(1, 4), versioned(2, 4, 5))])
    scored = [s.rollout_logprobs + gap for s, gap in zip(samples, (0.001, 0.01, 0.1), strict=True)]
    measured = mismatch_measures(samples, scored, 5, LOCAL)
    name = "train/train_rollout_logprob_abs_diff"
    assert measured[f"{name}_on_policy"] == pytest.approx(0.001, rel=1e-4)
    assert measured[f"{name}_stale"] == pytest.approx(0.01, rel=1e-4)
    assert measured[f"{name}_mixed"] == pytest.approx(0.1, rel=1e-4)
    assert measured[name] == pytest.approx(0.037, rel=1e-4)
    assert measured["train/mismatch_kl"] == pytest.approx(0.001**2 / 2, rel=1e-2)


def test_the_trainer_divides_by_the_temperature_that_was_sampled_at():
    share = select([group(sample(0, 1.0), temperature=0.7)], [0], AlgorithmConfig())
    assert share.samples[0].temperature == pytest.approx(0.7)


def test_parts_of_the_reward_are_means_over_the_samples_that_have_them():
    parts = [{"right": 1.0, "form": 0.5}, {"right": 0.0}, {"right": float("nan")}]
    share, *_ = advantages([group(*(sample(i, 1.0, reward_parts=part) for i, part in enumerate(parts)))])
    assert reward_part_measures(share, LOCAL) == {"rollout/reward/right": 0.5, "rollout/reward/form": 0.5}


def test_more_parts_than_people_can_read_are_left_out_and_counted():
    share, *_ = advantages([group(sample(0, 1.0, reward_parts={f"p{i:02}": float(i) for i in range(20)}))])
    measured = reward_part_measures(share, LOCAL)
    assert measured.pop("rollout/reward_parts_left_out") == 4
    assert measured == {f"rollout/reward/p{i:02}": float(i) for i in range(16)}
