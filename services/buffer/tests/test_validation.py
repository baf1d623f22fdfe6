"""What InsertGroup refuses. K02: token/logprob alignment; K04: routing rows."""

from __future__ import annotations

import dataclasses
import math

import pytest

from vime_buffer.content import GroupContent, GroupRules, RouteSegment, RouteTrace, SampleContent, Span
from vime_buffer.digests import payload_digest
from vime_buffer.validation import check_group
from vime_buffer.values import ModelLimits, Version
from vime_service.errors import BadRoutingTrace, DigestMismatch, InvalidArgument, LengthMismatch

V = Version("run", 1, 3)
RULES = GroupRules(run_id="run", num_samples=1, require_routes=False)


def numbers(values, item=1):
    return b"".join(value.to_bytes(item, "little") for value in values)


def trace(rows, *, first=0, layers=3, top_k=2, experts=8, data=None, **changes):
    item = 1 if experts <= 256 else 2
    data = numbers(range(top_k), item) * (rows * layers) if data is None else data
    segment = RouteSegment(
        first_token=first,
        rows=rows,
        version=V,
        source_known=True,
        dtype="UINT8" if item == 1 else "UINT16",
        shape=(rows, layers, top_k),
        digest=payload_digest(data).hex(),
        inline=data,
    )
    return RouteTrace([dataclasses.replace(segment, **changes)], list(range(1, layers + 1)), experts)


def sample(index=0, *, prompt=4, response=3, **changes):
    base = SampleContent(
        group_id="g",
        sample_index=index,
        prompt_ids=range(1, prompt + 1),
        response_ids=range(response),
        loss_mask=(),
        logprobs=[-0.5] * response,
        spans=[Span(0, V)] if response else [],
        routes=None,
        finish_reason="STOP",
        status="COMPLETED",
        reward=1.0,
        unscored_reason="",
        trajectory_id="",
        seed=100 + index,
    )
    return dataclasses.replace(base, **changes)


def group(*samples):
    return GroupContent("g", 0, "train", "p", samples or (sample(),))


def refusal(kind, rules, *samples):
    with pytest.raises(kind) as caught:
        check_group(group(*samples), rules)
    return caught.value


def test_a_good_group_gives_its_facts():
    old = Version("run", 1, 2)
    facts = check_group(
        group(
            sample(0, reward=True, spans=[Span(0, old), Span(2, V)]),
            sample(1, reward=3, status="TRUNCATED", finish_reason="LENGTH"),
            sample(2, reward=None, unscored_reason="RAISED"),
        ),
        GroupRules("run", 3, require_routes=False),
    )
    assert facts.sample_tokens == (7, 7, 7)
    assert (facts.response_tokens, facts.truncated, facts.rewards) == (9, 1, (True, 3))
    assert facts.versions == (old, V)
    assert facts.seeds == (100, 101, 102)


# ------------------------------------------------------------------ K02


@pytest.mark.parametrize("count", [4, 6])
def test_k02_five_tokens_with_four_or_six_logprobs_name_both_lengths(count):
    error = refusal(LengthMismatch, RULES, sample(response=5, logprobs=[-0.1] * count))
    assert "5 response_token_ids" in error.message
    assert f"{count} rollout_logprobs" in error.message
    assert error.metadata == {"field": "samples[0].rollout_logprobs", "expected": "5", "actual": str(count)}


@pytest.mark.parametrize("value", [0.001, math.nan, -math.inf, math.inf, -3e38, -1000.5])
def test_k02_a_value_that_is_no_logprob_is_refused_with_its_position(value):
    error = refusal(InvalidArgument, RULES, sample(logprobs=[-1.0, value, -1.0]))
    assert error.metadata["index"] == "1"
    assert "rollout_logprobs[1]" in error.message


def test_zero_is_a_logprob():
    check_group(group(sample(logprobs=[0.0, -0.0, -1000.0])), RULES)


def test_what_stands_at_a_masked_token_is_not_looked_at_as_in_training():
    masked = {"logprobs": [-1.0, math.nan, math.inf], "loss_mask": [True, False, False]}
    check_group(group(sample(**masked)), RULES)
    masked["loss_mask"] = [True, False, True]
    assert refusal(InvalidArgument, RULES, sample(**masked)).metadata["index"] == "2"


def test_a_loss_mask_is_whole_or_absent():
    check_group(group(sample(loss_mask=[True] * 3)), RULES)
    assert refusal(LengthMismatch, RULES, sample(loss_mask=[True] * 2)).metadata["field"] == "samples[0].loss_mask"


# ------------------------------------------------------------------ K04: prompt 4 ids, 3 new tokens: 6 rows


ROUTED = GroupRules(run_id="run", num_samples=1, require_routes=True)


def test_k04_six_rows_of_three_layers_pass():
    check_group(group(sample(routes=trace(6))), ROUTED)


@pytest.mark.parametrize("rows", [5, 7, 8])
def test_k04_short_and_long_traces_name_expected_and_actual(rows):
    error = refusal(BadRoutingTrace, ROUTED, sample(routes=trace(rows)))
    assert (error.metadata["expected"], error.metadata["actual"]) == ("6", str(rows))
    assert f"{rows} rows for 6 consumed tokens" in error.message


def test_k04_absent_rows_are_refused_for_a_whole_group_and_for_one_of_four():
    error = refusal(BadRoutingTrace, ROUTED, sample())
    assert (error.metadata["expected"], error.metadata["actual"]) == ("6", "0")
    rules = dataclasses.replace(ROUTED, num_samples=4)
    samples = [sample(index, routes=None if index == 2 else trace(6)) for index in range(4)]
    assert refusal(BadRoutingTrace, rules, *samples).metadata["field"] == "samples[2].routed_experts"


def test_k04_absent_rows_are_fine_where_no_routes_are_asked_for_or_nothing_can_be_trained():
    check_group(group(sample()), RULES)
    aborted = sample(status="ABORTED", finish_reason="ABORT", reward=None, unscored_reason="NO_RESPONSE")
    check_group(group(aborted), ROUTED)


def two_segments(first_rows, second_first, second_rows):
    return RouteTrace([trace(first_rows).segments[0], trace(second_rows, first=second_first).segments[0]], [1, 2, 3], 8)


def test_segments_that_join_pass_and_gaps_and_overlaps_are_named():
    check_group(group(sample(routes=two_segments(4, 4, 2))), ROUTED)
    for first in (3, 5):
        error = refusal(BadRoutingTrace, ROUTED, sample(routes=two_segments(4, first, 2)))
        assert error.metadata["field"] == "samples[0].routed_experts.segments[1]"
        assert (error.metadata["expected"], error.metadata["actual"]) == ("4", str(first))


@pytest.mark.parametrize(
    ("changes", "kind", "what"),
    [
        ({"shape": (6, 2, 2)}, BadRoutingTrace, "shape"),
        ({"shape": (6, 3)}, BadRoutingTrace, "shape"),
        ({"shape": (6, 3, 9)}, BadRoutingTrace, "shape"),
        ({"shape": (6, 3, 2**40)}, BadRoutingTrace, "shape"),  # a claim is checked before anything is allocated
        ({"shape": (6, 3, 3)}, BadRoutingTrace, "36 bytes, its shape says 54"),
        ({"dtype": "UINT16"}, InvalidArgument, "8 experts go as UINT8"),
        ({"dtype": ""}, InvalidArgument, "of no dtype"),
        ({"source_known": False}, InvalidArgument, "source"),
        ({"version": Version("other", 1, 3)}, InvalidArgument, 'of run "other"'),
        ({"digest": "0" * 32}, DigestMismatch, "digest"),
        ({"inline": None}, InvalidArgument, "comes as a payload handle; routes are taken inline only"),
    ],
)
def test_a_segment_that_lies_about_itself_is_refused(changes, kind, what):
    assert what in refusal(kind, ROUTED, sample(routes=trace(6, **changes))).message


@pytest.mark.parametrize(("experts", "highest"), [(8, 8), (8, 255), (300, 300), (300, 65535)])
def test_an_expert_that_does_not_exist_is_named(experts, highest):
    item = 1 if experts <= 256 else 2
    data = bytearray(numbers(range(2), item) * 18)
    data[-item:] = highest.to_bytes(item, "little")
    error = refusal(BadRoutingTrace, ROUTED, sample(routes=trace(6, experts=experts, data=bytes(data))))
    assert f"expert {highest} of {experts}" in error.message


def test_samples_of_one_group_agree_about_the_model():
    rules = dataclasses.replace(ROUTED, num_samples=2)
    error = refusal(BadRoutingTrace, rules, sample(routes=trace(6)), sample(1, routes=trace(6, experts=16)))
    assert "disagree" in error.message


# ------------------------------------------------------------------ the rest


def test_the_number_of_samples_is_the_lease_s_and_forks_count_once():
    rules = GroupRules("run", 2, require_routes=False)
    error = refusal(LengthMismatch, rules, sample())
    assert (error.metadata["expected"], error.metadata["actual"]) == ("2", "1")
    check_group(group(*forked(sample(0), sample(1)), sample(2)), rules)
    error = refusal(
        InvalidArgument, dataclasses.replace(rules, max_forks=3), *forked(*map(sample, range(4))), sample(4)
    )
    assert "4 samples, max_forks is 3" in error.message


def forked(*samples):
    return [dataclasses.replace(s, trajectory_id="t", seed=7) for s in samples]


@pytest.mark.parametrize("other", [{"reward": 0.5}, {"reward": None, "unscored_reason": "RAISED"}])
def test_a_trajectory_has_one_reward(other):
    first, second = forked(sample(0), sample(1, **other))
    error = refusal(InvalidArgument, RULES, first, second)
    assert (error.metadata["field"], error.metadata["expected"]) == ("samples[1].reward", "1.0")
    assert 'samples[0] and samples[1] are of trajectory "t"' in error.message


def test_samples_that_stand_alone_have_one_prompt_and_a_seed_each():
    rules = dataclasses.replace(RULES, num_samples=2)
    error = refusal(InvalidArgument, rules, sample(0), sample(1, prompt_ids=[1, 2, 3, 5]))
    assert error.metadata["field"] == "samples[1].prompt_token_ids"
    error = refusal(InvalidArgument, rules, sample(0), sample(1, seed=100))
    assert (error.metadata["field"], error.metadata["value"]) == ("samples[1].seed", "100")
    first, second = forked(sample(0), sample(1))
    other = dataclasses.replace(second, seed=8)
    assert refusal(InvalidArgument, RULES, first, other).metadata["field"] == "samples[1].seed"
    check_group(group(first, dataclasses.replace(second, prompt_ids=[9])), RULES)  # forks go on from where they left


# ------------------------------------------------------------------ the model


MODEL = ModelLimits(vocab_size=50, max_model_len=7, moe_layer_ids=(1, 2, 3), num_experts=8, top_k=2)
KNOWN = dataclasses.replace(ROUTED, model=MODEL)


def test_what_the_model_can_have_produced_passes():
    check_group(group(sample(response_ids=[0, 49, 7], routes=trace(6))), KNOWN)


@pytest.mark.parametrize(("field", "count"), [("prompt_ids", 4), ("response_ids", 3)])
@pytest.mark.parametrize("token", [50, 999, 2**32 - 1])
def test_a_token_outside_of_the_vocabulary_is_named(field, count, token):
    error = refusal(InvalidArgument, KNOWN, sample(**{field: [3] * (count - 1) + [token]}, routes=trace(6)))
    assert f"[{count - 1}] is {token}; the model's vocabulary has 50 tokens" in error.message


def test_a_sequence_longer_than_the_model_takes_is_refused_with_both_numbers():
    error = refusal(InvalidArgument, KNOWN, sample(response=4, routes=trace(7)))
    assert "8 prompt and response tokens; the model takes at most 7" in error.message


@pytest.mark.parametrize(
    ("routes", "what"),
    [
        (
            lambda: dataclasses.replace(trace(6), moe_layer_ids=[0, 1, 2]),
            "moe_layer_ids is [0, 1, 2], the model's is [1",
        ),
        (lambda: trace(6, layers=2), "moe_layer_ids is [1, 2], the model's is [1, 2, 3]"),
        (lambda: dataclasses.replace(trace(6), num_experts=512), "num_experts is 512, the model's is 8"),
        (lambda: trace(6, top_k=3), "top_k is 3, the model's is 2"),
    ],
)
def test_routes_of_another_model_are_refused_and_both_are_named(routes, what):
    assert what in refusal(BadRoutingTrace, KNOWN, sample(routes=routes())).message


def test_a_dense_model_has_no_routes():
    rules = dataclasses.replace(RULES, model=ModelLimits(vocab_size=50))
    assert "the model's is []" in refusal(BadRoutingTrace, rules, sample(routes=trace(6))).message
    check_group(group(sample()), rules)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (300, 2), (8, 5), (200, 40)])
def test_an_expert_that_is_chosen_twice_is_refused_with_its_place(experts, top_k):
    item = 1 if experts <= 256 else 2
    row = list(range(top_k))
    rows = [row] * 18
    rows[3 * 4 + 1] = [*row[:-1], row[0]]  # token 4, the second of three layers
    data = b"".join(numbers(row, item) for row in rows)
    error = refusal(BadRoutingTrace, ROUTED, sample(routes=trace(6, top_k=top_k, experts=experts, data=data)))
    assert "for token 4 in layer 2: an expert is chosen once" in error.message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"group_id": "h"}, "group_id"),
        ({"sample_index": 1}, "sample_index"),
        ({"status": ""}, "status"),
        ({"finish_reason": ""}, "finish_reason"),
        ({"prompt_ids": ()}, "prompt_token_ids"),
        ({"finish_reason": "LENGTH"}, "finish_reason"),
        ({"finish_reason": "ABORT"}, "finish_reason"),
        ({"spans": []}, "version_spans"),
        ({"spans": [Span(1, V)]}, "version_spans"),
        ({"spans": [Span(0, V), Span(0, V)]}, "version_spans"),
        ({"spans": [Span(0, V), Span(3, V)]}, "version_spans"),
        ({"spans": [Span(0, Version("other", 1, 3))]}, "version_spans"),
        ({"response_ids": (), "logprobs": []}, "version_spans"),
        ({"reward": math.nan}, "reward"),
        ({"reward": math.inf}, "reward"),
        ({"reward": 1e308}, "reward"),
        ({"reward": -1e200}, "reward"),
        ({"reward_parts": [str(n) for n in range(65)]}, "reward_parts"),
        ({"reward_parts": ["x" * 129]}, "reward_parts"),
        ({"reward": None}, "unscored_reason"),
        ({"unscored_reason": "RAISED"}, "unscored_reason"),
    ],
)
def test_every_wrong_field_is_named(changes, field):
    error = refusal(InvalidArgument, RULES, sample(**changes))
    assert error.metadata["field"] == f"samples[0].{field}"


def test_a_reward_that_is_no_number_differs_from_no_other():
    assert "NOT_FINITE" in refusal(InvalidArgument, RULES, sample(reward=math.nan)).message


def test_a_failed_sample_needs_no_tokens_and_an_empty_response_no_version():
    failed = sample(prompt=0, response=0, status="FAILED", finish_reason="", reward=None, unscored_reason="NO_RESPONSE")
    assert check_group(group(failed), RULES).versions == ()


def test_sft_groups_have_no_logprobs_but_never_half_of_them():
    rules = dataclasses.replace(RULES, needs_logprobs=False)
    check_group(group(sample(logprobs=[], spans=[])), rules)
    refusal(LengthMismatch, rules, sample(logprobs=[-0.5]))
