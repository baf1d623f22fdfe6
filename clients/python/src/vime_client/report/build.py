"""Everything that a run folder can tell, written again from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime_client.report.history import History, read_eval_samples, read_history, read_samples
from vime_client.report.summary import write_summary


class NoRun(Exception):
    """The folder holds no run."""


def build_report(run_dir: Path) -> tuple[History, dict[str, Any]]:
    """Write `summary.json` and `report.html`.

    Raises:
        NoRun: there is no such folder, or nothing of a run in it.
    """
    if not run_dir.is_dir():
        raise NoRun(f"run folder {run_dir} does not exist")
    if not (run_dir / "metrics.jsonl").exists() and not (run_dir / "services").is_dir():
        raise NoRun(f"{run_dir} holds no run: neither metrics.jsonl nor services/")
    from vime_client.report.page import write_page
    from vime_client.report.plots import all_plots

    history = read_history(run_dir)
    summary = write_summary(run_dir, history)
    write_page(run_dir, summary, all_plots(history), read_samples(run_dir), read_eval_samples(run_dir))
    return history, summary
