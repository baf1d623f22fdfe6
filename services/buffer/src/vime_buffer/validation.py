"""Checks of a finished group before it enters the ledger: what is wrong is refused here, never padded, cut or guessed.

Every refusal names the field of the contract, the sample, and both numbers that disagree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vime_buffer.content import GroupContent, GroupRules, SampleContent, Span
from vime_buffer.routes import check_routes
from vime_buffer.values import DROP_DELETED, GroupFacts, ModelLimits, Version
from vime_service.errors import BadRoutingTrace, InvalidArgument, LengthMismatch

_LONGEST_NAME = 128
_LEAST_LOGPROB = -1000.0
_LARGEST_REWARD = 1e30
"""Its square, summed over a group, is a float64 by far."""
_ENGINES = 16
"""Engines of one group that are remembered by name."""
_REASON = re.compile("[a-z0-9_]{1,64}")


def check_group(group: GroupContent, rules: GroupRules) -> GroupFacts:
    """The facts that the ledger keeps of a group that passes every check.

    Raises:
        LengthMismatch: arrays that belong together differ in length, or the number of samples is wrong.
        BadRoutingTrace: routing rows are missing, extra, duplicate or out of range.
        InvalidArgument: any other field is wrong.
    """
    _check_trajectories(group, rules)
    _check_prompts(group)
    shapes: set[tuple[object, ...]] = set()
    for position, sample in enumerate(group.samples):
        where = f"samples[{position}]"
        _check_identity(group, sample, position, where)
        _check_status(sample, where)
        _check_lengths(sample, rules, where)
        if rules.model is not None:
            _check_tokens(sample, rules.model, where)
        _check_logprobs(sample, where)
        _check_spans(sample, rules, where)
        _check_reward(sample, rules, where)
        shape = _check_routing(sample, rules, where)
        if shape is not None:
            shapes.add(shape)
    if len(shapes) > 1:
        raise BadRoutingTrace(
            f"group {group.group_id}: its samples disagree about layers, experts or top-k: {sorted(map(str, shapes))}",
            expected=1,
            actual=len(shapes),
        )
    return _facts(group, _seeds(group) if rules.needs_logprobs else ())


def _trajectories(group: GroupContent) -> list[list[tuple[int, SampleContent]]]:
    """Samples with their positions, those that forked from one trajectory together."""
    found: dict[object, list[tuple[int, SampleContent]]] = {}
    for position, sample in enumerate(group.samples):
        found.setdefault(sample.trajectory_id or position, []).append((position, sample))
    return list(found.values())


def _check_trajectories(group: GroupContent, rules: GroupRules) -> None:
    """As many as the lease asked for; the samples of one have one reward, since it is the trajectory's."""
    trajectories = _trajectories(group)
    if len(trajectories) != rules.num_samples:
        raise LengthMismatch(
            f"group {group.group_id} has {len(trajectories)} samples, its lease asked for {rules.num_samples}",
            field="samples",
            expected=rules.num_samples,
            actual=len(trajectories),
        )
    for forks in trajectories:
        first, sample = forks[0]
        name = sample.trajectory_id
        if len(forks) > rules.max_forks:
            raise InvalidArgument(
                f'group {group.group_id}: trajectory "{name[:_LONGEST_NAME]}" has {len(forks)} samples, '
                f"max_forks is {rules.max_forks}",
                field="samples.trajectory_id",
                limit=rules.max_forks,
                actual=len(forks),
            )
        for position, other in forks[1:]:
            if other.reward != sample.reward:
                raise InvalidArgument(
                    f'samples[{first}] and samples[{position}] are of trajectory "{name[:_LONGEST_NAME]}" and have the '
                    f"rewards {_said(sample.reward)} and {_said(other.reward)}: a trajectory has one reward",
                    field=f"samples[{position}].reward",
                    expected=_said(sample.reward),
                    actual=_said(other.reward),
                )


def _said(reward: float | None) -> object:
    return "unscored" if reward is None else reward


def _check_prompts(group: GroupContent) -> None:
    """Samples that stand alone continue the same prompt."""
    alone = [(n, s) for n, s in enumerate(group.samples) if not s.trajectory_id and s.prompt_tokens]
    if not alone:
        return
    first, other = alone[0]
    prompt = _ids(other.prompt_ids)
    for position, sample in alone[1:]:
        if not np.array_equal(prompt, _ids(sample.prompt_ids)):
            raise InvalidArgument(
                f"samples[{position}].prompt_token_ids are others than those of samples[{first}] "
                f"({sample.prompt_tokens} and {other.prompt_tokens} ids): samples of a group have one prompt",
                field=f"samples[{position}].prompt_token_ids",
                expected=other.prompt_tokens,
                actual=sample.prompt_tokens,
            )


def _ids(ids: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(ids, dtype=np.int64)


def _check_tokens(sample: SampleContent, model: ModelLimits, where: str) -> None:
    """What the model cannot have read or said."""
    total = sample.prompt_tokens + sample.response_tokens
    if 0 < model.max_model_len < total:
        raise InvalidArgument(
            f"{where} has {total} prompt and response tokens; the model takes at most {model.max_model_len}",
            field=where,
            limit=model.max_model_len,
            actual=total,
        )
    if model.vocab_size == 0:
        return
    for name, ids in (("prompt_token_ids", sample.prompt_ids), ("response_token_ids", sample.response_ids)):
        wrong = np.flatnonzero(_ids(ids) >= model.vocab_size)
        if wrong.size:
            index = int(wrong[0])
            raise InvalidArgument(
                f"{where}.{name}[{index}] is {ids[index]}; the model's vocabulary has {model.vocab_size} tokens",
                field=f"{where}.{name}",
                index=index,
                value=ids[index],
                limit=model.vocab_size,
            )


def _check_identity(group: GroupContent, sample: SampleContent, position: int, where: str) -> None:
    if sample.group_id != group.group_id:
        raise InvalidArgument(
            f'{where}.group_id is "{sample.group_id}" in group "{group.group_id}"',
            field=f"{where}.group_id",
            expected=group.group_id,
            actual=sample.group_id,
        )
    if sample.sample_index != position:
        raise InvalidArgument(
            f"{where}.sample_index is {sample.sample_index}: samples stand in the order of their index, without gaps",
            field=f"{where}.sample_index",
            expected=position,
            actual=sample.sample_index,
        )


def _check_status(sample: SampleContent, where: str) -> None:
    for field, value in (("status", sample.status), ("finish_reason", sample.finish_reason)):
        if not value and not (field == "finish_reason" and sample.status == "FAILED"):
            raise InvalidArgument(f"{where}.{field} is unspecified", field=f"{where}.{field}")
    if sample.status == "COMPLETED" and sample.finish_reason != "STOP":
        raise InvalidArgument(
            f"{where} is COMPLETED with finish_reason {sample.finish_reason}: what ended by itself ended with STOP",
            field=f"{where}.finish_reason",
            expected="STOP",
            actual=sample.finish_reason,
        )
    if sample.prompt_tokens == 0 and sample.status != "FAILED":
        raise InvalidArgument(f"{where}.prompt_token_ids is empty", field=f"{where}.prompt_token_ids")


def _check_lengths(sample: SampleContent, rules: GroupRules, where: str) -> None:
    tokens, logprobs, mask = sample.response_tokens, len(sample.logprobs), len(sample.loss_mask)
    if logprobs != tokens and (rules.needs_logprobs or logprobs):
        raise LengthMismatch(
            f"{where} has {tokens} response_token_ids and {logprobs} rollout_logprobs",
            field=f"{where}.rollout_logprobs",
            expected=tokens,
            actual=logprobs,
        )
    if mask not in (0, tokens):
        raise LengthMismatch(
            f"{where} has {tokens} response_token_ids and {mask} loss_mask entries",
            field=f"{where}.loss_mask",
            expected=tokens,
            actual=mask,
        )


def _check_logprobs(sample: SampleContent, where: str) -> None:
    """No sampler draws what has no measurable probability. What is masked was not sampled, and nobody reads it."""
    values = np.asarray(sample.logprobs, dtype=np.float64)
    fits = (values >= _LEAST_LOGPROB) & (values <= 0)
    wrong = np.flatnonzero(~fits & np.asarray(sample.loss_mask, dtype=bool) if sample.loss_mask else ~fits)
    if not wrong.size:
        return
    index, value = int(wrong[0]), float(values[wrong[0]])
    raise InvalidArgument(
        f"{where}.rollout_logprobs[{index}] is {value}: "
        f"a sampled token's logprob lies between {_LEAST_LOGPROB:g} and 0",
        field=f"{where}.rollout_logprobs",
        index=index,
        value=value,
    )


def _check_spans(sample: SampleContent, rules: GroupRules, where: str) -> None:
    spans: Sequence[Span] = sample.spans
    field = f"{where}.version_spans"
    if not sample.response_tokens:
        if spans:
            raise InvalidArgument(f"{field} has {len(spans)} spans over an empty response", field=field)
        return
    if not spans:
        if rules.needs_logprobs:
            raise InvalidArgument(f"{field} is empty: {sample.response_tokens} tokens have no version", field=field)
        return
    starts = [span.first_token for span in spans]
    if starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
        raise InvalidArgument(f"{field} must begin at token 0 and rise, found {starts[:8]}", field=field)
    if starts[-1] >= sample.response_tokens:
        raise InvalidArgument(
            f"{field} begins a span at token {starts[-1]} of {sample.response_tokens}",
            field=field,
            expected=sample.response_tokens,
            actual=starts[-1],
        )
    for span in spans:
        if span.version.run_id != rules.run_id:
            raise InvalidArgument(
                f'{field} names a version of run "{span.version.run_id}", this is run "{rules.run_id}"',
                field=field,
                expected=rules.run_id,
                actual=span.version.run_id,
            )


def _check_reward(sample: SampleContent, rules: GroupRules, where: str) -> None:
    if len(sample.reward_parts) > rules.max_reward_parts or any(len(p) > _LONGEST_NAME for p in sample.reward_parts):
        raise InvalidArgument(
            f"{where}.reward_parts has {len(sample.reward_parts)} parts, the longest name has "
            f"{max(map(len, sample.reward_parts))} characters; max_reward_parts is {rules.max_reward_parts}, "
            f"a name has at most {_LONGEST_NAME}",
            field=f"{where}.reward_parts",
            limit=rules.max_reward_parts,
            actual=len(sample.reward_parts),
        )
    if sample.reward is None:
        if not sample.unscored_reason:
            raise InvalidArgument(
                f"{where} has neither a reward nor an unscored_reason", field=f"{where}.unscored_reason"
            )
        return
    if not math.isfinite(sample.reward):
        raise InvalidArgument(
            f"{where}.reward is {sample.reward}: such a sample is unscored, with the reason NOT_FINITE",
            field=f"{where}.reward",
            value=sample.reward,
        )
    if abs(sample.reward) > _LARGEST_REWARD:
        raise InvalidArgument(
            f"{where}.reward is {sample.reward}: beyond {_LARGEST_REWARD:g} the statistics of a group overflow",
            field=f"{where}.reward",
            value=sample.reward,
            limit=_LARGEST_REWARD,
        )
    if sample.unscored_reason:
        raise InvalidArgument(
            f"{where} has the reward {sample.reward} and the unscored_reason {sample.unscored_reason}",
            field=f"{where}.unscored_reason",
            value=sample.unscored_reason,
        )


def _check_routing(sample: SampleContent, rules: GroupRules, where: str) -> tuple[object, ...] | None:
    if sample.routes is not None:
        return check_routes(sample.routes, sample.consumed_tokens, rules.run_id, f"{where}.routed_experts", rules.model)
    if rules.require_routes and sample.response_tokens and sample.trainable:
        raise BadRoutingTrace(
            f"{where}.routed_experts is missing: expected {sample.consumed_tokens} rows, found 0",
            field=f"{where}.routed_experts",
            expected=sample.consumed_tokens,
            actual=0,
        )
    return None


def _seeds(group: GroupContent) -> tuple[int, ...]:
    """The seed of each trajectory: one for all its samples, and for no other's, or two of them are the same answer."""
    found: dict[int, int] = {}
    for number, forks in enumerate(_trajectories(group)):
        sampled = [(position, sample.seed) for position, sample in forks if sample.status != "FAILED"]
        for position, seed in sampled:
            if found.setdefault(seed, number) != number or seed != sampled[0][1]:
                raise InvalidArgument(
                    f"samples[{position}].seed is {seed}: a trajectory has one seed, which is no other's",
                    field=f"samples[{position}].seed",
                    value=seed,
                )
    return tuple(found)


def _facts(group: GroupContent, seeds: tuple[int, ...]) -> GroupFacts:
    versions: set[Version] = {span.version for sample in group.samples for span in sample.spans}
    return GroupFacts(
        group_id=group.group_id,
        attempt=group.attempt,
        table=group.table,
        prompt_id=group.prompt_id,
        sample_tokens=tuple(sample.prompt_tokens + sample.response_tokens for sample in group.samples),
        response_tokens=sum(sample.response_tokens for sample in group.samples),
        truncated=sum(1 for sample in group.samples if sample.status == "TRUNCATED"),
        rewards=tuple(sample.reward for sample in group.samples if sample.reward is not None),
        versions=tuple(sorted(versions, key=lambda version: (version.step, version.incarnation))),
        engines=tuple(sorted({sample.engine_id[:_LONGEST_NAME] for sample in group.samples} - {""})[:_ENGINES]),
        seeds=seeds,
    )


def check_drop_reason(reason: str) -> None:
    """A reason becomes the name of a count.

    Raises:
        InvalidArgument: it is no short word, or the word for groups that were deleted by hand.
    """
    if not _REASON.fullmatch(reason) or reason == DROP_DELETED:
        raise InvalidArgument(
            f'drop_reason "{reason[:80]}" must be a word of at most 64 of the characters a-z, 0-9 and _, '
            f'other than "{DROP_DELETED}"',
            field="drop_reason",
            value=reason[:80],
        )
