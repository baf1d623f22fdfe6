"""Shows a run while it goes on: a live panel on a terminal, one line per event elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vime_client.driver.progress import Progress
from vime_client.launcher.state import RunState
from vime_client.report.names import DIFF, LOSS, SAMPLES, SPLIT, UNSCORED, is_supervised, parts_of

_QUIET_S, _LONGEST_QUIET_S = 5.0, 60.0
"""How long lines may be silent before they say what is waited for."""
_BARS = "▁▂▃▄▅▆▇█"
_DOT = {"running": ("●", "green"), "waiting": ("●", "yellow"), "stopped": ("○", "dim"), "gave_up": ("✗", "red")}


class Display(Protocol):
    """Where a driver tells what happens."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def event(self, line: str) -> None:
        """Something happened that is worth a line."""
        ...

    def refresh(self) -> None:
        """The progress changed."""
        ...


def make_display(console: Console, progress: Progress) -> Display:
    """The live panel if `console` is a terminal, else lines."""
    return Panel(console, progress) if console.is_terminal else Lines(console, progress)


class Lines:
    """One line per event, for logs and pipes."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._start = time.monotonic()
        self._activity = ""
        self._said = 0
        self._next_activity = time.monotonic() + _QUIET_S

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def event(self, line: str) -> None:
        """Print it with the seconds since the start."""
        self._next_activity = time.monotonic() + _QUIET_S
        self._console.print(
            f"[{time.monotonic() - self._start:6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True
        )

    def refresh(self) -> None:
        """Say what is waited for, after five seconds without another line; the same less and less often."""
        activity = self._progress.waits_for()
        now = time.monotonic()
        if not activity or now < self._next_activity:
            return
        self._said = self._said + 1 if activity == self._activity else 0
        self._activity = activity
        self.event(activity)
        self._next_activity = now + min(_QUIET_S * 2**self._said, _LONGEST_QUIET_S)


class Panel:
    """A panel that is drawn in place; events that stay are printed above it."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._start = time.monotonic()
        self._first_step = progress.step  # what was trained before this display began says nothing about its pace
        self._live = Live(console=console, refresh_per_second=5, get_renderable=self._draw, transient=True)

    def __enter__(self) -> Panel:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def event(self, line: str) -> None:
        """Evals and faults stay on the screen; steps only move the panel."""
        if not line.startswith("step "):
            self._console.print(f"[dim]{time.monotonic() - self._start:6.1f} s[/dim] ", end="")
            self._console.print(line, markup=False, highlight=False)

    def refresh(self) -> None:
        """The live panel draws itself."""

    def _draw(self) -> Group:
        progress = self._progress
        seconds = time.monotonic() - self._start
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, progress.num_steps), completed=progress.step, width=40)
        seen = progress.step - self._first_step
        left = seconds / seen * (progress.num_steps - progress.step) if seen > 0 else None
        eta = f"about {left:.0f} s left" if left is not None else ""
        head.add_row(
            Text(progress.name, style="bold"),
            bar,
            f"step {progress.step}/{progress.num_steps}",
            f"{seconds:.0f} s",
            eta,
        )
        return Group(head, _numbers(progress), _services(progress.state), Text(progress.waits_for(), style="dim"))


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as bars between their least and their greatest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] for value in shown)


def _numbers(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 2))
    metrics = progress.metrics
    rewards = [progress.rewards[step] for step in sorted(progress.rewards)]
    if is_supervised(metrics):
        table.add_row("[dim]loss", f"{metrics[LOSS]:.4f}", "")
    elif rewards:
        table.add_row("[dim]reward", f"{rewards[-1]:.3f}  mean of 10 {progress.mean_reward():.3f}", sparkline(rewards))
    if parts := parts_of(metrics):
        table.add_row("[dim]  parts", Text(", ".join(f"{name} {value:.3f}" for name, value in parts.items())), "")
    if unscored := metrics.get(UNSCORED):
        table.add_row("[dim]unscored", f"{unscored:.0f} of {metrics.get(SAMPLES, 0):.0f} samples", "")
    for name, rounds in progress.evals.items():
        values = [rounds[step] for step in sorted(rounds)]
        table.add_row(Text(name, style="dim"), " → ".join(f"{value:.3f}" for value in values[-5:]), "")
    if (diff := metrics.get(DIFF)) is not None:
        off = metrics.get(f"{DIFF}_no_replay")
        table.add_row("[dim]|Δ logprob|", f"{diff:.1e}", f"without replay {off:.1e}" if off is not None else "")
    if "perf/step_time" in metrics:
        split = [f"{label} {metrics[name]:.2f}" for label, name in SPLIT if name in metrics]
        table.add_row("[dim]step", f"{metrics['perf/step_time']:.2f} s", ", ".join(split))
        speed, stale = metrics.get("perf/tokens_per_s", 0.0), metrics.get("staleness/mean", 0.0)
        table.add_row("[dim]tokens/s", f"{speed:,.0f}", f"staleness {stale:.2f}")
    return table


def _services(state: RunState | None) -> Text:
    line = Text()
    for name, service in (state.services if state else {}).items():
        dot, colour = _DOT[service.state]
        line.append(dot, style=colour if service.ready or service.state != "running" else "yellow")
        line.append(f" {name}" + (f" ({service.deaths} restarts)" if service.deaths else "") + "  ", style="dim")
    return line
