"""`report.html`: one small file with everything inside, to be opened years later without us."""

from __future__ import annotations

import html
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from vime_client.redaction import starred
from vime_client.report.history import History, Row

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color:#1f2937}
h1{margin-bottom:.2rem} h2{margin-top:2rem;font-size:1.15rem} .sub{color:#6b7280;margin-top:0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1rem}
figure{margin:0} figcaption{font-weight:600;font-size:.9rem} svg{width:100%;height:auto}
table{border-collapse:collapse;font-size:.9rem} td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums} code,pre{font:13px/1.4 ui-monospace,monospace}
pre{background:#f3f4f6;padding:.6rem;white-space:pre-wrap;margin:.2rem 0} .good{color:#047857} .bad{color:#b91c1c}
details{margin:.5rem 0} summary{cursor:pointer}
"""
_SHOWN_SAMPLES = 6


def write_page(
    run_dir: Path, history: History, summary: Mapping[str, Any], plots: Sequence[tuple[str, str]], samples: list[Row]
) -> Path:
    """Write `report.html`; its path."""
    name = html.escape(str(summary["name"]))
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title><style>{_STYLE}</style>",
        f"<h1>{name}</h1><p class=sub>{html.escape(_subtitle(summary))}</p>",
        _numbers(summary),
        "<h2>Over the steps</h2><div class=plots>",
        *(f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>" for title, svg in plots),
        "</div>",
        _samples(samples),
        _laws(summary),
        _details("Configuration", _configuration(run_dir / "config.toml")),
        _details("Versions", json.dumps(summary["versions"], indent=1)),
    ]
    new = run_dir / "report.html.new"
    new.write_text("\n".join(parts), encoding="utf-8")
    path = run_dir / "report.html"
    new.replace(path)
    return path


def number(value: object) -> str:
    """A value for people: four significant digits, thousands apart, a dash for what is unknown."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15 and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:.4g}"


def headline(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a reader wants first: (name, value) pairs."""
    split = summary["step_time_split"]
    rows = [
        ("steps", number(summary["steps"])),
        ("seconds", number(_rounded(summary["seconds"]))),
        ("reward, first → last tenth", _arrow(summary["reward_first"], summary["reward_last"])),
    ]
    for table, one in summary["evals"].items():
        rows.append((f"{table}, before → after", f"{_arrow(one['before'], one['after'])}  (n = {number(one['n'])})"))
    rows += [
        ("|logprob difference|, replay on", number(summary["logprob_abs_diff_replay"])),
        ("|logprob difference|, replay off", number(summary["logprob_abs_diff_no_replay"])),
        ("mismatch KL (k3)", number(summary["mismatch_kl"])),
        ("weight updates", f"{number(summary['weight_updates'])} of {number(summary['weight_bytes'])} bytes"),
        ("seconds per weight update", number(summary["weight_update_seconds"])),
        ("seconds per step", number(summary["step_seconds"])),
        ("  of these", ", ".join(f"{part} {number(value)}" for part, value in split.items())),
        ("tokens per second", number(summary["tokens_per_s"])),
        ("staleness, mean / max", f"{number(summary['staleness_mean'])} / {number(summary['staleness_max'])}"),
    ]
    return rows


def law_lines(summary: Mapping[str, Any]) -> list[tuple[str, bool | None]]:
    """The two conservation laws with their numbers; True where they hold, None where a number is unknown."""
    return [
        _law("groups", "inserted", summary["groups"]),
        _law("prompts", "drawn", summary["prompts"]),
    ]


def verdict(holds: bool | None) -> str:
    """A law's state in one word."""
    return "unknown" if holds is None else "holds" if holds else "BROKEN"


def _law(kind: str, left: str, counts: Mapping[str, int | None]) -> tuple[str, bool | None]:
    right = {name: value for name, value in counts.items() if name != left}
    text = f"{kind}: {left} {number(counts[left])} = " + " + ".join(f"{n} {number(v)}" for n, v in right.items())
    known = [value for value in counts.values() if value is not None]
    holds = sum(v for v in right.values() if v is not None) == counts[left] if len(known) == len(counts) else None
    return text, holds


def _numbers(summary: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{html.escape(n)}</td><td>{html.escape(v)}</td></tr>" for n, v in headline(summary))
    return f"<table>{rows}</table>"


def _laws(summary: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<pre>{html.escape(text)} <span class={'good' if holds else 'bad'}>{verdict(holds)}</span></pre>"
        for text, holds in law_lines(summary)
    )
    return f"<h2>Nothing lost, nothing doubled</h2>{lines}"


def _samples(samples: list[Row]) -> str:
    if not samples:
        return ""
    first, last = int(samples[0]["step"]), int(samples[-1]["step"])
    before = [row for row in samples if int(row["step"]) == first][:_SHOWN_SAMPLES]
    after = [row for row in samples if int(row["step"]) == last][-_SHOWN_SAMPLES:]
    return (
        f"<h2>Samples, before (step {first}) and after (step {last})</h2><div class=plots>"
        f"<div>{_sample_list(before)}</div><div>{_sample_list(after)}</div></div>"
    )


def _sample_list(rows: Iterable[Row]) -> str:
    return "".join(_sample(row) for row in rows)


def _sample(row: Row) -> str:
    reward = row.get("reward")
    prompt, response = html.escape(_text(row.get("prompt"))), html.escape(_text(row.get("response")))
    colour = "good" if (reward or 0) > 0 else "bad"
    return f"<pre>{prompt}<b>{response}</b>  <span class={colour}>reward {number(reward)}</span></pre>"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _details(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>" if text else ""


def _subtitle(summary: Mapping[str, Any]) -> str:
    end = {"finished": "finished", "failed": "failed", "stopped": "stopped"}.get(summary["phase"], summary["phase"])
    reason = f": {summary['reason']}" if summary["reason"] else ""
    return f"{end}{reason} · {number(summary['steps'])} steps · {number(_rounded(summary['seconds']))} s"


def _arrow(before: float | None, after: float | None) -> str:
    return f"{number(before)} → {number(after)}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _configuration(path: Path) -> str:
    """The run's recipe without secrets, also that of a run whose config.toml holds some."""
    try:
        return tomli_w.dumps(starred(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return ""
