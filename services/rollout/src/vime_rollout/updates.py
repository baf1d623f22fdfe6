"""The weight update of one engine: prepare, receive, commit; or abort, or pull.

Nothing but a whole version whose every tensor has its digest, whose load wrote every parameter once, and whose canary
agrees with the trainer's logprobs is ever served. A failure before the load starts leaves the old version serving; one
after it leaves the engine DIRTY until a later commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vime_client.logs import get_logger
from vime_rollout.config import UpdateConfig
from vime_rollout.engine import Engine, EngineError, MemoryPart, PauseMode, WeightLoadReport, WeightsRefused
from vime_rollout.generation import Generation
from vime_rollout.staging_area import StagingArea
from vime_rollout.traffic import Traffic
from vime_rollout.transfers import Connect, Fill, Rendezvous, Transfer, connect, read_payload, receive
from vime_rollout.weights import Prepared, WeightState
from vime_service.bulk import FileStaging, Manifest, StagingError, TransferStats, VersionKey, canary_rule
from vime_service.errors import (
    DeadlineExceeded,
    EngineFailed,
    FailedPrecondition,
    InvalidArgument,
    LoadFailed,
    ManifestRefused,
    NotFound,
    ResourceExhausted,
)

_log = get_logger(__name__)
_HOLDER = "a weight update"


class CanaryDisagrees(Exception):
    """The new weights do not give the logprobs that the trainer has for them."""


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """The trainer's logprobs of ids 1 and later, at temperature 1."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    dtype: str = ""
    """Type that they were computed in; empty: that of the engine."""


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """What was prepared: whether the version serves already, and the staging memory reserved."""

    already_serving: bool
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class CommittedUpdate:
    """What was committed: the canary's difference (None: skipped), seconds stood still, parameters written."""

    canary_difference: float | None
    pause_seconds: float
    parameters: int


class Updater:
    """Runs the updates of one engine, one at a time."""

    def __init__(
        self,
        engine: Engine,
        weights: WeightState,
        traffic: Traffic,
        generation: Generation,
        config: UpdateConfig,
        join: Connect = connect,
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._traffic = traffic
        self._generation = generation
        self._config = config
        self._join = join
        self._area: StagingArea | None = None
        self._lock = asyncio.Lock()
        self._transfer: Transfer | None = None
        self._commit: tuple[VersionKey, asyncio.Task[CommittedUpdate]] | None = None
        self.keep_paused = False
        self.asleep = False
        self.kv_asleep = False
        """The weights are awake for the update that comes, and no KV yet: the update wakes it."""
        self.on_over: Callable[[], Awaitable[None]] = _nothing
        """Called, with the lock held, when an update was committed, failed to load, or was aborted."""

    async def prepare(
        self, manifest: Manifest, rendezvous: Rendezvous, timeout_s: float | None = None
    ) -> PreparedUpdate:
        """Check a manifest, reserve staging memory, and start to receive. Serving goes on.

        Raises:
            VimeError: see `WeightState.prepare`.
            ManifestRefused: the tensors do not make up the engine's model; names them.
            ResourceExhausted: there is too little room for staging.
        """
        if not 1 <= rendezvous.rank < rendezvous.world_size:
            raise InvalidArgument(
                f"rank {rendezvous.rank} of {rendezvous.world_size}, a receiver has 1 to world_size - 1",
                field="rendezvous.rank",
            )
        fill = receive(rendezvous, self._join, self._config.bucket_timeout_seconds)
        return await self._prepare(manifest, rendezvous.generation, fill, timeout_s)

    async def await_staged(self, version: VersionKey, seconds: float) -> TransferStats:
        """Wait for the transfer of a version.

        Raises:
            TransferFailed, DigestMismatch: it failed; the old version still serves.
            NotFound: no such transfer was prepared.
            DeadlineExceeded: it is still running after `seconds`.
        """
        transfer = self._find(version)
        try:
            return await transfer.wait(seconds)
        except TimeoutError as error:
            raise DeadlineExceeded(f"version {version} is not staged after {seconds:.1f} s") from error

    async def commit(
        self, version: VersionKey, canary: Sequence[CanaryPrompt], tolerance: float, mode: PauseMode
    ) -> CommittedUpdate:
        """Load a staged version, verify it, serve it. Asked again, it answers for the running or the served version.

        It runs on when the caller goes away: a load is never left half-way.

        Raises:
            ManifestRefused, EngineFailed: nothing was changed.
            LoadFailed: the engine is DIRTY.
        """
        self._weights.check_caller(version)
        for prompt in canary:
            if len(prompt.token_ids) != len(prompt.logprobs) + 1 or not prompt.logprobs:
                raise InvalidArgument(
                    f"a canary has {len(prompt.token_ids)} ids and {len(prompt.logprobs)} logprobs", field="canary"
                )
        self._check_awake()
        serving = self._weights.serving
        if serving is not None and serving.version == version and self._weights.update is None:
            return CommittedUpdate(None, 0.0, 0)
        if self._commit is None or self._commit[0] != version or self._commit[1].done():
            self._find(version)
            task = asyncio.create_task(self._run_commit(version, list(canary), tolerance, mode), name="commit")
            self._commit = (version, task)
        return await asyncio.shield(self._commit[1])

    async def abort(self, version: VersionKey, cause: str) -> None:
        """Give a staged or running transfer up. No error if there is none."""
        self._weights.check_caller(version)
        if self._weights.drop(version):
            _log.info("update dropped", version=str(version), cause=cause)
        async with self._lock:
            if self._transfer is not None and self._transfer.version == version:
                await self._stop_transfer()
            await self.on_over()

    async def pull(
        self, manifest: Manifest, key: str, canary: Sequence[CanaryPrompt], tolerance: float, seconds: float
    ) -> None:
        """Load a version from a safetensors file of the payload store.

        Raises:
            NotFound: there is no such payload.
            VimeError: as `prepare`, `await_staged` and `commit`.
        """
        path = payload_path(self._config.payload_dir, key)
        prepared = await self._prepare(manifest, 0, read_payload(path), None)
        if not prepared.already_serving:
            await self.await_staged(manifest.version, seconds)
            await self.commit(manifest.version, canary, tolerance, PauseMode.KEEP)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """No preparing and no loading while the block runs."""
        async with self._lock:
            yield

    async def close(self) -> None:
        """End what runs and give the memory back. A load that has begun is not waited for."""
        if self._commit is not None:
            self._commit[1].cancel()
        await self._stop_transfer()
        if self._area is not None:
            self._area.close()

    # ---------------------------------------------------------------- preparing

    async def _prepare(
        self, manifest: Manifest, generation: int, fill: Fill, timeout_s: float | None
    ) -> PreparedUpdate:
        version = manifest.version
        async with self._lock:
            answer = self._weights.prepare(version, manifest.digest.hex(), generation)
            if answer is Prepared.ALREADY_SERVING:
                return PreparedUpdate(True, 0)
            if answer is Prepared.START:
                with self._nothing_left_of(version):
                    await self._stop_transfer()
                    await self._engine.check_manifest(manifest)
                    staging = await self._reserve(manifest)
                transfer = self._transfer = Transfer(manifest, staging, generation, fill)
                transfer.start(
                    timeout_s or self._config.transfer_timeout_seconds, lambda failure: self._ended(transfer, failure)
                )
            return PreparedUpdate(False, manifest.plan.total_bytes)

    @contextmanager
    def _nothing_left_of(self, version: VersionKey) -> Iterator[None]:
        """Whatever stops the preparing, the caller's deadline too, takes the update back: it may be sent again."""
        try:
            yield
        except BaseException as error:  # a cancel, too; every branch raises
            self._weights.refused(version)
            if isinstance(error, WeightsRefused):
                raise ManifestRefused(str(error), name=error.name) from error
            if isinstance(error, StagingError):
                raise ResourceExhausted(str(error), kind="staging") from error
            if isinstance(error, Exception):
                raise EngineFailed(f"version {version} could not be prepared: {error!r}", cause=error) from error
            raise

    async def _reserve(self, manifest: Manifest) -> FileStaging:
        """Memory for a version. Nothing stops the thread that allocates: who gives up meanwhile waits for its end."""
        reserving = asyncio.ensure_future(asyncio.to_thread(self._staging_area().reserve, manifest))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(_close_untaken)
            # bounded by: the allocation of one file
            await asyncio.wait([reserving])
            raise

    def _ended(self, transfer: Transfer, failure: BaseException | None) -> None:
        if self._transfer is not transfer or self._weights.update is None:
            return  # given up meanwhile
        if failure is None:
            self._weights.staged(transfer.version)
            return
        _log.warning("transfer failed", version=str(transfer.version), cause=str(failure))
        transfer.staging.close()
        self._weights.drop(transfer.version)

    def _find(self, version: VersionKey) -> Transfer:
        if self._transfer is None or self._transfer.version != version:
            raise NotFound(f"no transfer of version {version} was prepared", kind="transfer", name=version)
        return self._transfer

    def _check_awake(self) -> None:
        if self.asleep:
            raise FailedPrecondition("the device is given away: ReturnDevice first", state="asleep", wanted="awake")

    def _staging_area(self) -> StagingArea:
        if self._area is None:
            self._area = StagingArea(self._config.staging_dir, self._config.keep_staging)
        return self._area

    async def _stop_transfer(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            await transfer.stop()

    # ---------------------------------------------------------------- committing

    async def _run_commit(
        self, version: VersionKey, canary: Sequence[CanaryPrompt], tolerance: float, mode: PauseMode
    ) -> CommittedUpdate:
        async with self._lock:
            self._check_awake()  # the device may have been given away, or the update dropped, while this waited
            transfer = self._find(version)
            self._weights.begin_load(version)
            await self._traffic.close(_HOLDER)
            try:
                started = time.monotonic()
                await self._stand_still(version, mode)
                report = await self._load(transfer)
                async with self._dirty_on_failure(version):
                    await self._change_over(version)
                    pause_seconds = time.monotonic() - started
                    difference = await self._check_canary(version, canary, tolerance)
                    if self.keep_paused:
                        await self._engine.pause(PauseMode.KEEP)
                self._weights.committed(version)
                self._traffic.allow_deliveries()
                self._staging_area().put_back(transfer.staging)
                self._transfer = None
            finally:
                await self._stop_transfer()
                await self._traffic.open(_HOLDER)
                await self.on_over()
        _log.info(
            "weights committed",
            version=str(version),
            parameters=report.parameters,
            bytes=report.nbytes,
            load_s=round(report.seconds, 4),
            pause_s=round(pause_seconds, 4),
            canary=difference,
        )
        return CommittedUpdate(difference, pause_seconds, report.parameters)

    async def _stand_still(self, version: VersionKey, mode: PauseMode) -> None:
        """Stop generating, and end the samples that `version` must not continue. On failure the old version goes on."""
        try:
            async with asyncio.timeout(self._config.pause_timeout_seconds):
                await self._engine.pause(mode)
                await self._engine.abort(self._traffic.outlived_by(version))
        except Exception as error:  # whatever it is, a load that does not come must not hold the engine
            await self._go_on(version)
            raise EngineFailed(
                f"the engine did not stand still for version {version}: {error!r}", cause=error
            ) from error

    async def _load(self, transfer: Transfer) -> WeightLoadReport:
        version, seconds = transfer.version, self._config.load_timeout_seconds
        try:
            async with self._dirty_on_failure(version), _at_most(seconds, "loading"):
                return await self._engine.load_weights(transfer.manifest, transfer.staging.path)
        except WeightsRefused as error:
            await self._go_on(version)
            raise ManifestRefused(f"version {version} cannot be loaded: {error}", name=error.name) from error

    async def _change_over(self, version: VersionKey) -> None:
        """Forget the old weights' KV, mark where each sample changes over, and go on with deliveries held."""
        await self._engine.drop_prefix_cache()
        self._traffic.hold_deliveries()
        self._traffic.change_over(version, self._engine.progress())
        if self.kv_asleep:
            await self._engine.wake(MemoryPart.KV)
            self.kv_asleep = False
        await self._engine.resume()

    async def _check_canary(
        self, version: VersionKey, canary: Sequence[CanaryPrompt], tolerance: float
    ) -> float | None:
        """The |logprob difference| over the canary's tokens, None without a canary. `tolerance` 0: what follows from
        the types that engine and trainer compute in."""
        if not canary:
            return None
        name = f"canary-{version.incarnation}-{version.step}"
        async with _at_most(self._config.canary_timeout_seconds, "scoring the canary"):
            scores = await asyncio.gather(
                *(
                    self._generation.score_unfenced(f"{name}/{index}", prompt.token_ids, False)
                    for index, prompt in enumerate(canary)
                )
            )
        ours = np.concatenate([score.logprobs for score in scores])
        dtypes = {self._engine.description.dtype, *(prompt.dtype for prompt in canary if prompt.dtype)}
        rule = canary_rule(sorted(dtypes))
        difference = rule.difference(ours, [value for prompt in canary for value in prompt.logprobs])
        limit = tolerance or rule.limit
        if not difference <= limit:
            raise CanaryDisagrees(
                f"{rule.statistic} |logprob difference| of the canary {difference:.3g}, allowed {limit:.3g} "
                f"in {' and '.join(sorted(dtypes))}"
            )
        return difference

    async def _go_on(self, version: VersionKey) -> None:
        """No weight has changed: drop the update and go on with the old version; what cannot go on serves nobody."""
        self._weights.load_refused(version)
        if self.keep_paused or self.kv_asleep:
            return
        try:
            await self._engine.resume()
        except Exception as error:  # vLLM's core says what failed in exceptions of any kind
            reason = f"the engine did not go on after version {version} was given up: {error!r}"
            self._weights.mark_dirty(reason)
            self._traffic.break_off(reason)
            raise EngineFailed(reason, cause=error) from error

    @asynccontextmanager
    async def _dirty_on_failure(self, version: VersionKey) -> AsyncIterator[None]:
        """Whatever fails inside leaves weights that are unknown, except a refusal that changed nothing."""
        try:
            yield
        except WeightsRefused:
            raise
        except BaseException as error:
            reason = str(error) or repr(error)
            self._weights.load_failed(version, f"version {version}: {reason}")
            self._traffic.break_off(reason)
            _log.error("weights unknown", version=str(version), cause=reason)
            with contextlib.suppress(Exception):  # it may be what has just failed
                await self._engine.abort(list(self._traffic.running))
                if not self.kv_asleep:
                    await self._engine.resume()
            if not isinstance(error, Exception):
                raise
            raise LoadFailed(f"loading version {version} failed: {reason}", cause=reason) from error


async def _nothing() -> None:
    pass


@asynccontextmanager
async def _at_most(seconds: float, what: str) -> AsyncIterator[None]:
    """A bound whose error names it."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise EngineError(f"{what} took longer than {seconds:g} s") from error


def _close_untaken(reserving: asyncio.Future[FileStaging]) -> None:
    if reserving.exception() is None:
        # bounded by: it is done, this is its callback
        reserving.result().close()


def payload_path(root: Path | None, key: str) -> Path:
    """The file of a payload key; refuses keys that leave the configured root."""
    if root is None:
        raise FailedPrecondition("updates.payload_dir is not set: nothing can be pulled", state="unset", wanted="path")
    try:
        path = (root / key).resolve()
    except ValueError:  # it holds a NUL, which no path may
        raise InvalidArgument(f"payload key {key!r} is no path", field="payload.key") from None
    if Path(key).is_absolute() or not path.is_relative_to(root.resolve()):
        raise InvalidArgument(f"payload key {key!r} leaves the payload store", field="payload.key")
    return path
