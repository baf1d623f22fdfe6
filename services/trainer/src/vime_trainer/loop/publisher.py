"""The weight update: one version onto every engine of the fleet, all or nothing per engine.

    members → prepare → (tensors) → staged → commit

A member that refuses or dies before its load starts still serves the old version; it is dropped and the group
is formed again, under a new generation, with the same version. Success is at least `min_engines` committed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import Field

from vime_service.config import ConfigModel, Seconds
from vime_trainer.loop.ports import Commit, Described, Fleet, Member, Ranks, Refused
from vime_trainer.loop.versions import Version

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.2
_AWAY_S = 1.0
# Generations are unique within the run: the incarnation in the high bits, a counter in the low ones.
_GENERATIONS_PER_INCARNATION = 1 << 32


class PublishConfig(ConfigModel):
    """Weight updates."""

    interval: int = Field(default=1, ge=1)
    """Steps between publishes; interval - 1 must not exceed the table's max_staleness."""

    min_engines: int = Field(default=1, ge=1)
    """Engines that must have committed a version for the publish to succeed."""

    engines_timeout_s: Seconds = 180.0
    """How long to wait for `min_engines` usable engines, those that died and start again included."""

    transfer_timeout_s: Seconds = 60.0
    """Longest time for the tensors of one attempt."""

    max_attempts: int = Field(default=3, ge=1)
    """Times that the group is formed for one version."""

    canary_prompts: int = Field(default=4, ge=0)
    """Fixed prompts whose logprobs must agree between trainer and engine after a load. 0 switches the check off."""

    canary_tolerance: float | None = Field(default=None, gt=0, le=100)
    """Largest |logprob difference| on the canary. Unset: what follows from the types that trainer and engine compute
    in; there is no need to set it."""

    def idle(self) -> Mapping[str, str]:
        """What no canary reads."""
        return {"canary_tolerance": "canary_prompts = 0"} if self.canary_prompts == 0 else {}


class PublishFailed(Exception):
    """Fewer than `min_engines` serve the version; the message says what each member answered."""


@dataclass(frozen=True)
class Published:
    """A successful publish."""

    version: Version
    committed: list[str]
    failed: dict[str, str]
    bytes_sent: int
    seconds: float
    pause_s: float
    canary_difference: float | None


@dataclass
class _Attempt:
    """What became of the members in one formation of the group."""

    committed: dict[str, Commit] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    sent: int = 0


class Publisher:
    """Publishes the ranks' weights to the fleet, and again to engines that come later."""

    def __init__(self, config: PublishConfig, fleet: Fleet, ranks: Ranks) -> None:
        self._config, self._fleet, self._ranks = config, fleet, ranks
        self._generation = 0
        self._current: Described | None = None

    async def publish(self, version: Version) -> Published:
        """Bring `version`, the weights that the ranks hold, onto the fleet. Raises PublishFailed or RankDied."""
        started = time.monotonic()
        described = await self._ranks.describe(version)
        total = _Attempt()
        attempt, since = 0, time.monotonic()
        while attempt < self._config.max_attempts:
            members = await self._wait_for_members(version, total)
            total.away.clear()
            # The group fails as a whole: the last attempt shows which member it was, and saves the others.
            alone = 0 < attempt == self._config.max_attempts - 1
            for group in [[member] for member in members] if alone else [members]:
                await self._attempt(described, group, total)
            enough = len(total.committed) >= self._config.min_engines
            if enough and not self._left(members, total):
                break
            attempt += 1
            logger.warning("publish %s, attempt %d: %s", version, attempt, total.failed)
            # The router has not yet noticed that they died, or they are starting again: that uses up no attempt.
            if not enough and all(m.engine_id in total.away for m in members if m.engine_id not in total.committed):
                if time.monotonic() - since > self._config.engines_timeout_s:
                    break
                attempt -= 1
                await asyncio.sleep(_AWAY_S)
        if len(total.committed) < self._config.min_engines:
            raise PublishFailed(
                f"version {version}: {len(total.committed)} engines committed, {self._config.min_engines} needed; "
                f"{total.failed or 'no engine answered'}"
            )
        self._current = described
        return self._report(described, total, time.monotonic() - started)

    async def catch_up(self, version: Version) -> list[str]:
        """Bring the current version onto members that do not serve it: joiners, restarted and dirty ones.

        Returns the engines that committed; a failure is logged and left for the next call, since the fleet serves.
        """
        described = self._current
        if described is None or described.version != version:
            return []
        lagging = [m for m in await self._fleet.members(version) if m.usable and m.serving != version]
        if not lagging:
            return []
        attempt = _Attempt()
        # As it was published: the ranks may have trained on since, and a new canary would be that of other weights.
        await self._attempt(described, lagging, attempt)
        if attempt.failed:
            logger.warning("catching up to %s: %s", version, attempt.failed)
        return sorted(attempt.committed)

    async def _wait_for_members(self, version: Version, total: _Attempt) -> list[Member]:
        """Usable members that have not committed yet; waits until `min_engines` are there."""
        deadline = time.monotonic() + self._config.engines_timeout_s
        while True:
            usable = [m for m in await self._fleet.members(version) if m.usable]
            if len(usable) >= self._config.min_engines:
                return [m for m in usable if m.engine_id not in total.committed]
            if time.monotonic() > deadline:
                raise PublishFailed(
                    f"version {version}: {len(usable)} usable engines after {self._config.engines_timeout_s:.0f} s, "
                    f"{self._config.min_engines} needed"
                )
            await asyncio.sleep(_POLL_S)  # an engine's heartbeat brings it; there is nothing to wait on

    @staticmethod
    def _left(members: Sequence[Member], total: _Attempt) -> bool:
        return any(m.engine_id not in total.committed for m in members)

    async def _attempt(self, described: Described, members: Sequence[Member], total: _Attempt) -> None:
        """Prepare everyone, then transfer and commit among those who prepared. Fills `total`."""
        generation, joining = await self._prepare(described, members, total)
        if not joining:
            return
        staged = await self._transfer(described, generation, joining, total)
        commits = await self._each([(m, self._fleet.commit(m, described)) for m in staged], total)
        for member, commit in commits:
            total.committed[member.engine_id] = commit
            total.failed.pop(member.engine_id, None)

    async def _prepare(
        self, described: Described, members: Sequence[Member], total: _Attempt
    ) -> tuple[int, list[Member]]:
        """Ask members to join until all that remain said yes to one and the same group."""
        while members:
            generation = self._next_generation(described.version)
            world = len(members) + 1
            rank = {m.engine_id: i for i, m in enumerate(members, start=1)}
            asked = [(m, self._fleet.prepare(m, described, generation, rank[m.engine_id], world)) for m in members]
            answers = await self._each(asked, total)
            for member, already in answers:
                if already:
                    total.committed[member.engine_id] = Commit(None, 0.0)
            joining = [m for m, already in answers if not already]
            if len(joining) == len(members):
                return generation, joining
            # The group would have the wrong size: form it anew among those who are in.
            await self._abort(joining, described.version, "the group is formed again without a member")
            members = joining
        return 0, []

    async def _transfer(
        self, described: Described, generation: int, members: Sequence[Member], total: _Attempt
    ) -> list[Member]:
        """Send the tensors; members that hold them all, digests checked."""
        sending = asyncio.create_task(
            self._ranks.send(described, generation, len(members) + 1, self._config.transfer_timeout_s)
        )
        waits = [(m, self._fleet.await_staged(m, described.version)) for m in members]
        staging = asyncio.create_task(self._each(waits, total))
        try:
            # bounded by: the transfer's time-out on both sides. A sender that failed or died ends it at once.
            await asyncio.wait({sending, staging}, return_when=asyncio.FIRST_EXCEPTION)
            if sending.done():
                sending.result()
            # bounded by: the deadline that each leg gave its call
            staged = await staging
        except Refused as error:  # the sending side of the transfer failed: nobody can be trusted to be complete
            for member in members:
                total.failed.setdefault(member.engine_id, f"transfer: {error}")
            await self._abort(members, described.version, str(error))
            return []
        finally:
            for task in (sending, staging):
                task.cancel()
            await asyncio.gather(sending, staging, return_exceptions=True)
        total.sent += described.total_bytes * len(members)
        return [m for m, _ in staged]

    @staticmethod
    async def _each(calls: Sequence[tuple[Member, Awaitable[T]]], total: _Attempt) -> list[tuple[Member, T]]:
        """Await all calls at once; members that refuse go into `total.failed` with their reason."""

        async def ask(member: Member, call: Awaitable[T]) -> tuple[Member, T] | None:
            try:
                # bounded by: the deadline of the leg
                return member, await call
            except Refused as error:
                total.failed[member.engine_id] = str(error)
                if error.away:
                    total.away.add(member.engine_id)
                return None

        good: list[tuple[Member, T]] = []
        for answer in await asyncio.gather(*(ask(m, call) for m, call in calls), return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                good.append(answer)
        return good

    async def _abort(self, members: Sequence[Member], version: Version, cause: str) -> None:
        await asyncio.gather(*(self._fleet.abort(m, version, cause) for m in members), return_exceptions=True)

    def _next_generation(self, version: Version) -> int:
        self._generation = max(self._generation + 1, version.incarnation * _GENERATIONS_PER_INCARNATION)
        return self._generation

    @staticmethod
    def _report(described: Described, total: _Attempt, seconds: float) -> Published:
        commits = list(total.committed.values())
        differences = [c.canary_difference for c in commits if c.canary_difference is not None]
        return Published(
            version=described.version,
            committed=sorted(total.committed),
            failed={k: v for k, v in total.failed.items() if k not in total.committed},
            bytes_sent=total.sent,
            seconds=seconds,
            pause_s=max((c.pause_s for c in commits), default=0.0),
            canary_difference=max(differences, default=None),
        )
