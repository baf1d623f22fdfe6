"""metrics.jsonl and samples.jsonl as lists: torn lines are left out and counted, a step trained again counts once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime_client.report.names import is_supervised

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """Values of one metric with their steps."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def mean(self) -> float | None:
        """Mean over all steps; None without any."""
        return sum(self.values) / len(self.values) if self.values else None


@dataclass(frozen=True)
class History:
    """What the trainer wrote about a run."""

    steps: list[Row]
    """One row per step, by step; the last one where a step was trained again after a resume."""
    evals: dict[str, list[Row]]
    """One row per eval round, by table and step."""
    openings: list[Row]
    """One row per incarnation: how often training was begun or resumed, each time with a publish of its own."""
    broken_lines: int
    """Lines that are no JSON: a process was killed in mid-write."""

    def series(self, name: str) -> Series:
        """A metric over the steps that have it."""
        found = [(int(row["step"]), float(row[name])) for row in self.steps if _is_number(row.get(name))]
        return Series([step for step, _ in found], [value for _, value in found])

    def names(self, prefix: str = "") -> list[str]:
        """Metrics that begin so, of any step, sorted."""
        return sorted({name for row in self.steps for name in row if name.startswith(prefix)})

    @property
    def supervised(self) -> bool:
        """True if demonstrations are learnt: rewards then say nothing about the model, the loss does."""
        return is_supervised(self.names())

    def eval_series(self, table: str) -> Series:
        """Mean reward of an eval table by step."""
        rows = [row for row in self.evals.get(table, []) if _is_number(row.get(table))]
        return Series([int(row["eval_step"]) for row in rows], [float(row[table]) for row in rows])

    def latest(self, name: str) -> float | None:
        """The last value of a metric."""
        series = self.series(name)
        return series.values[-1] if series else None


def read_history(run_dir: Path) -> History:
    """Read `metrics.jsonl`; empty if the run has trained nothing yet."""
    steps: dict[int, Row] = {}
    evals: dict[str, dict[int, Row]] = {}
    openings: list[Row] = []
    broken = 0
    for row in _lines(run_dir / "metrics.jsonl"):
        if row is None:
            broken += 1
        elif "step" in row:
            steps[int(row["step"])] = row
        elif "eval_step" in row:
            evals.setdefault(str(row["table"]), {})[int(row["eval_step"])] = row
        elif row.get("event") == "incarnation":
            openings.append(row)
    return History(
        steps=[steps[step] for step in sorted(steps)],
        evals={table: [rows[step] for step in sorted(rows)] for table, rows in sorted(evals.items())},
        openings=openings,
        broken_lines=broken,
    )


def read_samples(run_dir: Path) -> list[Row]:
    """Read `samples.jsonl`, in the order it was written."""
    return [row for row in _lines(run_dir / "samples.jsonl") if row is not None]


def read_eval_samples(run_dir: Path) -> list[Row]:
    """Read `eval_samples.jsonl`: answers to held-out prompts, in the order they were written."""
    return [row for row in _lines(run_dir / "eval_samples.jsonl") if row is not None and "step" in row]


def _lines(path: Path) -> Iterator[Row | None]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                yield None
            else:
                yield row if isinstance(row, dict) else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
