"""`summary.json`: a run in a few numbers, for programs and for people in a hurry."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vime_client.launcher.finish import read_info
from vime_client.launcher.state import read_state
from vime_client.report.history import History, Series
from vime_client.report.names import DIFF, LEARNING, PARTS, REWARD, SAMPLES, SPLIT, UNSCORED
from vime_client.worker.demonstrations import SFT_TABLE

_GROUPS = ("inserted", "stored", "leased", "consumed", "retired", "dropped", "evicted")
_PROMPTS = ("drawn", "open", "inserted", "requeued", "given_up")


def summarize(run_dir: Path, history: History) -> dict[str, Any]:
    """The summary of a run, finished or not. Unknown values are None."""
    info = read_info(run_dir)
    reward = Series() if history.supervised else history.series(REWARD)
    # The weights that an incarnation begins with are published before its first step.
    updates = [row for row in [*history.openings, *history.steps] if row.get("perf/update_weights_wire_bytes")]
    state = read_state(run_dir)
    return {
        "name": run_dir.name,
        "phase": state.phase if state else "unknown",
        "reason": state.reason if state else "",
        "steps": len([row for row in history.steps if not row.get("skipped")]),
        "skipped_steps": len([row for row in history.steps if row.get("skipped")]),
        "incarnations": len(history.openings),
        "seconds": run_seconds(run_dir),
        "head": _head(run_dir),
        "supervised": history.supervised,
        "reward_first": tenth(reward.values, last=False),
        "reward_last": tenth(reward.values, last=True),
        "reward_parts": {name.removeprefix(PARTS): _first_and_last(history, name) for name in history.names(PARTS)},
        "samples": _sum(history, SAMPLES),
        "unscored": _sum(history, UNSCORED),
        "learning": {name: _first_and_last(history, name) for _, name in LEARNING if history.series(name)},
        **_evaluation(history),
        "logprob_abs_diff_replay": _diff(history, ""),
        "logprob_abs_diff_no_replay": _diff(history, "_no_replay"),
        "no_replay_steps": len(_diff_series(history, "_no_replay").steps),
        "logprob_abs_diff_replay_max": max(_diff_series(history, "").values, default=None),
        "mismatch_kl": history.series("train/mismatch_kl").mean,
        "weight_updates": len(updates),
        "weight_update_seconds": _mean(updates, "perf/update_weights_time"),
        "weight_bytes": _mean(updates, "perf/update_weights_wire_bytes"),
        "step_time_split": {part: history.series(name).mean for part, name in SPLIT},
        "step_seconds": history.series("perf/step_time").mean,
        "tokens_per_s": history.series("perf/tokens_per_s").mean,
        "staleness_mean": history.series("staleness/mean").mean,
        "staleness_max": max(history.series("staleness/max").values, default=None),
        "groups": _law("groups", _GROUPS, info, history),
        "prompts": _law("prompts", _PROMPTS, info, history),
        "tables": info.get("tables", {}),
        "versions": info.get("versions", {}),
    }


def write_summary(run_dir: Path, history: History) -> dict[str, Any]:
    """Write `summary.json`, and give what it says."""
    summary = summarize(run_dir, history)
    new = run_dir / "summary.json.new"
    new.write_text(json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(run_dir / "summary.json")
    return summary


def run_seconds(run_dir: Path) -> float | None:
    """Time that the run was under way, over all its starts."""
    run = _run_json(run_dir)
    state = read_state(run_dir)
    if state is None or not state.ended:
        return None
    before = float(run.get("seconds_before", 0.0))
    return before if state.started == run.get("counted") else before + state.ended - state.started


def tenth(values: list[float], *, last: bool) -> float | None:
    """Mean over the first or the last tenth, at least one value."""
    if not values:
        return None
    count = max(1, len(values) // 10)
    part = values[-count:] if last else values[:count]
    return sum(part) / len(part)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(row[name]) for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def _first_and_last(history: History, name: str) -> dict[str, float | None]:
    values = history.series(name).values
    return {"first": tenth(values, last=False), "last": tenth(values, last=True)}


def _sum(history: History, name: str) -> int | None:
    series = history.series(name)
    return int(sum(series.values)) if series else None


def _head(run_dir: Path) -> dict[str, Any]:
    """What was trained on what, and how: of the run's own configuration."""
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        config = {}
    run = _run_json(run_dir)
    algorithm = config.get("trainer", {}).get("algorithm", {})
    created = run.get("created")
    return {
        "recipe": run.get("recipe") or run.get("base_dir"),
        "model": config.get("model", {}).get("path"),
        "data": {name: table.get("source", {}).get("path") for name, table in config.get("tables", {}).items()},
        "algorithm": {key: algorithm[key] for key in ("estimator", "objective", "reducer") if key in algorithm},
        "staleness": config.get("tables", {}).get("train", {}).get("max_staleness"),
        "learning_rate": config.get("trainer", {}).get("engine", {}).get("optimizer", {}).get("lr"),
        "date": None if created is None else datetime.fromtimestamp(float(created), UTC).isoformat(" ", "minutes"),
    }


def _run_json(run_dir: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads((run_dir / "services" / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        run = {}
    return run


def _evaluation(history: History) -> dict[str, Any]:
    """First and last round of the first eval table; the others under `evals`."""
    rounds: dict[str, Any] = {}
    for table, rows in history.evals.items():
        if series := history.eval_series(table):
            n = rows[-1].get(f"{table}/n", rows[-1].get("n"))
            rounds[table] = {"before": series.values[0], "after": series.values[-1], "n": None if n is None else int(n)}
            rounds[table]["last_step"] = series.steps[-1]
    first = next(iter(rounds.values()), {"before": None, "after": None, "n": None})
    return {"eval_before": first["before"], "eval_after": first["after"], "eval_n": first["n"], "evals": rounds}


def _diff(history: History, suffix: str) -> float | None:
    return _diff_series(history, suffix).mean


def _diff_series(history: History, suffix: str) -> Series:
    """Of the samples that the scoring version itself generated; of all where the trainer does not tell them apart."""
    return history.series(f"{DIFF}_on_policy{suffix}") or history.series(f"{DIFF}{suffix}")


def _law(kind: str, parts: tuple[str, ...], info: Mapping[str, Any], history: History) -> dict[str, int | None]:
    """One side of a law of the table that is trained on: as the buffer said at the end, else as of the last step."""
    tables = info.get("tables", {})
    counts = tables.get("train") or tables.get(SFT_TABLE, {})
    law: dict[str, int | None] = {}
    for part in parts:
        value = counts.get(f"{kind}_{part}")
        if value is None:
            value = history.latest(f"buffer/{kind}_{part}")
        law[part] = None if value is None else int(sum(value.values()) if isinstance(value, dict) else value)
    return law


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
