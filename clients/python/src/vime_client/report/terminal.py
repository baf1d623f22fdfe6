"""The end of a run on the terminal: a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime_client.report.history import History
from vime_client.report.names import LOSS, REWARD
from vime_client.report.page import headline, law_lines, verdict


def show(console: Console, run_dir: Path, history: History, summary: Mapping[str, Any]) -> None:
    """Print the picture, the numbers, the laws and where everything is."""
    if drawn := picture(history, min(100, console.width), colour=console.is_terminal):
        console.out(drawn, highlight=False)
    table = Table(
        show_header=False, title=Text(f"{summary['name']}: {summary['phase']}"), title_justify="left", box=None
    )
    for name, value in headline(summary):
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(table)
    for text, holds in law_lines(summary):
        colour = "dim" if holds is None else "green" if holds else "red"
        console.print(Text.assemble((text, "dim"), "  ", (verdict(holds), colour)))
    console.out(f"report: {run_dir / 'report.html'}", highlight=False)
    console.out(f"numbers: {run_dir / 'summary.json'}   metrics: {run_dir / 'metrics.jsonl'}", highlight=False)


def picture(history: History, width: int, *, colour: bool) -> str:
    """Reward (of demonstrations: loss) and evaluation over the steps, drawn with characters; empty without data."""
    name, metric = ("loss", LOSS) if history.supervised else ("reward", REWARD)
    shown = history.series(metric)
    if len(shown.values) < 2:
        return ""
    import plotext

    from vime_client.report.plots import moving_mean

    figure = plotext.figure
    figure.clear()
    figure.theme("dark" if colour else "colorless")
    figure.plot_size(width, 16)
    means = figure.signal(shown.steps, moving_mean(shown.values, 10)).lines()
    figure.draw(means.label(f"{name}, mean of 10 steps"))
    for table in history.evals:
        if evals := history.eval_series(table):
            figure.draw(figure.signal(evals.steps, evals.values, marker="o").label(table))
    figure.label("step", "x")
    drawn = str(figure.build())
    return drawn if colour else str(plotext.uncolorize(drawn))
