"""From what an engine generated to the samples of a group: nothing added, nothing shifted, everything checked."""

from __future__ import annotations

from collections.abc import Sequence

from vime.buffer.v1 import prompt_service_pb2
from vime.common.v1 import trajectory_pb2 as pb
from vime.rollout.v1 import generation_service_pb2

_STATUS = {
    pb.FINISH_REASON_STOP: pb.SAMPLE_STATUS_COMPLETED,
    pb.FINISH_REASON_LENGTH: pb.SAMPLE_STATUS_TRUNCATED,
    pb.FINISH_REASON_ABORT: pb.SAMPLE_STATUS_ABORTED,
}


class BadGeneration(Exception):
    """The engine's answer does not fit the request; the message says what and by how much."""


class Aborted(Exception):
    """Samples were aborted, such as by a weight update; the group is to be generated again."""


def build_group(
    lease: prompt_service_pb2.PromptLease,
    prompt_token_ids: Sequence[int],
    answer: generation_service_pb2.GenerateResponse,
) -> pb.TrajectoryGroup:
    """The group of a lease, without rewards.

    Raises:
        Aborted: a sample was aborted before its end.
        BadGeneration: samples are missing or their lengths disagree.
    """
    check_generation(lease, answer)
    return pb.TrajectoryGroup(
        group_id=lease.group_id,
        attempt=lease.attempt,
        table=lease.table,
        prompt=lease.prompt,
        sampling=lease.sampling,
        samples=[
            pb.Sample(
                group_id=lease.group_id,
                sample_index=index,
                prompt_token_ids=prompt_token_ids,
                response_token_ids=generated.response_token_ids,
                rollout_logprobs=generated.rollout_logprobs,
                version_spans=generated.version_spans,
                routed_experts=generated.routed_experts if generated.HasField("routed_experts") else None,
                finish_reason=generated.finish_reason,
                status=_STATUS.get(generated.finish_reason, pb.SAMPLE_STATUS_FAILED),
                response_text=generated.text,
                cached_tokens=generated.cached_tokens,
                seed=lease.seeds[index],
                generation_time=generated.generation_time,
                engine_id=answer.engine_id,
            )
            for index, generated in enumerate(answer.samples)
        ],
    )


def check_generation(lease: prompt_service_pb2.PromptLease, answer: generation_service_pb2.GenerateResponse) -> None:
    """Refuse what must not become a sample."""
    if len(answer.samples) != lease.num_samples:
        raise BadGeneration(f"engine {answer.engine_id} returned {len(answer.samples)} of {lease.num_samples} samples")
    for index, sample in enumerate(answer.samples):
        where = f"sample {index} of engine {answer.engine_id}"
        if sample.sample_index != index:
            raise BadGeneration(f"{where} says that it is sample {sample.sample_index}")
        if sample.finish_reason == pb.FINISH_REASON_ABORT:
            raise Aborted(f"{where} was aborted after {len(sample.response_token_ids)} tokens")
        if sample.finish_reason not in _STATUS:
            raise BadGeneration(f"{where} has finish reason {sample.finish_reason}, which this client does not know")
        if len(sample.rollout_logprobs) != len(sample.response_token_ids):
            raise BadGeneration(
                f"{where} has {len(sample.response_token_ids)} tokens and {len(sample.rollout_logprobs)} logprobs"
            )
        if not sample.version_spans:
            raise BadGeneration(f"{where} does not say which weights generated it")
