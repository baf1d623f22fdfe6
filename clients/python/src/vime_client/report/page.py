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
from vime_client.report.history import Row
from vime_client.report.names import LEARNING

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2937;--dim:#6b7280;--ground:#fff;--box:#f3f4f6;--good:#047857;--bad:#b91c1c}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--dim:#9ca3af;--ground:#111827;--box:#1f2937;--good:#34d399;
--bad:#f87171}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color:var(--ink);
background:var(--ground);overflow-wrap:anywhere}
h1{margin-bottom:.2rem} h2{margin-top:2rem;font-size:1.15rem} h3{font-size:1rem;margin-bottom:.3rem}
.sub,.who{color:var(--dim);margin-top:0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:1rem}
.plots>*{min-width:0} figure{margin:0} figcaption{font-weight:600;font-size:.9rem} svg{width:100%;height:auto}
table{border-collapse:collapse;font-size:.9rem} td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}
td:first-child{color:var(--dim);min-width:7.5rem} code,pre{font:13px/1.4 ui-monospace,monospace}
pre{background:var(--box);padding:.6rem;white-space:pre-wrap;margin:.2rem 0}
.good{color:var(--good)} .bad{color:var(--bad)}
details{margin:.5rem 0} summary{cursor:pointer}
"""
_SHOWN_SAMPLES = 6


def write_page(
    run_dir: Path,
    summary: Mapping[str, Any],
    plots: Sequence[tuple[str, str]],
    samples: Sequence[Row],
    eval_samples: Sequence[Row],
) -> Path:
    """Write `report.html`; its path."""
    name = html.escape(str(summary["name"]))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>{name}</title><style>{_STYLE}</style>",
        f"<h1>{name}</h1><p class=sub>{html.escape(_subtitle(summary))}</p>",
        _table(head_lines(summary)),
        "<h2>In numbers</h2>",
        _table(headline(summary)),
        "<h2>Over the steps</h2><div class=plots>",
        *(f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>" for title, svg in plots),
        "</div>",
        _held_out(eval_samples) or _samples(samples),
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
    """What a reader wants first: (name, value) pairs; what the run has no value for is left out."""
    rows = [("steps", number(summary["steps"]) + _skipped(summary))]
    rows += [("seconds", number(_rounded(summary["seconds"])))]
    if not summary["supervised"]:
        rows += [("reward, first → last tenth", _arrow(summary["reward_first"], summary["reward_last"]))]
    parts = {} if summary["supervised"] else summary["reward_parts"]
    for part, one in parts.items():
        rows += [(f"  of it {part}", _arrow(one["first"], one["last"]))]
    if summary["samples"]:
        rows += [("samples without a reward", _share(summary["unscored"] or 0, summary["samples"]))]
    for table, one in summary["evals"].items():
        rows += [(f"{table}, before → after", f"{_arrow(one['before'], one['after'])}  (n = {number(one['n'])})")]
    for label, name in LEARNING:
        if (learnt := summary["learning"].get(name)) and any(learnt.values()):
            rows += [(f"{label}, first → last tenth", _arrow(learnt["first"], learnt["last"]))]
    replay, off = summary["logprob_abs_diff_replay"], summary["logprob_abs_diff_no_replay"]
    split = {part: value for part, value in summary["step_time_split"].items() if value is not None}
    rows += [
        (name, number(value))
        for name, value in (
            ("|logprob difference|" + ("" if off is None else ", replay on"), replay),
            (f"|logprob difference|, replay off{_of_steps(summary)}", off),
            ("mismatch KL (k3)", summary["mismatch_kl"]),
        )
        if value is not None
    ]
    return [
        *rows,
        ("weight updates", f"{number(summary['weight_updates'])} of {number(summary['weight_bytes'])} bytes"),
        ("seconds per weight update", number(summary["weight_update_seconds"])),
        ("seconds per step", number(summary["step_seconds"])),
        ("  of these", ", ".join(f"{part} {number(value)}" for part, value in split.items()) or "–"),
        ("tokens per second", number(summary["tokens_per_s"])),
        ("staleness, mean / max", f"{number(summary['staleness_mean'])} / {number(summary['staleness_max'])}"),
    ]


def head_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was trained, on what and how: (name, value) pairs of what the run's folder tells."""
    head = summary["head"]
    shown = [
        ("recipe", head["recipe"]),
        ("model", head["model"]),
        *((f"data of {table}", path) for table, path in head["data"].items()),
        ("algorithm", ", ".join(f"{key} {value}" for key, value in head["algorithm"].items())),
        ("learning rate", head["learning_rate"]),
        ("staleness allowed (k)", head["staleness"]),
        ("begun", None if head["date"] is None else f"{head['date']}"),
    ]
    return [(name, str(value)) for name, value in shown if value not in (None, "")]


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


def _table(lines: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><td>{html.escape(n)}</td><td>{html.escape(v)}</td></tr>" for n, v in lines)
    return f"<table>{rows}</table>"


def _share(count: int, total: int) -> str:
    return f"{number(count)} of {number(total)} ({100 * count / total:.3g} %)"


def _of_steps(summary: Mapping[str, Any]) -> str:
    """Scoring without replay costs a forward pass: not every step has it."""
    scored, steps = summary["no_replay_steps"], summary["steps"]
    return f" ({scored} of {steps} steps)" if scored < steps else ""


def _skipped(summary: Mapping[str, Any]) -> str:
    return f" and {summary['skipped_steps']} skipped" if summary["skipped_steps"] else ""


def _laws(summary: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<pre>{html.escape(text)} <span class={'good' if holds else 'bad'}>{verdict(holds)}</span></pre>"
        for text, holds in law_lines(summary)
    )
    return f"<h2>Nothing lost, nothing doubled</h2>{lines}"


def _held_out(samples: Sequence[Row]) -> str:
    """The same prompts before and after: the first and the last round of each table, for prompts that are in both."""
    rounds: dict[str, dict[int, dict[str, Row]]] = {}
    for row in samples:
        steps = rounds.setdefault(str(row.get("table")), {})
        steps.setdefault(int(row["step"]), {}).setdefault(str(row.get("prompt_id")), row)
    parts = []
    for table, steps in rounds.items():
        ends = sorted({min(steps), max(steps)})
        both = [prompt for prompt in steps[ends[0]] if prompt in steps[ends[-1]]][:_SHOWN_SAMPLES]
        shown = "".join(_before_and_after([steps[step][prompt] for step in ends]) for prompt in both)
        if shown:
            parts.append(f"<h3>{html.escape(table)}</h3><div class=plots>{shown}</div>")
    return "<h2>Held-out prompts, before and after</h2>" + "".join(parts) if parts else ""


def _before_and_after(rows: Sequence[Row]) -> str:
    answers = "".join(f"<pre><span class=who>step {row['step']}</span>  {_answer(row)}</pre>" for row in rows)
    return f"<div><pre>{html.escape(_text(rows[0].get('prompt')))}</pre>{answers}</div>"


def _samples(samples: Sequence[Row]) -> str:
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
    return f"<pre>{html.escape(_text(row.get('prompt')))}{_answer(row)}</pre>"


def _answer(row: Row) -> str:
    """The response, its reward and the reward's parts."""
    reward, parts = row.get("reward"), row.get("parts")
    colour = "good" if isinstance(reward, (int, float)) and reward > 0 else "bad"
    shown = ", ".join(f"{name} {number(value)}" for name, value in parts.items()) if isinstance(parts, dict) else ""
    told = "unscored" if reward is None else f"reward {number(reward)}" + (f" ({shown})" if shown else "")
    return f"<b>{html.escape(_text(row.get('response')))}</b>  <span class={colour}>{html.escape(told)}</span>"


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
