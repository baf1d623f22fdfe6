"""Puts the router together and keeps its clockwork going."""

from __future__ import annotations

import time

from vime.rollout.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from vime.router.v1.router_service_pb2_grpc import add_RouterServiceServicer_to_server
from vime_router.breaker import Breaker
from vime_router.config import RouterSection
from vime_router.directory import Directory
from vime_router.engine_links import EngineLinks
from vime_router.fleet import Fleet
from vime_router.forward import Forwarder
from vime_router.generation_servicer import GenerationRouter
from vime_router.metrics import observe_router
from vime_router.servicer import RouterServicer
from vime_service.clock import MonotonicClock
from vime_service.server import Service

_SWEEPS_PER_PERIOD = 4


class Router:
    """The router of one process: `await Router(config).register(service)`."""

    def __init__(self, config: RouterSection) -> None:
        self.config = config
        self.clock = MonotonicClock()
        self.links = EngineLinks(config.engines.settings())
        # A restarted router knows no former generation; milliseconds of the wall clock put it above any it gave out.
        directory = Directory(self.clock, config.ages(), first_generation=time.time_ns() // 1_000_000)
        self.fleet = Fleet(directory, config.new_policy(), self._new_breaker, self.links.end)
        self.forwarder = Forwarder(self.fleet, config.limits())
        self.generation = GenerationRouter(self.fleet, self.forwarder, self.links, self.clock)

    async def register(self, service: Service) -> None:
        """Add the servicers to the service and start the sweeper."""
        servicer = RouterServicer(self.fleet, self.config.heartbeat_period_s, service.config.max_message_bytes)
        add_RouterServiceServicer_to_server(servicer, service.server)
        add_GenerationServiceServicer_to_server(self.generation, service.server)
        service.serves("vime.router.v1.RouterService", "vime.rollout.v1.GenerationService")
        service.on_cleanup(self.links.close)
        service.spawn(self._sweep_for_ever(), "sweep")
        if service.telemetry is not None:
            observe_router(service.telemetry.metrics, self.fleet, self.forwarder)

    async def _sweep_for_ever(self) -> None:
        """Silence makes no event: somebody must look at the clock. The service ends this task when it stops."""
        while True:
            await self.clock.sleep(self.config.heartbeat_period_s / _SWEEPS_PER_PERIOD)
            self.fleet.sweep()

    def _new_breaker(self) -> Breaker:
        return Breaker(self.clock, self.config.breaker_failures, self.config.breaker_pause_s)
