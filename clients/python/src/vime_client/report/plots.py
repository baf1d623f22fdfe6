"""The plots of a report, as SVG text. Imports matplotlib, and nothing else of this package does.

Text, axes and grid are drawn in `currentColor` and the ground is left out, so that the page decides whether it is
light or dark; the curves' colours can be read on both. A figure is about as wide as a telephone, where its text is
legible too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vime_client.report.history import History, Series
from vime_client.report.names import DIFF, LEARNING, LOSS, PARTS, REWARD, SPLIT, UNSCORED

_INK = "#010203"
"""Stands for `currentColor`, which matplotlib does not know; no other colour is this one."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vime",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_COLOURS = ("#3b82f6", "#d97706", "#10a37a", "#9061f9", "#8b919c", "#e0457b")
_INCHES = (4.6, 2.7)

Curve = tuple[str, str]
"""Its label in the legend, and the metric."""
Plot = Callable[[Any, History], bool]
"""Draws on axes; False if the run has no data for it."""


def all_plots(history: History) -> list[tuple[str, str]]:
    """(title, SVG) of every plot that the run has data for."""
    metric = dict(LEARNING)
    plots: list[tuple[str, Plot]] = [
        ("Reward of the samples trained on", _reward),
        ("Parts of the reward", _parts),
        ("Loss", _lines(*_named(LOSS, "train/pg_loss", metric["critic loss"]))),
        ("Held-out evaluation", _evals),
        ("Samples without a reward", _lines(("unscored samples of a step", UNSCORED), idle_at_zero=True, bottom=0)),
        ("Entropy", _lines(("entropy", metric["entropy"]), idle_at_zero=True)),
        ("Gradient norm", _lines(("policy", metric["gradient norm"]), ("critic", "train/critic-grad_norm"), bottom=0)),
        (
            "KL",
            _lines(
                ("to the old policy", metric["KL to the old policy"]),
                ("to the reference", metric["KL to the reference"]),
                ("engine to trainer (k3)", "train/mismatch_kl"),
                idle_at_zero=True,
            ),
        ),
        (
            "Share of tokens clipped",
            _lines(
                ("policy", metric["clip fraction"]),
                ("policy, dual clip", "train/pg_clipfrac_lower"),
                ("values", "train/critic-value_clipfrac"),
                idle_at_zero=True,
                bottom=0,
            ),
        ),
        ("Trainer and engine: mean |logprob difference|", _diff),
        ("Response length and truncation", _length),
        (
            "Staleness of the groups trained on",
            _lines(("mean", "staleness/mean"), ("max", "staleness/max"), idle_at_zero=True, bottom=-0.1),
        ),
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
        figure, axes = pyplot.subplots(figsize=_INCHES, layout="constrained")

        def svg() -> str:
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
            text = out.getvalue()
            return text[text.index("<svg") :].replace(_INK, "currentColor")

        try:
            yield axes, svg
        finally:
            pyplot.close(figure)


def _named(*metrics: str) -> list[Curve]:
    return [(name.removeprefix("train/"), name) for name in metrics]


def _lines(*curves: Curve, idle_at_zero: bool = False, bottom: float | None = None) -> Plot:
    """Curves of metrics over the steps. With `idle_at_zero`, one that is 0 throughout is left out: it tells nothing."""

    def draw(axes: Any, history: History) -> bool:
        drawn = _draw(axes, history, curves, idle_at_zero=idle_at_zero)
        if drawn and bottom is not None:
            axes.set_ylim(bottom=bottom)
        return drawn

    return draw


def _draw(axes: Any, history: History, curves: Sequence[Curve], *, idle_at_zero: bool = False) -> bool:
    drawn = False
    for (label, metric), colour in zip(curves, _cycle(len(curves)), strict=True):
        series = history.series(metric)
        if not series or (idle_at_zero and not any(series.values)):
            continue
        axes.plot(series.steps, series.values, color=colour, linewidth=1.5, label=label, **_dot(series))
        drawn = True
    if drawn:
        axes.legend(loc="best")
    return drawn


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _dot(series: Series) -> dict[str, str]:
    """One point alone is no line."""
    return {"marker": "o"} if len(series.steps) == 1 else {}


def _reward(axes: Any, history: History) -> bool:
    series = history.series(REWARD)
    if not series or history.supervised:
        return False
    axes.plot(series.steps, series.values, color=_COLOURS[0], alpha=0.35, linewidth=1, label="step", **_dot(series))
    axes.plot(series.steps, moving_mean(series.values, 10), color=_COLOURS[0], linewidth=2, label="mean of 10 steps")
    axes.legend()
    return True


def _parts(axes: Any, history: History) -> bool:
    if history.supervised:
        return False
    return _draw(axes, history, [(name.removeprefix(PARTS), name) for name in history.names(PARTS)])


def _evals(axes: Any, history: History) -> bool:
    tables = [table for table in history.evals if history.eval_series(table)]
    for table, colour in zip(tables, _cycle(len(tables)), strict=True):
        series = history.eval_series(table)
        axes.plot(series.steps, series.values, marker="o", color=colour, label=table)
    if tables:
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.legend()
    return bool(tables)


def _diff(axes: Any, history: History) -> bool:
    replayed = bool(history.names(f"{DIFF}_on_policy_no_replay") or history.names(f"{DIFF}_no_replay"))
    lines = [("replay on (R3)" if replayed else "mean of samples", ""), ("replay off, same samples", "_no_replay")]
    drawn = False
    for (label, suffix), colour in zip(lines, _COLOURS, strict=False):
        series = history.series(f"{DIFF}_on_policy{suffix}") or history.series(f"{DIFF}{suffix}")
        positive = Series(*_above_zero(series))
        if positive:
            axes.plot(positive.steps, positive.values, color=colour, label=label, **_dot(positive))
            drawn = True
    if drawn:
        axes.set_yscale("log")
        axes.legend()
    return drawn


def _above_zero(series: Series) -> tuple[list[int], list[float]]:
    kept = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if value > 0]
    return [step for step, _ in kept], [value for _, value in kept]


def _length(axes: Any, history: History) -> bool:
    if not _draw(axes, history, [("response tokens (mean)", "rollout/response_len/mean")]):
        return False
    axes.set_ylim(bottom=0)
    cut = history.series("rollout/truncated_ratio")
    if cut:
        right = axes.twinx()
        right.plot(cut.steps, cut.values, color=_COLOURS[1], linewidth=1, label="share truncated (right)", **_dot(cut))
        right.set_ylim(0, 1)
        right.grid(visible=False)
        handles = [*axes.get_lines(), *right.get_lines()]
        axes.legend(handles, [line.get_label() for line in handles])
    return True


def _split(axes: Any, history: History) -> bool:
    parts = [(label, history.series(name)) for label, name in SPLIT]
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
    axes.legend(ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=1, handlelength=1.2)
    return True
