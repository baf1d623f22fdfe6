"""The plots of a report, as SVG text. Imports matplotlib, and nothing else of this package does."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vime_client.report.history import History, Series
from vime_client.report.summary import DIFF

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vime",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#6b7280")
_SPLIT = (
    ("wait", "perf/train_wait_time"),
    ("logprobs", "perf/log_probs_time"),
    ("train", "perf/actor_train_time"),
    ("publish", "perf/update_weights_time"),
    ("other", "perf/other_time"),
)


def all_plots(history: History) -> list[tuple[str, str]]:
    """(title, SVG) of every plot that the run has data for."""
    plots: list[tuple[str, Callable[[Any, History], bool]]] = [
        ("Reward of the samples trained on", _reward),
        ("Held-out evaluation", _evals),
        ("Trainer and engine: mean |logprob difference|", _diff),
        ("Response length and truncation", _length),
        ("Staleness of the groups trained on", _staleness),
        ("Where a step's time goes", _split),
    ]
    found = []
    for title, draw in plots:
        with _figure() as (axes, svg):
            if draw(axes, history):
                axes.set_xlabel("step")
                found.append((title, svg()))
    return found


def moving_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


@contextmanager
def _figure() -> Iterator[tuple[Any, Callable[[], str]]]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(6.2, 2.8), layout="constrained")

        def svg() -> str:
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
            text = out.getvalue()
            return text[text.index("<svg") :]

        try:
            yield axes, svg
        finally:
            pyplot.close(figure)


def _reward(axes: Any, history: History) -> bool:
    series = history.series("rollout/raw_reward")
    if not series:
        return False
    axes.plot(series.steps, series.values, color=_COLOURS[0], alpha=0.3, linewidth=1)
    axes.plot(series.steps, moving_mean(series.values, 10), color=_COLOURS[0], linewidth=2, label="mean of 10 steps")
    axes.legend(frameon=False)
    return True


def _evals(axes: Any, history: History) -> bool:
    tables = [table for table in history.evals if history.eval_series(table)]
    for table, colour in zip(tables, _COLOURS, strict=False):
        series = history.eval_series(table)
        axes.plot(series.steps, series.values, marker="o", color=colour, label=table)
    if tables:
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    return bool(tables)


def _diff(axes: Any, history: History) -> bool:
    lines = (("replay on (R3)", ""), ("replay off, same samples", "_no_replay"))
    drawn = False
    for (label, suffix), colour in zip(lines, _COLOURS, strict=False):
        series = history.series(f"{DIFF}_on_policy{suffix}") or history.series(f"{DIFF}{suffix}")
        positive = Series(*_above_zero(series))
        if positive:
            axes.plot(positive.steps, positive.values, color=colour, label=label)
            drawn = True
    if drawn:
        axes.set_yscale("log")
        axes.legend(frameon=False)
    return drawn


def _above_zero(series: Series) -> tuple[list[int], list[float]]:
    kept = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if value > 0]
    return [step for step, _ in kept], [value for _, value in kept]


def _length(axes: Any, history: History) -> bool:
    length = history.series("rollout/response_len/mean")
    if not length:
        return False
    axes.plot(length.steps, length.values, color=_COLOURS[0], label="response tokens (mean)")
    axes.set_ylim(bottom=0)
    cut = history.series("rollout/truncated_ratio")
    if cut:
        right = axes.twinx()
        right.plot(cut.steps, cut.values, color=_COLOURS[1], linewidth=1)
        right.set_ylim(0, 1)
        right.set_ylabel("share truncated", color=_COLOURS[1])
    axes.legend(frameon=False)
    return True


def _staleness(axes: Any, history: History) -> bool:
    mean, most = history.series("staleness/mean"), history.series("staleness/max")
    if not mean:
        return False
    axes.plot(mean.steps, mean.values, color=_COLOURS[0], label="mean")
    axes.plot(most.steps, most.values, color=_COLOURS[1], linewidth=1, label="max")
    axes.set_ylim(bottom=-0.1)
    axes.legend(frameon=False)
    return True


def _split(axes: Any, history: History) -> bool:
    parts = [(label, history.series(name)) for label, name in _SPLIT]
    parts = [(label, series) for label, series in parts if series]
    if not parts:
        return False
    steps = parts[0][1].steps
    rows = [dict(zip(series.steps, series.values, strict=True)) for _, series in parts]
    axes.stackplot(
        steps,
        *([row.get(step, 0.0) for step in steps] for row in rows),
        labels=[label for label, _ in parts],
        colors=_COLOURS,
        alpha=0.85,
    )
    axes.set_ylabel("seconds")
    axes.legend(frameon=False, ncols=len(parts), loc="upper right")
    return True
