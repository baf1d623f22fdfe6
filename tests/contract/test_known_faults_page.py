"""docs/known-faults.md names every numbered fault that is tested, and only places where such a test is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    match[1]: re.findall(r"`([^`]+)`", match[2])
    for match in re.finditer(r"^\| (K\d\d) \|.*\| ([^|]*) \|$", (ROOT / "docs/known-faults.md").read_text(), re.M)
}


def numbers_in(folder: Path) -> set[str]:
    """Numbers in the names of the tests below `folder`."""
    return {
        number.upper()
        for path in folder.rglob("test_*.py")
        for number in re.findall(r"def test_(k\d\d)_", path.read_text())
    }


@pytest.mark.parametrize("fault", ROWS)
def test_the_places_of_a_fault_hold_tests_with_its_number(fault: str) -> None:
    assert ROWS[fault]
    assert [place for place in ROWS[fault] if fault not in numbers_in(ROOT / place)] == []


def test_every_numbered_test_has_its_row() -> None:
    tested = set().union(*(numbers_in(ROOT / folder) for folder in ("services", "clients", "tests")))
    assert tested == set(ROWS)
