"""The ranks as the loop sees them: a failed start is no start, commands take turns, a stop leaves nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from vime.common.v1.trajectory_pb2 import TrajectoryGroup
from vime.trainer.v1 import rank_service_pb2 as pb
from vime_trainer.adapters.ranks import PEER_FAILED, CommandFailed, GrpcRanks
from vime_trainer.loop.ports import RankDied
from vime_trainer.loop.versions import Version
from vime_trainer.ranks.processes import RankProcesses


class Processes(RankProcesses):
    """Ranks that attach by themselves, unless the start shall fail."""

    def __init__(self, failures: int = 0, world_size: int = 1) -> None:
        super().__init__(Path(), world_size, Path())
        self.failures = failures
        self.ranks: GrpcRanks
        self.starts = 0

    async def start(self, launch: int, environment: Mapping[str, str]) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise OSError("no more processes")
        for rank in range(self._world_size):
            await self.ranks.mailbox.attach(environment["VIME_LAUNCH_ID"], rank, "host:1")

    async def wait_for_death(self, poll_s: float = 0.3) -> str:
        await asyncio.Event().wait()
        return ""


def make_ranks(processes: Processes) -> GrpcRanks:
    ranks = GrpcRanks(processes, processes._world_size, Path(), 1, 1, start_timeout_s=2.0, command_timeout_s=5.0)
    processes.ranks = ranks
    return ranks


async def _next(ranks: GrpcRanks, after: int, rank: int = 0) -> tuple[int, pb.NextCommandResponse]:
    found = await ranks.mailbox.next(ranks.mailbox._launch_id, rank, after, 2.0)
    assert found is not None
    return found


async def _report(ranks: GrpcRanks, sequence: int, rank: int = 0, **result: object) -> None:
    report = pb.ReportResultRequest(sequence=sequence, rank=rank, **result)
    await ranks.mailbox.report(ranks.mailbox._launch_id, rank, sequence, report)


async def test_ranks_whose_start_failed_are_started_again_and_not_taken_for_running():
    processes = Processes(failures=1)
    ranks = make_ranks(processes)
    with pytest.raises(OSError, match="no more processes"):
        await ranks.start()
    with pytest.raises(RankDied, match="the ranks are not started"):
        await ranks.load(None)
    await ranks.start()
    assert processes.starts == 2
    await ranks.stop()


async def test_scores_asked_for_while_the_loop_trains_wait_for_their_turn():
    ranks = make_ranks(Processes())
    await ranks.start()
    loading = asyncio.create_task(ranks.load(None))
    sequence, command = await _next(ranks, 0)
    assert command.WhichOneof("command") == "load"
    scoring = asyncio.create_task(ranks.score([], 1.0, replay=False))
    await asyncio.sleep(0.05)
    assert not scoring.done()
    await _report(ranks, sequence, load=pb.LoadResult(parameters=3))
    assert (await loading).parameters == 3
    sequence, command = await _next(ranks, sequence)
    assert command.WhichOneof("command") == "score"
    await _report(ranks, sequence, score=pb.ScoreResult())
    assert await scoring == []
    await ranks.stop()


async def test_a_stop_ends_the_command_that_runs_and_those_that_wait():
    ranks = make_ranks(Processes())
    await ranks.start()
    calls = [asyncio.create_task(ranks.load(None)) for _ in range(3)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(1.0):
        await ranks.stop()
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(end) for end in ends] == ["the ranks were stopped", *["the ranks are not started"] * 2]


async def test_a_caller_that_goes_away_leaves_the_command_its_turn_until_every_rank_has_done_it():
    ranks = make_ranks(Processes())
    await ranks.start()
    scoring = asyncio.create_task(ranks.score([], 1.0, replay=False))
    sequence, _ = await _next(ranks, 0)
    scoring.cancel()
    loading = asyncio.create_task(ranks.load(None))
    await asyncio.sleep(0.05)
    assert await ranks.mailbox.next(ranks.mailbox._launch_id, 0, sequence, 0.05) is None
    await _report(ranks, sequence, score=pb.ScoreResult())
    sequence, command = await _next(ranks, sequence)
    assert command.WhichOneof("command") == "load"
    await _report(ranks, sequence, load=pb.LoadResult(parameters=3))
    assert (await loading).parameters == 3
    await ranks.stop()


@pytest.mark.parametrize("name", ["train", "score", "save", "describe"])
async def test_ranks_that_one_of_them_left_alone_are_given_no_other_command(monkeypatch, name):
    monkeypatch.setattr("vime_trainer.adapters.ranks._PEERS_S", 0.05)
    ranks = make_ranks(Processes(world_size=2))
    await ranks.start()
    calls = {
        "train": lambda: ranks.train_groups([], None),
        "score": lambda: ranks.score([], 1.0, replay=False),
        "save": lambda: ranks.save(1, {}, hf=False),
        "describe": lambda: ranks.describe(Version("run", 1, 1)),
    }
    running = asyncio.create_task(calls[name]())
    sequence, _ = await _next(ranks, 0)
    await _report(ranks, sequence, error="ValueError: no sample", error_reason="INVALID_FIELD")
    with pytest.raises(CommandFailed, match="no sample"):
        await running
    with pytest.raises(RankDied, match=r"ranks \[1\] wait for it"):
        await ranks.load(None)
    assert ranks.mailbox.used  # so that the next start makes fresh ones
    await ranks.stop()


async def test_a_failure_that_every_rank_tells_leaves_the_launch_well_and_quotes_the_rank_that_had_it():
    ranks = make_ranks(Processes(world_size=2))
    await ranks.start()
    saving = asyncio.create_task(ranks.save(1, {}, hf=False))
    sequence, _ = await _next(ranks, 0)
    await _report(ranks, sequence, error="PeerFailed: another rank failed", error_reason=PEER_FAILED)
    await _report(ranks, sequence, rank=1, error="CheckpointError: disk full", error_reason="INVALID_FIELD")
    with pytest.raises(CommandFailed, match="rank 1 could not save: CheckpointError: disk full"):
        await saving
    scoring = asyncio.create_task(ranks.score([], 1.0, replay=False))
    sequence, _ = await _next(ranks, sequence)
    for rank in range(2):
        await _report(ranks, sequence, rank=rank, score=pb.ScoreResult())
    assert await scoring == []
    await ranks.stop()


async def test_groups_that_no_rank_can_train_are_refused_to_whoever_drives_and_the_ranks_go_on():
    ranks = make_ranks(Processes())
    await ranks.start()
    with pytest.raises(CommandFailed, match="2 groups, but these ids are given more than once: a"):
        await ranks.train_groups([TrajectoryGroup(group_id="a")] * 2, None)
    training = asyncio.create_task(ranks.train_groups([TrajectoryGroup(group_id="a")], None))
    sequence, _ = await _next(ranks, 0)
    await _report(ranks, sequence, train=pb.TrainResult(skipped=True, unusable_groups={"a": "of another model"}))
    with pytest.raises(CommandFailed, match="group a: of another model"):
        await training
    loading = asyncio.create_task(ranks.load(None))
    sequence, _ = await _next(ranks, sequence)
    await _report(ranks, sequence, load=pb.LoadResult(parameters=3))
    assert (await loading).parameters == 3
    await ranks.stop()
