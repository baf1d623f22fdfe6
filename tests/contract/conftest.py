"""Fixtures: the four real services, and the contracts of an older and of a newer program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.kept_contracts import IMAGES, Contracts, of_tomorrow, todays_files
from tests.in_process import System
from tests.in_process import system as running_system


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    """Buffer, router, an engine without a model, a trainer without ranks."""
    async with running_system(tmp_path) as running:
        yield running


@pytest.fixture(params=IMAGES, ids=lambda path: path.stem, scope="session")
def old(request: pytest.FixtureRequest) -> Contracts:
    """Each kept image in turn."""
    return Contracts.read(request.param)


@pytest.fixture(scope="session")
def new() -> Contracts:
    """Contracts newer than today's."""
    return Contracts(of_tomorrow(todays_files()))
