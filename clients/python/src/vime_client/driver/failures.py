"""What workers could not do lately, from their logs: why a step that waits for groups waits for ever."""

from __future__ import annotations

import json
from pathlib import Path

from vime_client.redaction import without_credentials

_MOST_BYTES = 2**20
_TOLD = 300


class Failures:
    """Failures of prompts since the last `forget`; those from before are not looked for."""

    def __init__(self, run_dir: Path) -> None:
        self._logs = run_dir / "logs"
        self._read: dict[Path, int] = {log: log.stat().st_size for log in self._files()}
        self._count = 0
        self._last = ""

    def forget(self) -> None:
        """A step was trained: what failed before it held nothing up."""
        self._count, self._last = 0, ""

    def look(self) -> str:
        """Read what was added; all of it in one line, or "" if nothing failed."""
        for log in self._files():
            for line in self._new_lines(log):
                self._take(log, line)
        if not self._count:
            return ""
        many = "a prompt failed" if self._count == 1 else f"{self._count} prompts failed, the last"
        return f"{many}: {self._last}"

    def _files(self) -> list[Path]:
        return sorted(self._logs.glob("worker-*.jsonl"))

    def _new_lines(self, log: Path) -> list[bytes]:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            start = self._read.get(log, 0)
            start = max(start if start <= size else 0, size - _MOST_BYTES)  # a shorter log is a new one
            file.seek(start)
            added = file.read(size - start)
        whole = added.rfind(b"\n") + 1  # the rest is still being written
        self._read[log] = start + whole
        return added[:whole].splitlines()

    def _take(self, log: Path, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return  # torn by a kill
        fields = record.get("fields") if isinstance(record, dict) else None
        if isinstance(fields, dict) and fields.get("failure"):
            self._count += 1
            self._last = f"{without_credentials(str(record.get('msg')))[:_TOLD]} (log: {log})"
