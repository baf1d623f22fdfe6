"""Put the service together and take it apart."""

from __future__ import annotations

import os
from pathlib import Path

from vime.rollout.v1 import engine_service_pb2_grpc, generation_service_pb2_grpc
from vime_rollout.config import RolloutSettings
from vime_rollout.core import Core
from vime_rollout.engine import Engine, EngineError
from vime_rollout.engine_servicer import EngineServicer
from vime_rollout.heartbeat import Heartbeat
from vime_rollout.servicer import GenerationServicer
from vime_rollout.staging_area import staging_path
from vime_service.errors import EngineFailed
from vime_service.server import Service


class Rollout:
    """`register` and `start` of the rollout service."""

    def __init__(self, config: RolloutSettings) -> None:
        self.core = Core(config, make_engine(config))

    async def register(self, service: Service) -> None:
        """Add the servicers; the service is live afterwards, not ready."""
        core = self.core
        address = core.config.advertise_address or service.address
        self._heartbeat = Heartbeat(core, address)
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(core, service.config.max_message_bytes), service.server
        )
        engine_service_pb2_grpc.add_EngineServiceServicer_to_server(
            EngineServicer(core, address, self._heartbeat.beat_now), service.server
        )
        service.serves("vime.rollout.v1.GenerationService", "vime.rollout.v1.EngineService")
        service.on_stopping(self._drain)
        service.on_cleanup(core.stop)

    async def start(self, service: Service) -> None:
        """Load the model, then tell the router."""
        try:
            await self.core.start()
        except EngineError as error:
            raise EngineFailed(str(error), engine_id=self.core.config.engine_id) from error
        name, _, version = self.core.engine.description.engine_version.partition(" ")
        service.components[name] = version
        service.spawn(self._heartbeat.run(), "heartbeat")

    async def _drain(self) -> None:
        await self.core.traffic.drain()
        await self._heartbeat.say_draining()


def make_engine(config: RolloutSettings) -> Engine:
    """The engine that the configuration names; imports it, and with it torch or vLLM."""
    if config.engine == "fake":
        from vime_rollout.engines.fake import FakeEngine

        fake = config.fake
        return FakeEngine(fake.layers, fake.experts, fake.top_k, fake.step_seconds, fake.max_model_len, fake.seed)
    from vime_rollout.engines.vllm import VllmEngine

    staging: Path = staging_path(config.updates.staging_dir, os.getpid())
    return VllmEngine(config.vllm, config.updatable, staging)
