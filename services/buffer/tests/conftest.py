"""Fixtures: a desk (a ledger called synchronously) over a folder of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vime_buffer.testing import Desk, table, write_prompts


@pytest.fixture
def ledger_dir() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of commits, each synced, cost seconds on a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def make_desk(ledger_dir: Path) -> Iterator[Callable[..., Desk]]:
    """Make a desk with one train table (10 prompts unless `prompts` says otherwise) and, if wanted, an eval table."""
    desks: list[Desk] = []

    def make(prompts: int = 10, *, eval_prompts: int = 0, evals: dict[str, Any] | None = None, **settings: Any) -> Desk:
        options = settings.pop("options", {})
        folder = settings.pop("folder", ledger_dir / "ledger")
        tables = [table(write_prompts(ledger_dir / "train.jsonl", prompts), **settings)]
        if eval_prompts:
            held = write_prompts(ledger_dir / "heldout.jsonl", eval_prompts, first=1000)
            tables.append(table(held, name="eval/heldout", **(evals or {})))
        desk = Desk(folder, tables, **options)
        desks.append(desk)
        return desk

    yield make
    for desk in desks:
        desk.writer.close()
