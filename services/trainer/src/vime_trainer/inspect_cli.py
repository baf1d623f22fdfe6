"""`python -m vime_trainer.inspect_cli advantages|loss FILE.json [--json]`: the looking glass on the command line.

`vime inspect` runs this; the file format is in docs/inspect.md. Exit code 0, or 2 with one line on stderr for a file
that cannot be read or does not make sense.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from vime_trainer.algorithms.inspect import inspect_advantages, inspect_loss

TOKEN_COLUMNS = ("ratio", "clipped", "correction", "pg_loss", "kl", "entropy", "d_loss_d_logprob")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the step's functions make of the file."""
    parser = argparse.ArgumentParser(prog="vime inspect", description="What a training step does, number by number.")
    parser.add_argument("what", choices=("advantages", "loss"))
    parser.add_argument("file", type=Path, help="hand-written trajectories, see docs/inspect.md")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    given = parser.parse_args(arguments)
    try:
        data = json.loads(given.file.read_text(encoding="utf-8"))
        report = inspect_advantages(data) if given.what == "advantages" else inspect_loss(data)
    except (OSError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        sys.stderr.write(f"vime inspect: {given.file}: {error}\n")
        return 2
    if given.json:
        sys.stdout.write(json.dumps(report, allow_nan=False, ensure_ascii=False) + "\n")
    elif given.what == "advantages":
        _show_advantages(report, Console())
    else:
        _show_loss(report, Console())
    return 0


def _show_advantages(report: dict[str, Any], console: Console) -> None:
    groups = Table("group", "scored", "mean", "std", title="groups")
    for group in report["groups"]:
        scored, mean, std = str(group["scored_trajectories"]), _text(group["mean"]), _text(group["std"])
        groups.add_row(str(group["group_id"]), scored, mean, std)
    _print(console, groups)
    table = Table("trajectory", "group", "reward", "mask", "advantages", "returns", title="advantages")
    for row in report["trajectories"]:
        reward = _text(row["reward"]) if row["scored"] else f"unscored: {row['unscored_reason']}"
        mask = "".join(map(str, row["loss_mask"]))
        returns = "" if row["returns"] is None else _list(row["returns"])
        table.add_row(row["id"], str(row["group_id"]), reward, mask, _list(row["advantages"]), returns)
    _print(console, table)
    _show_metrics(report["metrics"], console)


def _show_loss(report: dict[str, Any], console: Console) -> None:
    _show_advantages(report["advantages"] | {"metrics": {}}, console)
    loss = report["loss"]
    names = [name for name in TOKEN_COLUMNS if any(row[name] is not None for row in loss["trajectories"])]
    tokens = Table("trajectory", "token", *names, title="tokens")
    for row in loss["trajectories"]:
        for t in range(len(row["d_loss_d_logprob"])):
            tokens.add_row(row["id"] if t == 0 else "", str(t), *(_text(row[name][t]) for name in names))
        tokens.add_section()
    _print(console, tokens)
    shares = Table("rank", "micro-batch", "share of the loss", title="micro-batches")
    for micro in loss["micro_batches"]:
        shares.add_row(str(micro["rank"]), " ".join(micro["ids"]), _text(micro["loss"]))
    _print(console, shares)
    counts = loss["denominators"]
    console.print(f"denominators: {counts['tokens']} tokens, {counts['sequences']} sequences")
    console.print(f"loss {_text(loss['loss'])}, norm of d loss / d logprob {_text(loss['gradient_norm'])}")
    _show_metrics(loss["metrics"] | report["advantages"]["metrics"], console)
    if "value_loss" in report:
        title = f"value loss {_text(report['value_loss']['loss'])}"
        values = Table("trajectory", "d value loss / d value", title=title)
        for row in report["value_loss"]["trajectories"]:
            values.add_row(row["id"], _list(row["d_loss_d_value"]))
        _print(console, values)


def _show_metrics(metrics: dict[str, float | None], console: Console) -> None:
    if metrics:
        table = Table("metric", "value", title="metrics")
        for name in sorted(metrics):
            table.add_row(name, _text(metrics[name]))
        _print(console, table)


def _list(numbers: Sequence[float | None]) -> str:
    return " ".join(map(_text, numbers))


def _text(number: float | None) -> str:
    return "–" if number is None else f"{number:.6g}"


def _print(console: Console, table: Table) -> None:
    """A table as wide as its numbers, whatever the terminal: a number without its exponent is another number."""
    widest = console.options.update(max_width=10_000)
    console.width = max(console.width, Measurement.get(console, widest, table).maximum)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
