"""Between the contracts and the domain, field by field. No policy, no state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from google.protobuf.duration_pb2 import Duration

from vime.bulk.v1 import manifest_pb2
from vime.common.v1 import engine_pb2, tensor_pb2, trajectory_pb2, weight_version_pb2
from vime.rollout.v1 import engine_service_pb2, generation_service_pb2
from vime_rollout.engine import EngineDescription, EngineLoad, FinishReason, PauseMode, Routes, SamplingSettings
from vime_rollout.generation import GeneratedSample, RoutingSegment, SampleEnd
from vime_rollout.requests import GenerationRequest
from vime_rollout.traffic import VersionSpan
from vime_rollout.transfers import Rendezvous
from vime_rollout.updates import CanaryPrompt
from vime_rollout.weights import ANY_WEIGHTS, Fence, FenceKind
from vime_service.bulk import Manifest, ManifestError, VersionKey
from vime_service.bulk.wire import dtype_from_proto, manifest_from_proto, version_from_proto, version_to_proto
from vime_service.errors import InvalidArgument, Unimplemented

INLINE_BYTES = 1 << 20
MAX_JSON_DEPTH = 64

_FINISH = {
    FinishReason.STOP: trajectory_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: trajectory_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: trajectory_pb2.FINISH_REASON_ABORT,
}
_PAUSE: dict[int, PauseMode] = {
    engine_service_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    engine_service_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    engine_service_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}
_TRANSPORTS: dict[int, str] = {
    value: name.removeprefix("TRANSPORT_").lower() for name, value in manifest_pb2.Transport.items()
}


# ---------------------------------------------------------------- from the wire


def version_in(message: weight_version_pb2.WeightVersion, field: str) -> VersionKey:
    """A version; `InvalidArgument` naming the field when it is not one."""
    try:
        return version_from_proto(message)
    except ManifestError as error:
        raise InvalidArgument(f"{field}: {error}", field=field) from error


def fence_in(message: weight_version_pb2.Fence) -> Fence:
    """A fence; unset means any."""
    kind = message.WhichOneof("kind")
    if kind is None or kind == "any":
        return ANY_WEIGHTS
    return Fence(FenceKind(kind), version_in(getattr(message, kind), f"fence.{kind}"))


def sampling_in(message: trajectory_pb2.SamplingParams) -> SamplingSettings:
    """Sampling settings with their defaults."""
    return SamplingSettings(
        max_tokens=message.max_tokens,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k if message.HasField("top_k") else 0,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        extra=json_object("sampling.extra_json", message.extra_json),
    )


def generation_in(
    message: generation_service_pb2.GenerateRequest, trace_headers: Mapping[str, str] | None
) -> GenerationRequest:
    """A request; `adapter_id` is refused until adapters are there."""
    refuse_adapter("Generate", message.adapter_id)
    return GenerationRequest(
        request_id=message.request_id,
        prompt_token_ids=list(message.prompt_token_ids),
        sampling=sampling_in(message.sampling),
        seeds=list(message.seeds),
        fence=fence_in(message.fence),
        return_routes=message.return_routes,
        return_text=message.return_text,
        resume_token_ids=list(message.resume_token_ids),
        require_exact_logprobs=not message.allow_inexact_sampling,
        trace_headers=trace_headers,
    )


def refuse_adapter(rpc: str, adapter_id: str) -> None:
    """LoRA adapters are in the contract and not here yet."""
    if adapter_id:
        raise Unimplemented(f"adapter_id {adapter_id!r}: adapters are not served", rpc=rpc, why="adapters")


def chat_in(message: trajectory_pb2.Chat) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Messages, tools and template arguments."""
    messages: list[dict[str, Any]] = []
    for entry in message.messages:
        one: dict[str, Any] = {"role": entry.role, "content": entry.content}
        if entry.tool_call_id:
            one["tool_call_id"] = entry.tool_call_id
        if entry.tool_calls_json:
            one["tool_calls"] = _json("chat.messages.tool_calls_json", entry.tool_calls_json, list)
        messages.append(one)
    tools: list[Any] = _json("chat.tools_json", message.tools_json, list) if message.tools_json else []
    return messages, tools, json_object("chat.template_kwargs_json", message.template_kwargs_json)


def json_object(field: str, text: str) -> dict[str, Any]:
    """A JSON object; empty text is an empty object."""
    parsed: dict[str, Any] = _json(field, text, dict) if text else {}
    return parsed


def manifest_in(message: manifest_pb2.Manifest) -> Manifest:
    """A manifest, checked against the limits before anything is allocated."""
    try:
        return manifest_from_proto(message)
    except ManifestError as error:
        raise InvalidArgument(f"manifest: {error}", field="manifest") from error


def rendezvous_in(message: manifest_pb2.Rendezvous) -> Rendezvous:
    """Where and as whom to join."""
    transport = _TRANSPORTS.get(message.transport, str(message.transport))
    host, _, port = message.address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(f"rendezvous.address {message.address!r} is not host:port", field="rendezvous.address")
    return Rendezvous(transport, message.address, message.generation, message.rank, message.world_size)


def canary_in(messages: Sequence[manifest_pb2.CanaryPrompt]) -> list[CanaryPrompt]:
    """The canary prompts."""
    try:
        return [
            CanaryPrompt(
                list(message.token_ids),
                list(message.logprobs),
                dtype_from_proto(message.dtype) if message.dtype else "",
            )
            for message in messages
        ]
    except ManifestError as error:
        raise InvalidArgument(f"canary: {error}", field="canary") from error


def pause_mode_in(value: int, default: PauseMode, field: str) -> PauseMode:
    """A pause mode; unset means the call's default, one of a newer contract is refused."""
    if value == engine_service_pb2.PAUSE_MODE_UNSPECIFIED:
        return default
    mode = _PAUSE.get(value)
    if mode is None:
        known = ", ".join(mode.name for mode in PauseMode)
        raise InvalidArgument(f"{field} {value} is not known here; known: {known}", field=field, value=value)
    return mode


def seconds_in(message: Duration, default: float) -> float:
    """A duration in seconds; unset or zero means the default."""
    return message.seconds + message.nanos * 1e-9 or default


def _json(field: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidArgument(f"{field} is not JSON: {error}", field=field) from error
    except RecursionError:
        raise InvalidArgument(f"{field} is nested too deeply", field=field) from None
    if not isinstance(value, kind):
        raise InvalidArgument(f"{field} is a JSON {type(value).__name__}, not a {kind.__name__}", field=field)
    if _depth_of(value) > MAX_JSON_DEPTH:
        raise InvalidArgument(f"{field} is nested deeper than {MAX_JSON_DEPTH} levels", field=field)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _depth_of(value: Any) -> int:
    """Levels of lists and objects; without recursion, which what it looks for would break."""
    depth, level = 0, [value]
    while level := [entry for entry in level if isinstance(entry, dict | list)]:
        depth += 1
        level = [inner for entry in level for inner in (entry.values() if isinstance(entry, dict) else entry)]
    return depth


# ---------------------------------------------------------------- to the wire


def duration_out(seconds: float) -> Duration:
    """Seconds as a Duration."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def span_out(span: VersionSpan) -> weight_version_pb2.VersionSpan:
    """A version span; the version is unset for weights that no run published."""
    version = version_to_proto(span.version) if span.version is not None else None
    return weight_version_pb2.VersionSpan(first_token=span.first_token, weight_version=version)


def trace_out(segments: Sequence[RoutingSegment], engine: EngineDescription) -> trajectory_pb2.RoutingTrace:
    """A routing trace; a segment over 1 MiB is cut into several."""
    messages = [part for segment in segments for part in _segment_out(segment)]
    return trajectory_pb2.RoutingTrace(
        segments=messages, moe_layer_ids=engine.moe_layer_ids, num_experts=engine.num_experts
    )


def _segment_out(segment: RoutingSegment) -> list[trajectory_pb2.RoutingSegment]:
    source = trajectory_pb2.ROUTING_SOURCE_PREFILLED if segment.prefilled else trajectory_pb2.ROUTING_SOURCE_GENERATED
    rows = len(segment.experts)
    at_once = max(1, INLINE_BYTES * rows // max(1, segment.experts.nbytes))
    return [
        trajectory_pb2.RoutingSegment(
            first_token=segment.first_token + start,
            rows=min(at_once, rows - start),
            weight_version=version_to_proto(segment.version) if segment.version is not None else None,
            source=source,
            experts=routes_out(segment.experts[start : start + at_once]),
        )
        for start in range(0, rows, at_once)
    ]


def routes_out(routes: Routes) -> tensor_pb2.TensorRef:
    """Routes as an inline tensor."""
    data = routes.tobytes()
    return tensor_pb2.TensorRef(
        dtype=tensor_pb2.DTYPE_UINT8 if routes.dtype.itemsize == 1 else tensor_pb2.DTYPE_UINT16,
        shape=routes.shape,
        digest=xxhash.xxh3_128_hexdigest(data),
        inline=data,
    )


def end_out(sample_index: int, end: SampleEnd, engine: EngineDescription) -> generation_service_pb2.GeneratedSample:
    """Everything of a sample but ids, logprobs and text."""
    return generation_service_pb2.GeneratedSample(
        sample_index=sample_index,
        finish_reason=_FINISH[end.finish_reason],
        version_spans=[span_out(span) for span in end.spans],
        routed_experts=trace_out(end.routes, engine) if end.routes else None,
        cached_tokens=end.cached_tokens,
        generation_time=duration_out(end.seconds),
        matched_stop=end.matched_stop,
    )


def sample_out(sample: GeneratedSample, engine: EngineDescription) -> generation_service_pb2.GeneratedSample:
    """A whole sample."""
    message = end_out(sample.sample_index, sample.end, engine)
    message.response_token_ids.extend(sample.token_ids)
    message.rollout_logprobs.extend(sample.logprobs)
    message.text = sample.text
    return message


def load_out(load: EngineLoad) -> engine_pb2.EngineLoad:
    """How busy the engine is."""
    return engine_pb2.EngineLoad(
        running=load.running,
        waiting=load.waiting,
        kv_cache_usage=load.kv_cache_usage,
        generated_tokens=load.generated_tokens,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
    )
