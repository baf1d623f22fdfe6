"""`vime status`: how a run stands, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime_client.driver.folder import holds_run
from vime_client.driver.record import read_steps
from vime_client.launcher.client import is_running, why_died
from vime_client.launcher.state import ENDED, read_state
from vime_client.report.history import Row, read_history
from vime_client.report.page import law_lines, number, verdict
from vime_client.report.summary import summarize


class NothingKnown(Exception):
    """The folder holds no run."""


def print_status(run_dir: Path, console: Console) -> None:
    """Print phase, services, the last step and the laws.

    Raises:
        NothingKnown: nothing was ever started there.
    """
    state = read_state(run_dir)
    if state is None and holds_run(run_dir):
        why = why_died(run_dir / "logs" / "launcher.log")
        raise NothingKnown(f"the run in {run_dir} was prepared, and its launcher never came up: {why}")
    if state is None:
        raise NothingKnown(f"{run_dir} holds no run")
    ended = state.phase in ENDED
    phase = state.phase if ended or is_running(run_dir) else f"{state.phase}, but its launcher is dead (--resume)"
    log = f" (log: {state.log})" if state.log and "(log: " not in state.reason else ""
    console.print(Text.assemble((run_dir.name, "bold"), f": {phase}  {state.reason or state.activity}{log}"))
    table = Table("service", "state", "pid", "deaths", "last end", box=None)
    for name, service in state.services.items():
        shown = "ready" if service.ready else service.state
        end = ": ".join(filter(None, (service.last_end, service.cause)))
        table.add_row(Text(name), shown, str(service.pid or "–"), str(service.deaths), Text(end))
    console.print(table)
    history = read_history(run_dir)
    if history.steps:
        summary = summarize(run_dir, history)
        last = history.steps[-1]
        steps = read_steps(run_dir)
        of = f"step {last['step']}" + (f" of {steps}" if steps else "")
        left = "" if ended or not steps else _time_left(history.steps, steps)
        console.out(f"{of}, reward {number(last.get('rollout/raw_reward'))}{left}", highlight=False)
        for text, holds in law_lines(summary):
            console.out(f"{text}  {verdict(holds)}", highlight=False)


def _time_left(rows: Sequence[Row], steps: int) -> str:
    """By the pace of the last steps; a median, since some wait for an evaluation, a checkpoint or a restart."""
    times = [float(row["time"]) for row in rows[-20:] if "time" in row]
    if len(times) < 2:
        return ""
    seconds = median(after - before for before, after in pairwise(times)) * (steps - int(rows[-1]["step"]))
    return f", about {seconds:.0f} s left" if seconds > 0 else ""
