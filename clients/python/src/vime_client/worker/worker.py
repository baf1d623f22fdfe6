"""The rollout worker: draw leases, make their groups, put them in. Stateless: whatever it loses is leased again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import grpc
from opentelemetry import trace

from vime.buffer.v1 import prompt_service_pb2 as pb
from vime_client.buffer import BufferClient, is_gone, new_request_id, was_inserted
from vime_client.errors import RpcError
from vime_client.generation import GenerationClient
from vime_client.logs import get_logger
from vime_client.one_line import told
from vime_client.retry import is_transient, whole_step
from vime_client.rewards.functions import FunctionSpec
from vime_client.rewards.pool import PoolClosed, RewardPool
from vime_client.rewards.reward import Reward, is_plugin, make_reward
from vime_client.worker.config import WorkerSettings
from vime_client.worker.filters import NONZERO_STD, make_filter
from vime_client.worker.leases import HeldLeases
from vime_client.worker.maker import Failed, GroupMaker, Made

_LINGER_S = 0.01
"""After a lease ends, wait this long for others to end too: one LeasePrompts for several instead of one each."""
_AWAY_WAIT_S = 0.5
_UNTOLD = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.ABORTED,
    }
)
"""Without a reason of ours: what proxies, and gRPC itself, answer for a service that is not there or broke off."""
_log = get_logger(__name__)
_tracer = trace.get_tracer("vime_client.worker")


class BufferAway(Exception):
    """The buffer could not be reached for longer than `buffer_away_s`."""


async def run_worker(settings: WorkerSettings, stop: asyncio.Event) -> Counter[str]:
    """Work until `stop` is set, then give all leases back; what was done, by kind.

    Raises:
        FunctionError: a reward or the filter cannot be loaded.
        BufferAway: the buffer was away too long.
        RpcError: the buffer refuses this worker.
    """
    # Attempts belong to the whole steps of this worker, so its channels make none of their own.
    once = settings.credentials.once()
    async with (
        BufferClient(settings.buffer_address, once) as buffer,
        GenerationClient(settings.router_address, once) as engine,
        RewardPool(settings.reward_processes, settings.reward_timeout_s, settings.base_dir) as pool,
    ):
        rewards = await load_rewards(settings, pool)
        group_filter = make_filter(settings.filter, pool, settings.base_dir, settings.reward_timeout_s)
        maker = GroupMaker(settings, engine, rewards, group_filter)
        return await Worker(settings, buffer, maker).run(stop)


async def load_rewards(settings: WorkerSettings, pool: RewardPool) -> Mapping[str, Reward]:
    """The rewards and the filter, each function loaded once, so that mistakes show before the first sample.

    Raises:
        FunctionError: naming the file and the function.
    """
    for text in [*settings.rewards.values(), settings.filter]:
        if text not in ("", NONZERO_STD) and not is_plugin(text):
            await pool.load(FunctionSpec.parse(text, settings.base_dir))
    return {
        name: make_reward(text, pool, settings.base_dir, settings.reward_timeout_s)
        for name, text in settings.rewards.items()
    }


class Worker:
    """Keeps `concurrency` leases in work."""

    def __init__(self, settings: WorkerSettings, buffer: BufferClient, maker: GroupMaker) -> None:
        self._settings = settings
        self._buffer = buffer
        self._maker = maker
        self._leases = HeldLeases(buffer, settings.worker_id)
        self.counts: Counter[str] = Counter()
        """What became of the leases: inserted, dropped, failed, lost, given_back."""

    async def run(self, stop: asyncio.Event) -> Counter[str]:
        """Work until `stop` is set, then give all leases back."""
        _log.info("drawing prompts", worker_id=self._settings.worker_id, concurrency=self._settings.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                keeper = group.create_task(self._leases.keep_alive())
                alive = group.create_task(_touch(self._settings.sign_of_life))
                drawer = group.create_task(self._draw_and_work(group))
                await _set_or_done(stop, drawer)
                drawer.cancel()
                for task in self._leases:
                    task.cancel()
                if len(self._leases):
                    await asyncio.wait(list(self._leases), timeout=self._settings.stop_timeout_s)
                keeper.cancel()
                alive.cancel()
        except ExceptionGroup as failed:  # one cause ends the worker; the others follow from it
            raise failed.exceptions[0] from failed
        counts = self.counts + Counter({f"unscored_{k.lower()}": n for k, n in self._maker.unscored.items()})
        _log.info("worker ends", counts=dict(counts))
        return counts

    async def _draw_and_work(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        heard = loop.time()
        request_id = new_request_id()
        most = self._settings.concurrency
        while True:
            free = min(self._settings.concurrency - len(self._leases), most)
            if free <= 0:
                # bounded by: the leases' own work, each part of which has a time
                await asyncio.wait(list(self._leases), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(_LINGER_S)
                continue
            try:
                answer = await self._buffer.draw(
                    self._settings.worker_id, free, self._settings.lease_wait_s, request_id=request_id
                )
            except RpcError as error:
                if error.too_large:  # leases of a buffer that does not fill its answers by bytes; they expire
                    heard, most, request_id = loop.time(), max(1, free // 2), new_request_id()
                    _log.error("an answer with leases is too large, asking for fewer", asked=free, cause=str(error))
                    await asyncio.sleep(_LINGER_S if free > 1 else _AWAY_WAIT_S)
                    continue
                if not _draw_passes(error):
                    raise
                if loop.time() - heard > self._settings.buffer_away_s:
                    away = f"the buffer at {self._settings.buffer_address} is away for {loop.time() - heard:.0f} s"
                    raise BufferAway(f"{away}: {error}") from error
                await asyncio.sleep(max(_AWAY_WAIT_S, error.retry_after or 0.0))
                continue
            heard = loop.time()
            most = min(2 * most, self._settings.concurrency)
            request_id = new_request_id()  # not before an answer: what a lost one granted is still ours
            for lease in answer.leases:
                self._leases.hold(lease, group.create_task(self._work(lease)))
            if not answer.leases and answer.blocked_by in (pb.BLOCK_REASON_END_OF_DATA, pb.BLOCK_REASON_CLOSED):
                await asyncio.sleep(_AWAY_WAIT_S)  # such answers come at once, but an eval round may still open

    async def _work(self, lease: pb.PromptLease) -> None:
        attributes: dict[str, str | int] = {
            "group_id": lease.group_id,
            "attempt": lease.attempt,
            "table": lease.table,
        }
        with _tracer.start_as_current_span("worker.group", attributes=attributes) as span:
            try:
                outcome = await self._made_and_settled(lease)
            except asyncio.CancelledError:
                outcome = await self._let_go(lease)
            span.set_attribute("outcome", outcome)
        self.counts[outcome] += 1

    async def _made_and_settled(self, lease: pb.PromptLease) -> str:
        """The boundary around the work of one lease: what nobody foresaw costs this lease, never the worker.

        Where every lease fails so, the buffer's bound on prompts given up in a row ends the run.
        """
        try:
            return await self._settle(lease, await self._maker.make(lease))
        except PoolClosed:
            raise  # no lease's fault: no reward can be run any more, and a new worker may
        except Exception as error:  # noqa: BLE001 - a prompt, a reward and a plug-in are not ours: any class may come
            _log.exception("the work of a lease failed", group_id=lease.group_id, attempt=lease.attempt)
            return await self._settle(lease, Failed(pb.FAILURE_CLASS_USER_CODE, told(error)))

    async def _settle(self, lease: pb.PromptLease, made: Made | Failed) -> str:
        """Tell the buffer what came of a lease; a worker that stops meanwhile still does it, in bounded time."""
        tell = self._insert(lease, made) if isinstance(made, Made) else self._fail(lease, made)
        telling = asyncio.ensure_future(tell)
        try:
            return await asyncio.shield(telling)
        except asyncio.CancelledError:
            if not self._leases.is_lost(lease.lease_id):
                done, _ = await asyncio.wait({telling}, timeout=self._settings.stop_timeout_s / 2)
                if done:
                    return telling.result()
            telling.cancel()
            raise

    async def _insert(self, lease: pb.PromptLease, made: Made) -> str:
        done = "dropped" if made.drop_reason else "inserted"
        seconds = self._settings.insert_timeout_s
        try:
            async for attempt in whole_step("insert", attempts=1000, seconds=seconds, max_wait_s=2.0, retry_if=_passes):
                with attempt:
                    await self._buffer.insert(lease.lease_id, made.group, made.drop_reason)
        except RpcError as error:
            if is_gone(error):
                _log.info("a group came too late", group_id=lease.group_id, attempt=lease.attempt, cause=str(error))
                return "lost"
            _log.error("a group was refused", group_id=lease.group_id, attempt=lease.attempt, cause=str(error))
            outcome = await self._fail(lease, Failed(pb.FAILURE_CLASS_GENERATION, f"insert refused: {error}"))
            return done if outcome == "inserted" else outcome
        return done

    async def _fail(self, lease: pb.PromptLease, failed: Failed) -> str:
        name = pb.FailureClass.Name(failed.failure).removeprefix("FAILURE_CLASS_").lower()
        try:
            async for attempt in whole_step("give back", attempts=10, seconds=10, retry_if=_passes):
                with attempt:
                    answer = await self._buffer.fail(lease.lease_id, failed.failure, failed.detail)
        except RpcError as error:  # its time to live ends it
            if was_inserted(error):
                return "inserted"
            _log.warning("a lease could not be given back", group_id=lease.group_id, cause=str(error))
            return "lost" if is_gone(error) else f"failed_{name}"
        say = _log.error if answer.given_up else _log.warning
        verb = "prompt given up" if answer.given_up else "prompt failed, it will be drawn again"
        say(f"{verb}: {failed.detail}", group_id=lease.group_id, attempt=lease.attempt, failure=name)
        return f"failed_{name}"

    async def _let_go(self, lease: pb.PromptLease) -> str:
        """The task was cancelled: the lease is lost, or the worker stops and gives it back."""
        if self._leases.is_lost(lease.lease_id):
            _log.info("lease lost, work dropped", group_id=lease.group_id, attempt=lease.attempt)
            return "lost"
        try:
            await self._buffer.fail(
                lease.lease_id, pb.FAILURE_CLASS_SHUTDOWN, "the worker stops", self._settings.stop_timeout_s / 2
            )
        except RpcError as error:
            if was_inserted(error):
                return "inserted"
            if not is_gone(error):
                _log.warning("a lease could not be given back", group_id=lease.group_id, cause=str(error))
            return "lost"
        return "given_back"


def _passes(error: BaseException) -> bool:
    """True if the same call may succeed later: transient, a deadline that a half-open connection ran out, or an answer
    that tells no reason, so that it came from something before the buffer rather than from the buffer."""
    if not isinstance(error, RpcError):
        return is_transient(error)
    untold = not error.reason and error.code in _UNTOLD
    return error.transient or untold or error.code is grpc.StatusCode.DEADLINE_EXCEEDED


def _draw_passes(error: RpcError) -> bool:
    """As `_passes`; but a method that is not there is another service's address, and a buffer that fails at one prompt
    may have others."""
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        return False
    return _passes(error) or error.code is grpc.StatusCode.INTERNAL


async def _touch(file: Path | None) -> None:
    """Touch a file every second: the launcher kills a worker that is frozen."""
    while file is not None:
        file.touch()  # noqa: ASYNC240 - microseconds, on a local disk
        await asyncio.sleep(1.0)


async def _set_or_done(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    # unbounded: this is the worker's life; a signal or a failure ends it
    waiting = asyncio.ensure_future(stop.wait())
    try:
        # unbounded: as above
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
