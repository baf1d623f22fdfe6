"""Which weights the engine serves: EMPTY -> SERVING(v), with a version staged beside, or DIRTY when a load failed.

Pure bookkeeping: it moves no bytes. Rules it enforces: a fleet belongs to one run; a lower incarnation is refused; a
version names one manifest digest for ever; versions of one incarnation only go forward; nothing but a whole, verified
version is ever served.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vime_service.bulk.manifest import VersionKey
from vime_service.errors import (
    FailedPrecondition,
    FenceNotMet,
    FleetOwned,
    StaleIncarnation,
    Unavailable,
    VersionConflict,
    WrongStep,
)


class Phase(StrEnum):
    """How far a staged version has come."""

    RECEIVING = "receiving"
    STAGED = "staged"
    LOADING = "loading"


class FenceKind(StrEnum):
    """How a fence compares."""

    ANY = "any"
    AT_LEAST = "at_least"
    EXACTLY = "exactly"


@dataclass(frozen=True, slots=True)
class Fence:
    """The weights a call may run on."""

    kind: FenceKind = FenceKind.ANY
    version: VersionKey | None = None

    def passes(self, serving: VersionKey | None) -> bool:
        """Whether weights of `serving` (None: weights that no run published) are accepted.

        A newer incarnation counts as newer only at the same or a later step: after a rewind its first versions are
        older than the newest of the lost incarnation.
        """
        if self.kind is FenceKind.ANY or self.version is None:
            return True
        if serving is None or serving.run_id != self.version.run_id:
            return False
        if self.kind is FenceKind.EXACTLY:
            return serving == self.version
        return serving.incarnation >= self.version.incarnation and serving.step >= self.version.step

    def __str__(self) -> str:
        return self.kind.value if self.version is None else f"{self.kind.value} {self.version}"


ANY_WEIGHTS = Fence()


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served: a published version with its manifest digest (hex), or weights no run published (None)."""

    version: VersionKey | None
    digest: str


@dataclass(slots=True)
class Update:
    """A version on its way in."""

    version: VersionKey
    digest: str
    generation: int
    phase: Phase = Phase.RECEIVING
    first_seen: bool = True


class Prepared(StrEnum):
    """What `prepare` asks of the caller."""

    START = "start"
    ALREADY_SERVING = "already_serving"
    SAME = "same"


class WeightState:
    """The state of one engine's weights."""

    def __init__(self, updatable: bool = True) -> None:
        self.updatable = updatable
        self.serving: Serving | None = None
        self.update: Update | None = None
        self.dirty: str = ""
        self.highest: VersionKey | None = None
        self._digests: dict[VersionKey, str] = {}

    @property
    def name(self) -> str:
        """EMPTY, STAGING, SERVING or DIRTY, for messages and heartbeats."""
        if self.dirty:
            return "DIRTY"
        if self.update is not None:
            return "STAGING"
        return "EMPTY" if self.serving is None else "SERVING"

    def check_caller(self, caller: VersionKey) -> None:
        """Refuse control calls of another run or a lower incarnation; remember the highest seen.

        Raises:
            FleetOwned, StaleIncarnation.
        """
        if self.highest is not None:
            if caller.run_id != self.highest.run_id:
                raise FleetOwned(
                    f"this engine belongs to run {self.highest.run_id!r}, the caller is of run {caller.run_id!r}",
                    run_id=caller.run_id,
                    owner=self.highest.run_id,
                )
            if caller.incarnation < self.highest.incarnation:
                raise StaleIncarnation(
                    f"incarnation {caller.incarnation} is over, {self.highest.incarnation} has been seen",
                    incarnation=caller.incarnation,
                    current=self.highest.incarnation,
                )
        self.highest = caller if self.highest is None else max(self.highest, caller)

    def serve_initial(self) -> None:
        """Serve the weights the engine started with: for teachers and judges, which no run updates."""
        self.serving = Serving(None, "")

    def prepare(self, version: VersionKey, digest: str, generation: int) -> Prepared:
        """Begin to stage a version.

        A running update of another generation or version is replaced; the caller ends its transfer first.

        Raises:
            FleetOwned, StaleIncarnation, VersionConflict, WrongStep: see the module.
            FailedPrecondition: this engine takes no updates, or is loading another version.
        """
        if not self.updatable:
            raise FailedPrecondition("this engine takes no weight updates", state=self.name, wanted="updatable")
        self.check_caller(version)
        known = self._digests.get(version)
        if known is not None and known != digest:
            raise VersionConflict(
                f"version {version} is known with manifest digest {known}, not {digest}",
                version=version,
                expected=known,
                actual=digest,
            )
        served = self.serving.version if self.serving else None
        if version == served and not self.dirty:
            return Prepared.ALREADY_SERVING
        if served is not None and served.incarnation == version.incarnation and version.step < served.step:
            raise WrongStep(
                f"step {version.step} is older than step {served.step}, which is served already",
                step=version.step,
                expected=served.step,
            )
        if self.update is not None:
            if self.update.phase is Phase.LOADING:
                raise FailedPrecondition(
                    f"version {self.update.version} is being loaded", state=self.name, wanted="SERVING"
                )
            if (self.update.version, self.update.generation) == (version, generation):
                return Prepared.SAME
        self._digests[version] = digest
        self.update = Update(version, digest, generation, first_seen=known is None)
        return Prepared.START

    def staged(self, version: VersionKey) -> None:
        """Every tensor of the version is in staging memory with its digest checked."""
        self._expect(version, Phase.RECEIVING).phase = Phase.STAGED

    def begin_load(self, version: VersionKey) -> None:
        """The load begins: from here on a failure leaves the engine DIRTY."""
        self._expect(version, Phase.STAGED).phase = Phase.LOADING

    def load_refused(self, version: VersionKey) -> None:
        """The load ended before it changed any weight: the old version serves, the staged one is dropped."""
        self._expect(version, Phase.LOADING)
        self.update = None

    def committed(self, version: VersionKey) -> None:
        """The version is loaded and verified: it serves."""
        update = self._expect(version, Phase.LOADING)
        self.serving = Serving(update.version, update.digest)
        self.update = None
        self.dirty = ""

    def load_failed(self, version: VersionKey, reason: str) -> None:
        """The load failed half-way: nothing is served until a later version is committed."""
        self._expect(version, Phase.LOADING)
        self.mark_dirty(reason)

    def mark_dirty(self, reason: str) -> None:
        """The weights are unknown."""
        self.update = None
        self.serving = None
        self.dirty = reason or "unknown weights"

    def drop(self, version: VersionKey) -> bool:
        """Give a staged or running transfer up; whether there was one. What is served does not change."""
        if self.update is None or self.update.version != version:
            return False
        if self.update.phase is Phase.LOADING:
            raise FailedPrecondition(f"version {version} is being loaded", state=self.name, wanted="STAGING")
        self.update = None
        return True

    def refused(self, version: VersionKey) -> None:
        """Nothing was staged, the manifest did not do: the version may come again with another one."""
        if self.update is not None and self.update.version == version:
            if self.update.first_seen:
                del self._digests[version]
            self.update = None

    def admit(self, fence: Fence) -> VersionKey | None:
        """The version a new call runs on.

        Raises:
            Unavailable: no weights are served now.
            FenceNotMet: those served do not pass.
        """
        if self.serving is None:
            detail = f"the weights are unknown: {self.dirty}" if self.dirty else "no weights are published yet"
            raise Unavailable(f"the engine is {self.name}, {detail}", state=self.name)
        if not fence.passes(self.serving.version):
            raise FenceNotMet(
                f"weights of version {self.serving.version} do not pass the fence {fence}",
                fence=fence,
                serving=self.serving.version,
            )
        return self.serving.version

    def _expect(self, version: VersionKey, phase: Phase) -> Update:
        if self.update is None or self.update.version != version or self.update.phase is not phase:
            now = f"{self.update.version} {self.update.phase.value}" if self.update else "no update"
            raise FailedPrecondition(
                f"version {version} is not {phase.value}: there is {now}", state=now, wanted=f"{version} {phase.value}"
            )
        return self.update
