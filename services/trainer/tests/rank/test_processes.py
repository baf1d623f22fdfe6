"""The rank processes of one host."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vime_trainer.ranks.processes import RankProcesses


async def test_no_other_program_can_take_the_port_that_the_ranks_will_meet_at(tmp_path: Path) -> None:
    """It is open from the start on, long before a rank has loaded what it needs to come."""
    processes = RankProcesses(tmp_path / "missing.toml", 1, tmp_path)
    await processes.start(1, {})
    try:
        assert processes._store is not None
        address = ("127.0.0.1", processes._store.port)
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(address)
        with socket.create_connection(address, timeout=10):
            pass
        assert "rank 0 (pid" in await processes.wait_for_death()
    finally:
        await processes.stop()
