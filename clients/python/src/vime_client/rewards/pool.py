"""A fixed number of reward processes. A call that hangs, crashes or is cancelled costs its process, never the pool.

Why not `concurrent.futures`: its time-out stops waiting, not working, so one hung call holds its process for good, and
one `os._exit` breaks the whole pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tenacity

from vime_client.logs import get_logger
from vime_client.rewards.functions import FunctionError, FunctionSpec
from vime_client.rewards.process import ProcessDied, RewardProcess
from vime_client.rewards.values import Score, unscored

LOAD_SECONDS = 60.0
"""How long importing a user's file may take."""
_KILL_GRACE_SECONDS = 0.25
"""Beyond the time-out, so that the child's own, gentle time-out of async rewards comes first."""
_log = get_logger(__name__)

Sample = Mapping[str, Any]


class PoolClosed(Exception):
    """The pool was closed, or can start no more processes."""


class LoadBroken(FunctionError):
    """The process that loads a function ended or takes too long: the next one may not, whatever is written."""


class RewardPool:
    """Runs users' functions in `processes` children.

    Sync functions run one call per process; async functions run the samples of a group side by side in one process;
    batch functions (with a parameter `samples`) get a group in one call.
    """

    def __init__(self, processes: int, timeout_s: float, folder: Path | None = None) -> None:
        """Set up; `folder` is where the functions' own imports are looked for beside their file."""
        if processes < 1:
            raise ValueError(f"a reward pool needs at least 1 process, got {processes}")
        self.processes = processes
        self.timeout_s = timeout_s
        self._folder = folder or Path.cwd()
        self._idle: asyncio.Queue[RewardProcess | None] = asyncio.Queue()
        self._all: set[RewardProcess] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> RewardPool:
        """Start all processes."""
        try:
            for _ in range(self.processes):
                await self._add()
        except OSError:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the pool."""
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return sorted(process.pid for process in self._all)

    async def close(self) -> None:
        """Kill every child, whatever it does; callers that wait get `PoolClosed`."""
        self._closed = True
        self._idle.put_nowait(None)
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in list(self._all)))
        self._all.clear()

    async def load(self, spec: FunctionSpec) -> Mapping[str, Any]:
        """Load a function in one child: its signature as {names, required, is_async}.

        Raises:
            FunctionError: it cannot be found or imported, with the reason.
        """
        async with self._process() as process:
            return await self._loaded(process, spec)

    async def score(
        self, spec: FunctionSpec, common: Mapping[str, Any], record_json: str, samples: Sequence[Sample]
    ) -> list[Score]:
        """Score the samples of one prompt, each within the time-out; result i belongs to sample i.

        Args:
            spec: the function.
            common: arguments that all samples share, such as prompt.
            record_json: the prompt's record as JSON; integers of any size stay exact.
            samples: arguments of each sample, such as text.

        Raises:
            FunctionError: the function cannot be loaded.
            PoolClosed: the pool was closed meanwhile.
        """
        signature = await self._signature(spec)
        job = {"op": "score", "place": spec.place, "name": spec.name, "common": common, "record_json": record_json}
        together = signature["is_async"] or "samples" in signature["names"]
        if not together:
            parts = [self._run({**job, "samples": [sample]}, spec) for sample in samples]
            return [scores[0] for scores in await asyncio.gather(*parts)]
        found = await self._run({**job, "samples": list(samples)}, spec)
        if "samples" in signature["names"]:
            return found
        # A call that blocks the child's loop takes its neighbours with it: those who lost theirs get a second chance
        # alone, so that only the guilty one stays without a reward.
        lost = [i for i, score in enumerate(found) if score.unscored in ("TIMEOUT", "CRASHED") and not score.seconds]
        again = await asyncio.gather(*(self._run({**job, "samples": [samples[i]]}, spec) for i in lost))
        for index, scores in zip(lost, again, strict=True):
            found[index] = scores[0]
        return found

    async def decide(
        self, spec: FunctionSpec, common: Mapping[str, Any], record_json: str, samples: Sequence[Sample]
    ) -> tuple[bool, str]:
        """Ask a filter about one group: keep it, and why not.

        Raises:
            FunctionError: the filter raised, returned something else than a truth value, hung or crashed.
        """
        job = {"op": "score", "raw": True, "place": spec.place, "name": spec.name, "record_json": record_json}
        async with self._process() as process:
            await self._loaded(process, spec)
            try:
                async with asyncio.timeout(self.timeout_s):
                    await process.send({**job, "common": common, "samples": list(samples)})
                    answer = await process.receive()
            except (TimeoutError, ProcessDied) as error:
                await self._replace(process)
                raise FunctionError(f"filter {spec.name}: {error or f'no answer after {self.timeout_s} s'}") from error
        if "error" in answer:
            raise FunctionError(f"filter {spec.name}: {answer['error']}")
        keep, reason = answer["value"]
        return keep, reason

    async def _signature(self, spec: FunctionSpec) -> Mapping[str, Any]:
        for process in self._all:
            if str(spec) in process.loaded:
                return process.loaded[str(spec)]
        return await self.load(spec)

    async def _run(self, job: Mapping[str, Any], spec: FunctionSpec) -> list[Score]:
        """One job in one child, to its end or to its force."""
        count = len(job["samples"])
        found: list[Score | None] = [None] * count
        async with self._process() as process:
            await self._loaded(process, spec)
            failure: Score | None = None
            try:
                async with asyncio.timeout(self.timeout_s + _KILL_GRACE_SECONDS):
                    await process.send({**job, "timeout_s": self.timeout_s})
                    for _ in range(count):
                        answer = await process.receive()
                        index = answer.pop("index")
                        found[index] = Score(**answer)
            except TimeoutError:
                failure = unscored("TIMEOUT", f"no reward after {self.timeout_s} s; its process was killed")
            except ProcessDied as error:
                failure = unscored("CRASHED", str(error))
            if failure is not None:
                await self._replace(process)
        return [score or failure or unscored("CRASHED", "no answer") for score in found]

    async def _loaded(self, process: RewardProcess, spec: FunctionSpec) -> Mapping[str, Any]:
        if str(spec) not in process.loaded:
            try:
                async with asyncio.timeout(LOAD_SECONDS):
                    await process.send({"op": "load", "place": spec.place, "name": spec.name})
                    answer = await process.receive()
            except (TimeoutError, ProcessDied) as error:
                await self._replace(process)
                why = str(error) or f"took longer than {LOAD_SECONDS:.0f} s"
                raise LoadBroken(f"{spec} cannot be loaded: {why}") from error
            if "error" in answer:
                raise FunctionError(answer["error"])
            process.loaded[str(spec)] = answer
        return process.loaded[str(spec)]

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[RewardProcess]:
        """An idle child for one conversation. A cancelled conversation costs the child: it may be in mid-answer."""
        # bounded by: the conversations of the others, each of which has a time; closing the pool wakes all
        process = None if self._closed else await self._idle.get()
        while process is not None and not process.alive:  # ended while idle, such as by the out-of-memory killer
            await self._replace(process)
            # bounded by: as above
            process = await self._idle.get()
        if process is None:
            self._idle.put_nowait(None)  # wake the next who waits
            raise PoolClosed("the reward pool is closed")
        try:
            yield process
        except FunctionError:
            raise
        except BaseException:  # a conversation that broke off: a late answer would be taken for the next one's
            await self._replace(process)
            raise
        finally:
            if process in self._all:
                self._idle.put_nowait(process)

    async def _replace(self, process: RewardProcess) -> None:
        """Kill a child now, start another in the background."""
        if process not in self._all:
            return
        self._all.discard(process)
        try:
            await process.kill()
        finally:
            if not self._closed:
                task = asyncio.get_running_loop().create_task(self._add_again())
                self._replacing.add(task)
                task.add_done_callback(self._replacing.discard)

    async def _add_again(self) -> None:
        try:
            async for attempt in tenacity.AsyncRetrying(
                stop=tenacity.stop_after_attempt(6),
                wait=tenacity.wait_exponential(0.2, max=5),
                retry=tenacity.retry_if_exception_type(OSError),
                reraise=True,
            ):
                with attempt:
                    await self._add()
        except OSError as error:
            _log.error("no more reward processes can be started", cause=str(error), left=len(self._all))
            if not self._all:
                self._closed = True
                self._idle.put_nowait(None)

    async def _add(self) -> None:
        process = await RewardProcess.start(self._folder)
        if self._closed:
            await process.kill()
            return
        self._all.add(process)
        self._idle.put_nowait(process)
