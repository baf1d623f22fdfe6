"""`vime status`: how a run stands, from its folder alone."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime_client.launcher.client import is_running
from vime_client.launcher.state import ENDED, read_state
from vime_client.report.history import read_history
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
    if state is None:
        raise NothingKnown(f"{run_dir} holds no run")
    ended = state.phase in ENDED
    phase = state.phase if ended or is_running(run_dir) else f"{state.phase}, but its launcher is dead (--resume)"
    console.print(Text.assemble((run_dir.name, "bold"), f": {phase}  {state.reason or state.activity}"))
    table = Table("service", "state", "pid", "deaths", "last end", box=None)
    for name, service in state.services.items():
        shown = "ready" if service.ready else service.state
        table.add_row(Text(name), shown, str(service.pid or "–"), str(service.deaths), Text(service.last_end))
    console.print(table)
    history = read_history(run_dir)
    if history.steps:
        summary = summarize(run_dir, history)
        last = history.steps[-1]
        console.out(f"step {last['step']}, reward {number(last.get('rollout/raw_reward'))}", highlight=False)
        for text, holds in law_lines(summary):
            console.out(f"{text}  {verdict(holds)}", highlight=False)
