"""Devices are counted by the driver, whatever lies around."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime_service.devices import cuda_devices


def test_a_module_in_the_current_folder_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cuda_devices()
    (tmp_path / "ctypes.py").write_text(f"print({found + 7}); raise SystemExit")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cuda_devices() == found
