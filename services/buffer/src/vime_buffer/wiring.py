"""The cast: ledger, buffer, servicers, metrics, and who ends whom."""

from __future__ import annotations

from vime.buffer.v1 import batch_service_pb2_grpc, prompt_service_pb2_grpc, table_service_pb2_grpc
from vime_buffer.buffer import Buffer, BufferLimits
from vime_buffer.catalog import configure_tables
from vime_buffer.config import BufferSettings
from vime_buffer.ledger import Ledger, LedgerOptions
from vime_buffer.metrics import register_metrics
from vime_buffer.servicer_batch import BatchServicer
from vime_buffer.servicer_prompt import PromptServicer
from vime_buffer.servicer_table import TableServicer
from vime_service.clock import Clock, MonotonicClock
from vime_service.errors import FailedPrecondition, InvalidArgument
from vime_service.server import Register, Service
from vime_service.server_config import MAX_MESSAGE_BYTES

SERVICES = ("vime.buffer.v1.PromptService", "vime.buffer.v1.BatchService", "vime.buffer.v1.TableService")


def open_ledger(settings: BufferSettings, clock: Clock, message_bytes: int = MAX_MESSAGE_BYTES) -> Ledger:
    """The ledger with the configured tables.

    Raises:
        VimeError: the folder, a source or a setting cannot be used; the message says which.
    """
    options = LedgerOptions(
        folder=settings.dir,
        run_id=settings.run_id,
        seed=settings.seed,
        segment_bytes=settings.segment_bytes,
        max_bytes=settings.max_bytes,
        quarantine_bytes=settings.quarantine_bytes,
        message_bytes=message_bytes,
        source_paths={name: table.source.path for name, table in settings.tables.items()},
    )
    ledger = Ledger(options, clock)
    ledger.db.begin()
    try:
        configure_tables(ledger, settings.tables.values())
        ledger.db.commit()
    except BaseException:
        ledger.db.rollback()
        ledger.close()
        raise
    return ledger


def registration(settings: BufferSettings, clock: Clock | None = None) -> Register:
    """What adds the buffer to a service: `serving("buffer", "vime-buffer", config.server, registration(...))`."""

    async def register(service: Service) -> None:
        message_bytes = service.config.max_message_bytes
        try:
            ledger = open_ledger(settings, clock or MonotonicClock(), message_bytes)
        except FailedPrecondition as error:  # the ledger was begun with other settings: no later start mends that
            raise InvalidArgument(error.message) from None
        limits = BufferLimits(settings.max_group_bytes, settings.worker_silence_s)
        buffer = Buffer(ledger, limits)
        prompt_service_pb2_grpc.add_PromptServiceServicer_to_server(PromptServicer(buffer), service.server)
        batch_service_pb2_grpc.add_BatchServiceServicer_to_server(BatchServicer(buffer), service.server)
        table_service_pb2_grpc.add_TableServiceServicer_to_server(
            TableServicer(buffer, settings.roots(), message_bytes), service.server
        )
        service.serves(*SERVICES)
        service.spawn(buffer.sweep(), "lease sweep")
        service.spawn(buffer.mend_sources(), "sources of blocked tables")
        service.on_stopping(buffer.stop_waiting)
        service.on_cleanup(buffer.close)
        if service.telemetry is not None:
            register_metrics(service.telemetry.metrics, buffer.look)

    return register
