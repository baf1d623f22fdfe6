"""The run folder's files that the trainer owns, one JSON object a line: metrics, samples and eval_samples."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime_trainer.loop.versions import Version


class RunFiles:
    """Appends whole lines, so that a reader never sees half of one. A torn last line (a kill in mid-write, a full
    disk) is ended before the next is written."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._samples = run_dir / "samples.jsonl"
        self._eval_samples = run_dir / "eval_samples.jsonl"
        run_dir.mkdir(parents=True, exist_ok=True)
        for path in (self._metrics, self._samples, self._eval_samples):
            _end_torn_line(path)

    def incarnation(
        self, version: Version, resume_step: int, rewound_groups: int, publish: Mapping[str, float]
    ) -> None:
        """A new incarnation was opened, and the weights it holds were published."""
        record = {"event": "incarnation", "incarnation": version.incarnation, "resume_step": resume_step}
        self._append(self._metrics, [record | {"rewound_groups": rewound_groups} | dict(publish)])

    def step(
        self, step: int, version: Version, skipped: bool, group_ids: Sequence[str], metrics: Mapping[str, float]
    ) -> None:
        """A step was completed on these groups."""
        head = {"step": step, "version": str(version), "skipped": skipped, "group_ids": list(group_ids)}
        self._append(self._metrics, [head | dict(metrics)])

    def evaluation(self, table: str, step: int, metrics: Mapping[str, float]) -> None:
        """An eval round was completed."""
        self._append(self._metrics, [{"eval_step": step, "table": table} | dict(metrics)])

    def eval_samples(self, table: str, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """What was answered to some prompts of an eval round."""
        self._append(self._eval_samples, [{"table": table, "step": step} | dict(answer) for answer in answers])

    def samples(self, step: int, sample_json: Sequence[str]) -> None:
        """Some samples of a step, as the ranks gave them."""
        self._append(self._samples, [{"step": step} | json.loads(text) for text in sample_json])

    @staticmethod
    def _append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
        if not records:
            return
        now = round(time.time(), 3)
        text = "".join(json.dumps(_finite({**record, "time": now}), allow_nan=False) + "\n" for record in records)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: what is not finite is written as null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _end_torn_line(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
