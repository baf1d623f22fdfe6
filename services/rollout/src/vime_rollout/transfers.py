"""Bring one version into staging memory, in a thread of its own, while the engine goes on generating."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from vime_service.bulk import (
    BulkError,
    Deadline,
    FileStaging,
    Manifest,
    ManifestError,
    TransferStats,
    Transport,
    TransportError,
    VersionKey,
    WeightReceiver,
)
from vime_service.bulk import DigestMismatch as BulkDigestMismatch
from vime_service.bulk.buckets import unpack, verify_one
from vime_service.bulk.dtypes import dtype_name
from vime_service.bulk.native_thread import start_native_thread
from vime_service.errors import DigestMismatch, NotFound, TransferFailed, Unimplemented

STOP_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and as whom to join: rank 0 of `world_size` members sends, and hosts the store at `address`."""

    transport: str
    address: str
    generation: int
    rank: int
    world_size: int

    @property
    def members(self) -> list[str]:
        """The members in rank order."""
        return [str(rank) for rank in range(self.world_size)]


class StopFlag:
    """Tells a running fill to end; the fill may name a function that ends what it waits in."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self.interrupt: Callable[[], None] = lambda: None

    def stop(self) -> None:
        """Ask for the end."""
        self._set.set()
        self.interrupt()

    def check(self, generation: int, rank: int) -> None:
        """Raises `TransportError` once the end was asked for."""
        if self._set.is_set():
            raise TransportError("transfer", generation, rank, 0.0, "given up")


Fill = Callable[[Manifest, FileStaging, Deadline, StopFlag], TransferStats]
Connect = Callable[[Rendezvous, Deadline], Transport]


def connect(rendezvous: Rendezvous, deadline: Deadline) -> Transport:
    """Join the sender's store by the transport that a rendezvous names. Blocks.

    Raises:
        Unimplemented: this build has no such transport.
        TransportError: the store does not answer.
    """
    from vime_service.bulk.gloo import GlooTransport

    check_transport(rendezvous.transport)
    return GlooTransport.join(str(rendezvous.rank), rendezvous.address, deadline)


def check_transport(name: str) -> None:
    """Refuse a transport that is not built in."""
    if name != "gloo":
        raise Unimplemented(f"transport {name!r} is not there, 'gloo' is", rpc="PrepareUpdate", why="transport")


def receive(rendezvous: Rendezvous, join: Connect, bucket_timeout_s: float) -> Fill:
    """A fill that joins a transfer group and receives from its rank 0."""

    def fill(manifest: Manifest, staging: FileStaging, deadline: Deadline, stop: StopFlag) -> TransferStats:
        transport = join(rendezvous, deadline)
        try:
            transport.form(rendezvous.generation, rendezvous.members, deadline)
            stop.interrupt = transport.abort
            stop.check(rendezvous.generation, rendezvous.rank)
            receiver = WeightReceiver(transport, manifest, staging, bucket_timeout_s)
            receiver.receive(deadline)
            assert receiver.stats is not None
            return receiver.stats
        finally:
            transport.close()

    return fill


def read_payload(path: Path) -> Fill:
    """A fill that copies a safetensors file holding exactly the manifest's tensors."""

    def fill(manifest: Manifest, staging: FileStaging, deadline: Deadline, stop: StopFlag) -> TransferStats:
        from safetensors import SafetensorError, safe_open

        started = time.monotonic()
        staged = unpack(manifest, staging.buffer)
        try:
            with safe_open(str(path), framework="pt") as file:
                names = set(file.keys())
                wrong = [meta.name for meta in manifest.tensors if meta.name not in names]
                if wrong or len(names) != len(manifest.tensors):
                    raise ManifestError(f"{path.name} holds {len(names)} tensors, missing: {wrong[:8]}")
                for meta, offset in zip(manifest.tensors, manifest.plan.offsets, strict=True):
                    stop.check(0, 0)
                    if deadline.passed():
                        raise TransportError("reading", 0, 0, time.monotonic() - started, "the deadline passed")
                    tensor = file.get_tensor(meta.name)
                    if dtype_name(tensor.dtype) != meta.dtype or tuple(tensor.shape) != meta.shape:
                        raise ManifestError(
                            f"tensor {meta.name!r} is {tensor.dtype} {list(tensor.shape)} in {path.name}"
                        )
                    staged[meta.name].copy_(tensor)
                    verify_one(meta, staging.buffer[offset : offset + meta.nbytes])
        except FileNotFoundError as error:
            raise NotFound(f"there is no payload {path.name!r}", kind="payload", name=path.name) from error
        except SafetensorError as error:
            raise ManifestError(f"{path.name} is not a safetensors file: {error}") from error
        return TransferStats(manifest.plan.total_bytes, time.monotonic() - started, 1)

    return fill


class Transfer:
    """One version on its way into `staging`. `start` it once; then `wait`, and in the end `stop`."""

    def __init__(self, manifest: Manifest, staging: FileStaging, generation: int, fill: Fill) -> None:
        self.manifest = manifest
        self.staging = staging
        self.generation = generation
        self._fill = fill
        self._stop = StopFlag()
        self._outcome: Future[TransferStats] = Future()
        self._done: asyncio.Future[TransferStats] | None = None
        self._told: asyncio.Future[TransferStats] | None = None
        """What those who wait hear: the outcome, or at once that the transfer was given up."""

    @property
    def version(self) -> VersionKey:
        """The version it carries."""
        return self.manifest.version

    def start(self, timeout_s: float, on_end: Callable[[BaseException | None], None]) -> None:
        """Begin; `on_end` is called in the event loop with the failure, or None once all is staged."""
        self._done = asyncio.wrap_future(self._outcome)
        self._told = asyncio.get_running_loop().create_future()
        self._done.add_done_callback(self._tell)
        self._done.add_done_callback(lambda done: on_end(done.exception()))
        deadline = Deadline.after(timeout_s)
        start_native_thread("weight-transfer", lambda: self._run(deadline))

    async def wait(self, seconds: float) -> TransferStats:
        """Wait until every tensor is staged with its digest checked.

        Raises:
            TransferFailed, DigestMismatch: the transfer failed, or was given up.
            TimeoutError: it is still running after `seconds`.
        """
        assert self._told is not None
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self._told)

    async def stop(self) -> None:
        """End the transfer if it runs, and give its memory back.

        A thread that waits for a group to form cannot be interrupted: it ends at the transfer's own deadline, and the
        memory goes back then.
        """
        self._stop.stop()
        if self._done is None or self._told is None:
            self.staging.close()
            return
        if not self._told.done():
            message = f"the transfer of version {self.version} was given up"
            self._told.set_exception(TransferFailed(message, generation=self.generation, cause="given up"))
            self._told.exception()  # nobody may be waiting
        self._done.add_done_callback(lambda _: self.staging.close())
        await asyncio.wait([self._done], timeout=STOP_WAIT_S)

    def _tell(self, done: asyncio.Future[TransferStats]) -> None:
        assert self._told is not None
        if self._told.done():
            return
        failure = done.exception()
        if failure is None:
            # bounded by: it is done, this is its callback
            self._told.set_result(done.result())
        else:
            self._told.set_exception(failure)
            self._told.exception()  # nobody may be waiting

    def _run(self, deadline: Deadline) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
            try:
                self._outcome.set_result(self._fill(self.manifest, self.staging, deadline, self._stop))
            except BulkDigestMismatch as error:
                _let_go(error)
                self._outcome.set_exception(
                    DigestMismatch(str(error), name=error.name, expected=error.expected, actual=error.actual)
                )
            except BulkError as error:
                _let_go(error)
                message = f"the transfer of version {self.version} failed: {error}"
                self._outcome.set_exception(TransferFailed(message, generation=self.generation, cause=error))
            except Exception as error:  # noqa: BLE001  whatever ends this thread must reach who waits for it
                _let_go(error)
                self._outcome.set_exception(error)


def _let_go(error: BaseException | None) -> None:
    """The frames of a failure hold the memory it failed with; the outcome, which is kept, must not."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
