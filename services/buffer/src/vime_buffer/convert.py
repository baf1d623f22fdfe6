"""Protobuf to values and back, field by field. No decision is made here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration

from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1 import table_service_pb2 as table_pb
from vime.common.v1 import engine_pb2 as engine_pb
from vime.common.v1 import tensor_pb2 as tensor_pb
from vime.common.v1 import trajectory_pb2 as trajectory_pb
from vime.common.v1 import weight_version_pb2 as version_pb
from vime_buffer.content import GroupContent, RouteSegment, RouteTrace, SampleContent, Span
from vime_buffer.messages import chat_message
from vime_buffer.settings import SamplingSettings, TableSettings
from vime_buffer.values import GroupRow, LeaseGrant, ModelLimits, PromptRecord, QuarantinedRow, Version
from vime_buffer.views import Counts, TableView

_SELECTORS = {
    table_pb.SELECTOR_UNSPECIFIED: "admission_order",
    table_pb.SELECTOR_ADMISSION_ORDER: "admission_order",
    table_pb.SELECTOR_READY_FIRST: "ready_first",
}


def duration(seconds: float) -> Duration:
    """Seconds as a Duration."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=round((seconds - whole) * 1e9))


def seconds_of(value: Duration) -> float:
    """A Duration as seconds."""
    return value.seconds + value.nanos / 1e9


def version_to_proto(version: Version) -> version_pb.WeightVersion:
    """A version on the wire."""
    return version_pb.WeightVersion(run_id=version.run_id, incarnation=version.incarnation, step=version.step)


def version_from_proto(version: version_pb.WeightVersion) -> Version:
    """A version from the wire."""
    return Version(version.run_id, version.incarnation, version.step)


def model_from_proto(model: engine_pb.ModelDescription) -> ModelLimits:
    """A model's limits from the wire."""
    return ModelLimits(
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        moe_layer_ids=tuple(model.moe_layer_ids),
        num_experts=model.num_experts,
        top_k=model.experts_per_token,
    )


# ------------------------------------------------------------------ leases


def lease_to_proto(lease: LeaseGrant, settings: TableSettings) -> prompt_pb.PromptLease:
    """A lease on the wire."""
    version = version_to_proto(lease.fence)
    fence = version_pb.Fence(exactly=version) if lease.exact else version_pb.Fence(at_least=version)
    message = prompt_pb.PromptLease(
        lease_id=lease.lease_id,
        table=lease.table,
        prompt=prompt_to_proto(lease.record),
        group_id=lease.group_id,
        attempt=lease.attempt,
        fence=fence,
        sampling=sampling_to_proto(lease.sampling),
        num_samples=lease.num_samples,
        ttl=duration(lease.ttl),
        seeds=lease.seeds,
        reward=lease.reward,
        require_routes=settings.require_routes,
        generation_deadline=duration(settings.generation_deadline),
    )
    if lease.eval_step is not None:
        message.eval_step = lease.eval_step
    return message


def prompt_to_proto(record: PromptRecord) -> trajectory_pb.Prompt:
    """A prompt on the wire; text, messages or token ids as the record has them."""
    message = trajectory_pb.Prompt(
        prompt_id=record.prompt_id,
        record_json=record.record_json,
        source=record.source,
        index=record.index,
        epoch=record.epoch,
    )
    prompt: Any = record.prompt
    if isinstance(prompt, str):
        message.text = prompt
    elif isinstance(prompt[0], Mapping):
        message.chat.messages.extend(trajectory_pb.ChatMessage(**chat_message(item)) for item in prompt)
    else:
        message.token_ids.ids.extend(prompt)
    return message


# ------------------------------------------------------------------ groups


def group_from_proto(group: trajectory_pb.TrajectoryGroup) -> GroupContent:
    """What validation looks at."""
    return GroupContent(
        group_id=group.group_id,
        attempt=group.attempt,
        table=group.table,
        prompt_id=group.prompt.prompt_id,
        samples=[_sample(sample) for sample in group.samples],
        sampling={field.name: _plain(value) for field, value in group.sampling.ListFields()},
        prompt_differs=lambda record: _prompt_differs(group, record),
    )


def _prompt_differs(group: trajectory_pb.TrajectoryGroup, record: PromptRecord) -> str:
    """The field in which a group's prompt is another than its lease's; a field that it leaves out is not compared."""
    said, meant = group.prompt, prompt_to_proto(record)
    for field, value in said.ListFields():
        if value != getattr(meant, field.name):
            return f"group.prompt.{field.name}"
    if meant.HasField("token_ids"):
        for position, sample in enumerate(group.samples):
            ids = sample.prompt_token_ids
            if ids and not sample.trajectory_id and ids != meant.token_ids.ids:
                return f"samples[{position}].prompt_token_ids"
    return ""


def _sample(sample: trajectory_pb.Sample) -> SampleContent:
    return SampleContent(
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        prompt_ids=sample.prompt_token_ids,
        response_ids=sample.response_token_ids,
        loss_mask=sample.loss_mask,
        logprobs=sample.rollout_logprobs,
        spans=[Span(span.first_token, version_from_proto(span.weight_version)) for span in sample.version_spans],
        routes=_routes(sample.routed_experts) if sample.HasField("routed_experts") else None,
        finish_reason=_FINISH.get(sample.finish_reason, ""),
        status=_STATUS.get(sample.status, ""),
        reward=sample.reward if sample.HasField("reward") else None,
        unscored_reason=_UNSCORED.get(sample.unscored_reason, ""),
        trajectory_id=sample.trajectory_id,
        engine_id=sample.engine_id,
        seed=sample.seed,
        reward_parts=sample.reward_parts,
    )


def _routes(trace: trajectory_pb.RoutingTrace) -> RouteTrace:
    segments = [
        RouteSegment(
            first_token=segment.first_token,
            rows=segment.rows,
            version=version_from_proto(segment.weight_version),
            source_known=segment.source in _ROUTING,
            dtype=_DTYPE.get(segment.experts.dtype, ""),
            shape=tuple(segment.experts.shape),
            digest=segment.experts.digest,
            inline=segment.experts.inline if segment.experts.WhichOneof("data") != "handle" else None,
        )
        for segment in trace.segments
    ]
    return RouteTrace(segments, trace.moe_layer_ids, trace.num_experts)


def _names(enum: Any, prefix: str) -> dict[int, str]:
    """Values and names without prefix; unspecified, like every value of a newer contract, has none."""
    return {value: name.removeprefix(prefix) for name, value in enum.items() if value}


_FINISH = _names(trajectory_pb.FinishReason, "FINISH_REASON_")
_STATUS = _names(trajectory_pb.SampleStatus, "SAMPLE_STATUS_")
_UNSCORED = _names(trajectory_pb.UnscoredReason, "UNSCORED_REASON_")
_ROUTING = _names(trajectory_pb.RoutingSource, "ROUTING_SOURCE_")
_DTYPE = _names(tensor_pb.Dtype, "DTYPE_")


# ------------------------------------------------------------------ tables


def sampling_to_proto(sampling: SamplingSettings) -> trajectory_pb.SamplingParams:
    """Sampling settings on the wire; unset stays unset."""
    return trajectory_pb.SamplingParams(**sampling.model_dump())


def settings_from_proto(config: table_pb.TableConfig) -> dict[str, Any]:
    """A TableConfig as arguments of TableSettings: fields that are unset are left out and get their defaults."""
    data: dict[str, Any] = {
        "name": config.name,
        "samples_per_prompt": config.samples_per_prompt,
        "groups_per_step": config.groups_per_step,
        "max_staleness": config.max_staleness,
        "publish_interval": config.publish_interval,
        "max_attempts": config.max_attempts,
        "max_evictions": config.max_evictions,
        "retained_bytes": config.retained_bytes,
        "capacity": config.capacity,
        "eval_interval": config.eval_interval,
        "reward": config.reward,
        "require_routes": config.require_routes,
        "max_drops_in_a_row": config.max_drops_in_a_row,
        "max_failures_in_a_row": config.max_failures_in_a_row,
        "max_unusable_in_a_row": config.max_unusable_in_a_row,
        "max_forks": config.max_forks,
        "max_reward_parts": config.max_reward_parts,
    }
    data = {key: value for key, value in data.items() if value or key == "samples_per_prompt"}
    # A selector of a newer contract must not silently become the default one.
    data["selector"] = _SELECTORS.get(config.selector, f"selector {config.selector}")
    for field in ("lease_ttl", "max_lease", "generation_deadline"):
        if config.HasField(field):
            data[field] = seconds_of(getattr(config, field))
    if config.HasField("eval_hold"):
        data["eval_hold"] = config.eval_hold
    if config.HasField("source"):
        source = {field.name: _plain(value) for field, value in config.source.ListFields()}
        data["source"] = source
    if config.HasField("sampling"):
        data["sampling"] = {field.name: _plain(value) for field, value in config.sampling.ListFields()}
    return data


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else list(value)


def settings_to_proto(settings: TableSettings) -> table_pb.TableConfig:
    """Settings on the wire, defaults filled in."""
    apart = {"source", "sampling", "lease_ttl", "max_lease", "generation_deadline", "selector"}
    data = settings.model_dump(exclude=apart)
    source = settings.source.model_dump()
    source["path"] = str(source["path"])
    selector = next(number for number, name in _SELECTORS.items() if number and name == settings.selector)
    return table_pb.TableConfig(
        **data,
        source=table_pb.PromptSource(**source),
        sampling=sampling_to_proto(settings.sampling),
        lease_ttl=duration(settings.lease_ttl),
        max_lease=duration(settings.max_lease),
        generation_deadline=duration(settings.generation_deadline),
        selector=table_pb.Selector.ValueType(selector),
    )


def view_to_proto(view: TableView) -> table_pb.TableInfo:
    """A table on the wire."""
    return table_pb.TableInfo(
        config=settings_to_proto(view.settings),
        counts=counts_to_proto(view.counts),
        policy_version=version_to_proto(view.policy) if view.policy else None,
        last_leased_step=view.last_leased_step,
        last_completed_step=view.last_completed_step,
        blocked=view.blocked,
        skipped_records=view.skipped,
    )


def counts_to_proto(counts: Counts) -> table_pb.TableCounts:
    """Counts on the wire."""
    return table_pb.TableCounts(
        groups_inserted=counts.inserted,
        groups_stored=counts.stored,
        groups_leased=counts.leased,
        groups_consumed=counts.consumed,
        groups_retired=counts.retired,
        groups_dropped=counts.dropped,
        groups_evicted=counts.evicted,
        prompts_drawn=counts.drawn,
        prompts_open=counts.open,
        prompts_inserted=counts.prompts_inserted,
        prompts_requeued=counts.requeued,
        prompts_given_up=counts.given_up,
        payload_bytes=counts.payload_bytes,
        free_slots=counts.free_slots,
        prompts_unusable=counts.prompts_unusable,
    )


def group_row_to_proto(row: GroupRow) -> table_pb.GroupInfo:
    """A line of a listing on the wire."""
    return table_pb.GroupInfo(
        group_id=row.group_id,
        state=table_pb.GroupState.ValueType(row.state),
        attempt=row.attempt,
        train_step=row.train_step,
        admission=row.admission,
        bytes=row.nbytes,
        oldest_version=version_to_proto(row.oldest) if row.oldest else None,
        mean_reward=row.mean_reward,
    )


def quarantined_to_proto(row: QuarantinedRow) -> table_pb.QuarantinedGroup:
    """A line of the listing of quarantined groups on the wire."""
    return table_pb.QuarantinedGroup(
        group_id=row.group_id,
        attempt=row.attempt,
        prompt_id=row.prompt_id,
        train_step=row.train_step,
        detail=row.detail,
        worker_id=row.worker_id,
        engine_ids=row.engines,
        bytes=row.nbytes,
        kept=row.kept,
    )
