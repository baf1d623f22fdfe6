"""The rank processes of one host."""

from __future__ import annotations

import os
import re
import signal
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
        death = await processes.wait_for_death()
        assert death.rank == 0
        assert "rank 0 (pid" in death.cause
    finally:
        await processes.stop()


async def test_a_killed_rank_is_named_alone_and_no_line_of_its_log_is_taken_for_the_cause(tmp_path: Path) -> None:
    processes = RankProcesses(tmp_path / "missing.toml", 2, tmp_path)
    await processes.start(1, {})
    try:
        pid = processes.pids[1]
        os.kill(pid, signal.SIGKILL)
        death = await processes.wait_for_death(0.01)
        assert (death.rank, death.cause) == (1, f"rank 1 (pid {pid}) was killed by SIGKILL")
    finally:
        await processes.stop()


async def test_a_rank_that_ended_by_itself_is_quoted_with_the_log_that_holds_all_of_it(tmp_path: Path) -> None:
    processes = RankProcesses(tmp_path / "missing.toml", 1, tmp_path)
    await processes.start(1, {"VIME_LAUNCH_ID": "x"})
    try:
        death = await processes.wait_for_death()
        assert re.search(r"ended with exit code 1: .*missing\.toml.* \(log: .*/stderr\.log\)", death.cause), death.cause
    finally:
        await processes.stop()
