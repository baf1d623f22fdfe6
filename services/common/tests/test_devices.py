"""Devices are counted by the driver, whatever lies around."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from vime_service.devices import cuda_devices


def test_a_module_in_the_current_folder_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cuda_devices()
    (tmp_path / "ctypes.py").write_text(f"print({found + 7}); raise SystemExit")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cuda_devices() == found


def test_a_driver_that_does_not_answer_in_time_has_not_said_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(subprocess, "run", late)
    assert cuda_devices() is None
