"""What this engine tells others about itself: in heartbeats, and when asked."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vime.common.v1 import engine_pb2
from vime_rollout.convert import load_out
from vime_rollout.core import Core
from vime_service.bulk.wire import version_to_proto

_STATES = {
    "EMPTY": engine_pb2.ENGINE_STATE_EMPTY,
    "STAGING": engine_pb2.ENGINE_STATE_STAGING,
    "SERVING": engine_pb2.ENGINE_STATE_SERVING,
    "DIRTY": engine_pb2.ENGINE_STATE_DIRTY,
}


def service_version() -> str:
    """Version of the vime-rollout distribution."""
    try:
        return version("vime-rollout")
    except PackageNotFoundError:
        return "unknown"


def engine_status(core: Core, address: str) -> engine_pb2.EngineStatus:
    """The engine as of now."""
    serving = core.weights.serving
    message = engine_pb2.EngineStatus(
        info=_info(core, address),
        state=_state(core),
        manifest_digest=serving.digest if serving else "",
        load=load_out(core.engine.load_snapshot()) if core.started else None,
        detail=core.weights.dirty or core.control.note or ("" if core.started else "loading the model"),
    )
    if serving is not None and serving.version is not None:
        message.weight_version.CopyFrom(version_to_proto(serving.version))
    return message


def _state(core: Core) -> engine_pb2.EngineState.ValueType:
    if core.traffic.draining:
        return engine_pb2.ENGINE_STATE_DRAINING
    if core.control.paused and not core.weights.dirty:
        return engine_pb2.ENGINE_STATE_PAUSED
    return _STATES[core.weights.name]


def _info(core: Core, address: str) -> engine_pb2.EngineInfo:
    info = engine_pb2.EngineInfo(
        engine_id=core.config.engine_id,
        boot_id=core.boot_id,
        address=address,
        updatable=core.config.updatable,
        service_version=service_version(),
    )
    if core.started:
        engine = core.engine.description
        info.model_id = engine.model_id
        info.max_model_len = engine.max_model_len
        info.vocab_size = engine.vocab_size
        info.architecture = engine.architecture
        info.returns_routes = engine.returns_routes
        info.moe_layer_ids.extend(engine.moe_layer_ids)
        info.num_experts = engine.num_experts
        info.experts_per_token = engine.experts_per_token
        info.eos_token_ids.extend(engine.eos_token_ids)
        info.engine_version = engine.engine_version
        info.max_running_requests = engine.max_running_requests
    return info
