"""Builds the trainer's service from its configuration. Imported after the command line is parsed."""

from __future__ import annotations

from importlib.metadata import version as dist_version

from vime.trainer.v1.rank_service_pb2_grpc import add_RankServiceServicer_to_server
from vime.trainer.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from vime_client.channel import open_channel
from vime_client.errors import RpcError
from vime_client.private_file import write_private
from vime_service.config import to_toml
from vime_service.server import Service
from vime_trainer.adapters.fleet import GrpcFleet
from vime_trainer.adapters.ledger import GrpcLedger
from vime_trainer.adapters.ranks import CommandFailed, GrpcRanks
from vime_trainer.config import TrainerConfig
from vime_trainer.controller import Trainer
from vime_trainer.engine.errors import CheckpointError
from vime_trainer.engine.shape import ModelShape
from vime_trainer.loop.checkpoints import find_resume
from vime_trainer.loop.events import EventLog, State, Status
from vime_trainer.loop.loop import TrainingLoop
from vime_trainer.loop.publisher import Publisher, PublishFailed
from vime_trainer.ranks.processes import RankProcesses
from vime_trainer.recipe_digest import recipe_digest
from vime_trainer.run_files import RunFiles
from vime_trainer.servicers import RankServicer, TrainerServicer


class Wiring:
    """The parts of one trainer process.

    Args:
        config: the settings.
        processes: what starts the ranks; unset: processes of this host.
    """

    def __init__(self, config: TrainerConfig, processes: RankProcesses | None = None) -> None:
        self._config = config
        settings = config.trainer
        self._checkpoints = settings.run_dir / "checkpoints"
        # The ranks read the resolved settings: what `--set` changed must reach them, too.
        config_file = settings.run_dir / "services" / "trainer.resolved.toml"
        config_file.parent.mkdir(parents=True, exist_ok=True)
        write_private(config_file, to_toml(config, secrets=True))
        self._ranks = GrpcRanks(
            processes or RankProcesses(config_file, settings.world_size, settings.run_dir / "logs"),
            settings.world_size,
            self._checkpoints,
            settings.checkpoint.keep_last,
            settings.publish.canary_prompts,
            settings.faults.rank_start_timeout_s,
            settings.faults.command_timeout_s,
        )

    async def register(self, service: Service) -> None:
        """Add the servicers; nothing slow."""
        settings = self._config.trainer
        once = settings.credentials.once()
        buffer = open_channel(settings.buffer_address, once)
        router = open_channel(settings.router_address, once)
        fleet = GrpcFleet(router, settings.publish, once)
        publisher = Publisher(settings.publish, fleet, self._ranks)
        model = ModelShape.from_hf(settings.model_path)
        ledger = GrpcLedger(buffer, settings.table, settings.faults.regenerate, model)
        events, files = EventLog(), RunFiles(settings.run_dir)
        digest = recipe_digest(settings)

        def make_loop() -> TrainingLoop:
            resume = lambda: find_resume(self._checkpoints)  # noqa: E731  bound late: checkpoints appear as we run
            return TrainingLoop(settings, ledger, self._ranks, publisher, files, events, resume, digest)

        self._ranks.address = service.address
        self._trainer = Trainer(
            self._ranks,
            events,
            make_loop,
            Status(State.IDLE, settings.run_id, settings.steps),
            settings.run_dir / "services" / "trainer.started",
            settings.faults.max_restarts,
            (PublishFailed, CommandFailed, RpcError, CheckpointError),
        )
        add_TrainerServiceServicer_to_server(
            TrainerServicer(self._trainer, events, self._ranks, service.config.max_message_bytes), service.server
        )
        add_RankServiceServicer_to_server(RankServicer(self._ranks), service.server)
        service.serves("vime.trainer.v1.TrainerService", "vime.trainer.v1.RankService")
        service.components.update({name: dist_version(name) for name in ("megatron-core", "torch")})
        service.on_cleanup(buffer.close)
        service.on_cleanup(router.close)
        service.on_cleanup(fleet.close)
        service.on_stopping(self._trainer.close)

    async def start(self, service: Service) -> None:
        """Go on with a loop that an earlier life of this process had started; else have the ranks ready for one."""
        if self._trainer.was_started:
            await self._trainer.start()
        else:
            await self._trainer.warm_up()
