"""Kill and freeze every process of a real run, at k = 0, 1 and 3: it reaches its last step, nothing lost or doubled.

`make chaos NAME=run ROUNDS=n`. Real vLLM and real Megatron on CPU. Each round sends SIGKILL or SIGSTOP (and later
SIGCONT) to one process: trainer service, trainer rank, vLLM engine, rollout service, router, buffer, worker or driver.
Before it a foreign worker inserts a group that no model can have made (`tests/chaos/poison.py`); the data file holds as
many lines that nobody can read. At the end, the trained group ids of every step are compared with the ledger's, and
the versions and laws of every step are checked; every poison was counted with its reason and none was trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.poison import Poisoner, forget_the_model, quarantined, read_plan, spoil_data

from vime_client.buffer import BufferClient

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "addition" / "grpo.toml"
VIME = Path(sys.executable).with_name("vime")
STALENESSES = (0, 1, 3)
VICTIMS = ("rank", "worker-0", "buffer", "router", "engine", "trainer", "rollout-0", "driver")
GROUPS_PER_STEP, CHECKPOINT_EVERY = 4, 3
FIRST_STEP_S, QUIET_S, RECOVER_S = 300, (1.0, 4.0), 300
FREEZE_S = (1.0, 6.0)
STEPS_PER_ROUND = 12
"""More than a run makes between two faults: one or two a second on two cores."""


@dataclass
class Chaos:
    """One run at one k, and the faults it gets."""

    folder: Path
    staleness: int
    rounds: int
    random: random.Random
    driver: subprocess.Popen[bytes] | None = None
    faults: Counter[str] = field(default_factory=Counter)
    recovered_s: list[float] = field(default_factory=list)
    poisoner: Poisoner = field(default_factory=Poisoner)
    skipped_records: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"k{self.staleness}"

    @property
    def run_dir(self) -> Path:
        return self.folder / self.name

    @property
    def steps(self) -> int:
        """Enough that the run is still going when the last fault comes; the recovery of each costs steps."""
        return 10 + STEPS_PER_ROUND * self.rounds

    @property
    def recipe(self) -> Path:
        """A copy of the main recipe, whose data has been spoilt."""
        folder = self.folder / f"{self.name}-recipe"
        if not folder.exists():
            shutil.copytree(RECIPE.parent, folder)
            spoil_data(folder / "train.jsonl", self.rounds, self.random)
        return folder / RECIPE.name

    def start(self, *flags: str) -> None:
        """Start a driver: of a new run, or one that joins."""
        settings = (
            f"run.dir={self.folder}",
            f"run.steps={self.steps}",
            f"tables.train.max_staleness={self.staleness}",
            f"tables.train.groups_per_step={GROUPS_PER_STEP}",
            "tables.train.samples_per_prompt=4",
            "tables.train.source.lenient=true",
            "worker.concurrency=3",  # below groups_per_step, so that the foreign worker gets its share
            "tables.train.lease_ttl=8",
            "tables.train.generation_deadline=6",
            "tables.train.max_attempts=1000",
            "tables.eval/heldout.source.limit=8",
            "tables.eval/heldout.max_attempts=1000",
            "launcher.restart_limit=1000",
            "launcher.hang_timeout_s=20",
            f"trainer.checkpoint.interval={CHECKPOINT_EVERY}",
            "trainer.faults.max_restarts=1000",
        )
        sets = [part for setting in settings for part in ("--set", setting)]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.driver = subprocess.Popen(
                [str(VIME), "run", str(self.recipe), "--name", self.name, *flags, *sets],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # ------------------------------------------------------------------ what is there

    def state(self) -> dict[str, Any]:
        """The supervisor's view; empty while there is none."""
        try:
            return json.loads((self.run_dir / "services" / "state.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    @property
    def over(self) -> bool:
        return self.state().get("phase") in ("finished", "incomplete", "failed", "stopped")

    def records(self) -> list[dict[str, Any]]:
        """Step records in the order they were written; torn lines are left out."""
        return [r for r in _json_lines(self.run_dir / "metrics.jsonl") if "step" in r]

    def pid_of(self, victim: str) -> int | None:
        """The process to hit, or None while it is not there."""
        if victim == "driver":
            return self.driver.pid if self.driver and self.driver.poll() is None else None
        services = self.state().get("services", {})
        if victim in ("rank", "engine"):
            parent, mark = ("trainer", b"vime_trainer.rank") if victim == "rank" else ("rollout-0", b"EngineCore")
            found = [p for p in _descendants(services.get(parent, {}).get("pid", 0)) if mark in _cmdline(p)]
            return found[0] if found else None
        return services.get(victim, {}).get("pid") or None

    # ------------------------------------------------------------------ faults

    def run(self) -> None:
        """The run with its faults, to its end."""
        self.start("--fresh")
        self._wait(lambda: bool(self.records()) or self.over, FIRST_STEP_S, "the first step")
        asyncio.run(self._read_skipped())
        for round_ in range(self.rounds):
            time.sleep(self.random.uniform(*QUIET_S))
            if self.over:
                break
            self._poison()
            self._fault(VICTIMS[(round_ + STALENESSES.index(self.staleness) * 3) % len(VICTIMS)])
        self._wait(lambda: self.over, RECOVER_S + 20 * self.steps, "the end of the run")
        if self.driver is not None:
            self.driver.wait(timeout=120)

    def _poison(self) -> None:
        """A foreign worker inserts one bad group; every third time the ledger does not know the model, and what is
        stored then, only training can find."""
        if self.random.random() < 1 / 3 and self.pid_of("buffer"):
            forget_the_model(self.run_dir)
        asyncio.run(self.poisoner.insert(read_plan(self.run_dir), self.random))

    def _fault(self, victim: str) -> None:
        pid = self.pid_of(victim)
        if pid is None:
            return
        freeze = victim != "driver" and self.random.random() < 0.35
        before, began = len(self.records()), time.monotonic()
        self.faults[f"{'freeze' if freeze else 'kill'} {victim}"] += 1
        try:
            if freeze:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.random.uniform(*FREEZE_S))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it ended by itself, or the supervisor was faster
        if victim == "driver" and self.driver is not None:
            self.driver.wait(timeout=30)
            self.start("--join")
        self._wait(lambda: len(self.records()) > before or self.over, RECOVER_S, f"a step after {victim} was hit")
        self.recovered_s.append(time.monotonic() - began)

    async def _read_skipped(self) -> None:
        async with BufferClient(read_plan(self.run_dir)["buffer"]) as buffer:
            self.skipped_records = dict((await buffer.tables())["train"].skipped_records)

    def _wait(self, condition: Any, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                log = (self.folder / f"{self.name}.log").read_text(errors="replace")[-3000:]
                raise TimeoutError(f"{self.name}: {what} did not come within {seconds:.0f} s; {self.state()}\n{log}")
            time.sleep(0.2)

    # ------------------------------------------------------------------ the verdict

    def verdict(self) -> dict[str, Any]:
        """What was lost, doubled or mixed."""
        records = self.records()
        final = {int(record["step"]): record for record in records}
        ledger = _ledger_batches(self.run_dir / "buffer")
        trained = {step: list(record["group_ids"]) for step, record in final.items()}
        ids = [group for batch in trained.values() for group in batch]
        found = quarantined(self.run_dir)
        versions = [tuple(int(part) for part in str(r["version"]).split(".")) for r in records]
        return {
            "phase": self.state().get("phase"),
            "reason": self.state().get("reason"),
            "missed_rounds": self.rounds - sum(self.faults.values()),
            "steps": len(final),
            "expected_steps": self.steps,
            "lost": sum(trained.get(step) != batch for step, batch in ledger.items())
            + sum(step not in final for step in range(1, self.steps + 1)),
            "doubled": len(ids) - len(set(ids)),
            "mixed": sum(a >= b for a, b in itertools.pairwise(versions)),
            "laws_held": all(_laws_hold(record) for record in records),
            "poisons": sum(self.poisoner.refused.values()) + len(self.poisoner.accepted) + self.poisoner.lost,
            "bad_records": sum(self.skipped_records.values()),
            "poison_refused": dict(self.poisoner.refused),
            "poison_quarantined": [found.get(key, f"{key} NOT FOUND") for key in self.poisoner.accepted],
            "poison_uncounted": abs(self.rounds - sum(self.skipped_records.values()))
            + len(self.poisoner.accepted.keys() - found.keys()),
            "incarnations": max((v[0] for v in versions), default=0),
        }


def run(rounds: int) -> dict[str, Any]:
    """`rounds` faults, spread over the runs at each k."""
    seed = int(os.environ.get("VIME_CHAOS_SEED", time.time_ns() % 2**31))
    share = [rounds // len(STALENESSES) + (i < rounds % len(STALENESSES)) for i in range(len(STALENESSES))]
    verdicts, faults, recovered = {}, Counter[str](), [0.0]
    with _folder() as folder:
        for staleness, count in zip(STALENESSES, share, strict=True):
            chaos = Chaos(Path(folder), staleness, count, random.Random(seed + staleness))
            try:
                chaos.run()
                verdicts[chaos.name] = chaos.verdict()
            finally:
                _end(chaos)
            faults += chaos.faults
            recovered += chaos.recovered_s
            print(f"{chaos.name}: {verdicts[chaos.name]} {dict(chaos.faults)}", flush=True)
    unfinished = sum(v["phase"] != "finished" or v["missed_rounds"] > 0 for v in verdicts.values())
    return {
        "name": "run",
        "rounds": sum(faults.values()),
        "seed": seed,
        "lost": sum(v["lost"] for v in verdicts.values()) + unfinished,
        "doubled": sum(v["doubled"] for v in verdicts.values()),
        "mixed": sum(v["mixed"] for v in verdicts.values()),
        "laws_held": all(v["laws_held"] for v in verdicts.values()),
        "poisons": sum(v["poisons"] for v in verdicts.values()),
        "poison_uncounted": sum(v["poison_uncounted"] for v in verdicts.values()),
        "recovered_s_max": round(max(recovered), 1),
        "faults": dict(faults),
        "runs": verdicts,
    }


def _folder() -> contextlib.AbstractContextManager[str]:
    """Where the runs live: `VIME_CHAOS_DIR`, which stays, or a folder that goes."""
    kept = os.environ.get("VIME_CHAOS_DIR")
    if kept is None:
        return tempfile.TemporaryDirectory(prefix="vime-chaos-run-")
    Path(kept).mkdir(parents=True, exist_ok=True)
    return contextlib.nullcontext(kept)


def _end(chaos: Chaos) -> None:
    """End whatever is left of a run that failed."""
    pids = [chaos.state().get("pid", 0), *(s.get("pid", 0) for s in chaos.state().get("services", {}).values())]
    if not chaos.over:
        for pid in filter(None, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    if chaos.driver is not None and chaos.driver.poll() is None:
        chaos.driver.kill()
        chaos.driver.wait(timeout=30)


def _ledger_batches(folder: Path) -> dict[int, list[str]]:
    """Group ids of every completed step as the ledger has them, read from its database."""
    with sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        rows = ledger.execute(
            "SELECT train_step, group_id FROM groups WHERE train_step IS NOT NULL ORDER BY train_step, place"
        ).fetchall()
    batches: dict[int, list[str]] = {}
    for step, group in rows:
        batches.setdefault(int(step), []).append(group)
    return batches


def _laws_hold(record: dict[str, Any]) -> bool:
    b = {name.removeprefix("buffer/"): value for name, value in record.items() if name.startswith("buffer/")}
    states = ("stored", "leased", "consumed", "retired", "dropped", "evicted")
    ends = ("open", "inserted", "requeued", "given_up")
    return b["groups_inserted"] == sum(b[f"groups_{s}"] for s in states) and b["prompts_drawn"] == sum(
        b[f"prompts_{s}"] for s in ends
    )


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # a kill in mid-write


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended
        return b""


def _descendants(pid: int) -> list[int]:
    if not pid:
        return []
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(c) for c in (task / "children").read_text().split()]
    except OSError:
        return []
    found = list(dict.fromkeys(children))
    return found + [d for child in found for d in _descendants(child)]
