"""Who is there: engines from their heartbeats, and nothing else. After a restart it is whole again within one period.

An engine is ALIVE while its heartbeats come, SUSPECT when they are late, DEAD when several are missing, and forgotten
some time later. `generation` grows whenever a member of the weight update comes, goes or restarts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from vime_router.fences import Version
from vime_service.clock import Clock
from vime_service.errors import AlreadyExists, NotFound, StaleIncarnation

_REPLACED_BOOTS_KEPT = 1024


class EngineState(Enum):
    """What an engine says of itself (as in the contract)."""

    UNSPECIFIED = 0
    EMPTY = 1
    STAGING = 2
    SERVING = 3
    DIRTY = 4
    DRAINING = 5
    PAUSED = 6


class Liveness(Enum):
    """What the age of the last heartbeat says."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine says it is: requests running and waiting, share of the KV cache in use (0 to 1)."""

    running: int
    waiting: int
    kv_cache_usage: float


@dataclass(frozen=True, slots=True)
class Report:
    """One heartbeat. `status` is what the engine sent, kept to be handed on unread."""

    engine_id: str
    boot_id: str
    address: str
    model_id: str
    updatable: bool
    state: EngineState
    version: Version | None = None
    highest_seen: Version | None = None
    load: EngineLoad | None = None
    status: bytes = b""

    @property
    def key(self) -> tuple[str, str]:
        """Names one life of one engine."""
        return (self.engine_id, self.boot_id)

    @property
    def serves(self) -> bool:
        """True if it takes requests: it serves verified weights, also while it stages the next ones."""
        if self.state is EngineState.SERVING:
            return True
        return self.state is EngineState.STAGING and self.version is not None


@dataclass(slots=True)
class Entry:
    """An engine in the directory."""

    report: Report
    heard_at: float
    draining: bool = False
    dead: bool = False


class Change(Enum):
    """What a heartbeat meant."""

    JOINED = "joined"
    REPLACED = "replaced"
    RETURNED = "returned"
    REFRESHED = "refreshed"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a heartbeat changed, and the lives that it ended."""

    change: Change
    ended: tuple[Report, ...] = ()


@dataclass(frozen=True, slots=True)
class Ages:
    """Ages of the last heartbeat, in seconds, from which on an engine is suspect, dead, forgotten.

    `deaf`: when the directory itself was not looked at for this long, its process stood still, and the engines' silence
    in that time means nothing.
    """

    suspect: float
    dead: float
    forget: float
    deaf: float


class Directory:
    """The engines by engine_id.

    Args:
        clock: monotonic time.
        ages: when silence means what.
        first_generation: where the generation starts; a restarted router must start above its former self.
    """

    def __init__(self, clock: Clock, ages: Ages, first_generation: int = 0) -> None:
        self._clock = clock
        self._ages = ages
        self._entries: dict[str, Entry] = {}
        self._replaced: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()  # each with who took its place
        self._incarnations: dict[str, int] = {}
        self._generation = first_generation
        self._swept_at = clock.now()

    @property
    def generation(self) -> int:
        """Grows whenever an updatable engine comes, goes or restarts."""
        return self._generation

    def entries(self) -> list[Entry]:
        """All known engines, by engine_id."""
        return [self._entries[engine_id] for engine_id in sorted(self._entries)]

    def entry(self, engine_id: str) -> Entry:
        """The engine of this id.

        Raises:
            NotFound: it is not known.
        """
        try:
            return self._entries[engine_id]
        except KeyError:
            raise NotFound(f"no engine {engine_id!r} is known here", kind="engine", name=engine_id) from None

    def members(self) -> list[Entry]:
        """Updatable engines that are not dead, by engine_id: those that a weight update must reach.

        Looks only: whoever sweeps must end the calls of the dead. Sweep before, and `generation` fits.
        """
        return [e for e in self.entries() if e.report.updatable and self.liveness(e) is not Liveness.DEAD]

    def age(self, entry: Entry) -> float:
        """Seconds since the engine's last heartbeat."""
        return self._clock.now() - entry.heard_at

    def liveness(self, entry: Entry) -> Liveness:
        """What the age of its last heartbeat says now."""
        age = self.age(entry)
        if entry.dead or age >= self._ages.dead:
            return Liveness.DEAD
        return Liveness.SUSPECT if age >= self._ages.suspect else Liveness.ALIVE

    def hear(self, report: Report) -> Heard:
        """Take in a heartbeat.

        Raises:
            AlreadyExists: its place, engine_id or address, was taken by a life that is still alive.
        """
        self._refuse_the_replaced(report)
        ended = self._end_lives_replaced_by(report)
        known = self._entries.get(report.engine_id)
        self._learn_incarnations(report)
        was_member = known is not None and known.report.updatable and not known.dead
        if was_member != report.updatable or any(life.report.updatable and not life.dead for life in ended):
            self._generation += 1
        reports = tuple(life.report for life in ended)
        if known is None:
            self._entries[report.engine_id] = Entry(report, self._clock.now())
            return Heard(Change.REPLACED if ended else Change.JOINED, reports)
        returned = known.dead
        known.report, known.heard_at, known.dead = report, self._clock.now(), False
        return Heard(Change.RETURNED if returned else Change.REFRESHED, reports)

    def sweep(self) -> list[Report]:
        """Declare the long silent dead and forget the long dead; the newly dead are returned. Call it often."""
        self._pardon_own_silence()
        dead: list[Report] = []
        for engine_id, entry in list(self._entries.items()):
            age = self.age(entry)
            if not entry.dead and age >= self._ages.dead:
                entry.dead = True
                self._generation += entry.report.updatable
                dead.append(entry.report)
            if age >= self._ages.forget:
                del self._entries[engine_id]
        return dead

    def set_draining(self, engine_id: str, draining: bool) -> Entry:
        """Take an engine out of rotation or put it back; a restart of the engine puts it back, too.

        Raises:
            NotFound: it is not known.
        """
        entry = self.entry(engine_id)
        entry.draining = draining
        return entry

    def admit_caller(self, version: Version) -> None:
        """Let a trainer of this run and incarnation pass, and remember it.

        Raises:
            StaleIncarnation: a later incarnation of the run was seen.
        """
        current = self._incarnations.get(version.run_id, 0)
        if version.incarnation < current:
            raise StaleIncarnation(
                f"incarnation {version.incarnation} of run {version.run_id} is over: {current} was seen",
                incarnation=version.incarnation,
                current=current,
            )
        self._incarnations[version.run_id] = version.incarnation

    def _pardon_own_silence(self) -> None:
        now = self._clock.now()
        gap, self._swept_at = now - self._swept_at, now
        if gap >= self._ages.deaf:
            for entry in self._entries.values():
                entry.heard_at = min(now, entry.heard_at + gap)

    def _refuse_the_replaced(self, report: Report) -> None:
        # A process that was frozen while its successor took over must not take the place back by waking up, and of two
        # engines that claim one address, the first must not end the second with each of its heartbeats.
        key = report.key
        while (successor := self._replaced.get(key)) is not None and successor != report.key:
            key = successor
        entry = self._entries.get(key[0])
        if key == report.key or entry is None or entry.report.key != key or self.liveness(entry) is Liveness.DEAD:
            self._replaced.pop(report.key, None)
            return
        raise AlreadyExists(
            f"boot {report.boot_id} of engine {report.engine_id} at {report.address} was replaced by "
            f"boot {key[1]} of engine {key[0]} at {entry.report.address}",
            kind="engine",
            name=report.engine_id,
        )

    def _end_lives_replaced_by(self, report: Report) -> tuple[Entry, ...]:
        ended: list[Entry] = []
        for engine_id, entry in list(self._entries.items()):
            other = entry.report
            if other.key == report.key:
                continue
            if engine_id == report.engine_id or other.address == report.address:
                del self._entries[engine_id]
                self._replaced[other.key] = report.key
                ended.append(entry)
        while len(self._replaced) > _REPLACED_BOOTS_KEPT:
            self._replaced.popitem(last=False)
        return tuple(ended)

    def _learn_incarnations(self, report: Report) -> None:
        for version in (report.version, report.highest_seen):
            if version is not None:
                known = self._incarnations.get(version.run_id, 0)
                self._incarnations[version.run_id] = max(known, version.incarnation)
