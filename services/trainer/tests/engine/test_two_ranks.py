"""Every command is run by every rank or by none, also when one of them cannot do it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
Ranks = Callable[..., list[Any]]

COMMANDS = """
import pathlib
import tempfile
from vime.common.v1 import trajectory_pb2 as t
from vime.common.v1.weight_version_pb2 import WeightVersion
from vime.trainer.v1 import rank_service_pb2 as pb
from vime_trainer.config import TrainerSettings
from vime_trainer.engine.errors import PeerFailed
from vime_trainer.rank.commands import Commands
from vime_trainer.rank.groups import GroupError

settings = TrainerSettings(
    run_id="run", run_dir=tempfile.mkdtemp(), model_path=names["model"], buffer_address="b:1", router_address="r:1",
    steps=2, world_size=world, engine={"collective_timeout_s": 20, "routing_replay": False},
)
commands = Commands(settings)
commands.load(pb.LoadCommand())

def group(name, token):
    samples = [
        t.Sample(group_id=name, sample_index=i, prompt_token_ids=[5, 6], response_token_ids=[7 + i, token],
                 rollout_logprobs=[-3.0] * 2, status=t.SAMPLE_STATUS_COMPLETED, reward=float(i),
                 reward_parts={name: float(i)})
        for i in range(2)
    ]
    return t.TrajectoryGroup(group_id=name, samples=samples)

def train(groups):
    owners = [i % world for i in range(len(groups))]
    command = pb.TrainCommand(group_ids=[g.group_id for g in groups], group_ranks=owners)
    commands.fetched(None)
    return commands.train(command, [groups[i] for i in commands.my_groups(command)], 0.0)

version = WeightVersion(run_id="run", incarnation=1, step=0)
described = [commands.describe(pb.DescribeCommand(version=version, canary_prompts=n)) for n in (0, 2)]
poisoned = train([group("good", 9), group("bad", 48)])
kinds = []
for failing in (0, 1):
    try:
        commands.fetched(GroupError("no group") if rank == failing else None)
    except (GroupError, PeerFailed) as error:
        kinds.append(type(error).__name__)
run_dir = pathlib.Path(names["run_dir"])
if rank == 0:
    run_dir.mkdir()
    (run_dir / "hf").write_text("in the way")
saving = pb.SaveCommand(folder=str(run_dir / "checkpoints"), train_step=1, state_json="{}", keep_last=3, hf=True)
try:
    commands.save(saving)
except (OSError, PeerFailed) as error:
    kinds.append(type(error).__name__)
if rank == 0:
    (run_dir / "hf").unlink()
saved = []
for step in (1, 2, 3, 4):
    saving.train_step, saving.hf = step, step == 4
    saved.append(commands.save(saving))
trained = train([group("good", 9), group("better", 10)])
commands.close()
result = {
    "prompts": [len(d.canary) for d in described],
    "manifest": [bool(d.manifest.digest) for d in described],
    "unusable": dict(poisoned.unusable_groups),
    "poisoned": list(poisoned.trained_samples),
    "kinds": kinds,
    "kept": [list(s.kept_steps) for s in saved],
    "hf": [s.hf_path for s in saved],
    "trained": list(trained.trained_samples),
    "parts": {name: value for name, value in trained.metrics.items() if "rollout/reward/" in name},
}
"""


def test_two_ranks_do_every_command_and_what_one_cannot_do_leaves_both_well(
    run_ranks: Ranks, moe_dir: Path, tmp_path: Path
) -> None:
    first, second = run_ranks(2, COMMANDS, model=moe_dir, run_dir=str(tmp_path / "run"))
    assert (first["prompts"], first["manifest"]) == ([0, 2], [True, True])
    assert (second["prompts"], second["manifest"]) == ([0, 0], [False, False])
    assert (first["unusable"], first["poisoned"]) == ({}, [])
    assert list(second["unusable"]) == ["bad"]
    assert first["kinds"] == ["GroupError", "PeerFailed", "FileExistsError"]
    assert second["kinds"] == ["PeerFailed", "GroupError", "PeerFailed"]
    assert first["kept"] == second["kept"] == [[1], [1, 2], [1, 2, 3], [2, 3, 4]]
    exported = tmp_path / "run" / "hf" / "step_000004"
    assert first["hf"] == ["", "", "", str(exported)]
    assert (exported / "model.safetensors").is_file()
    assert first["parts"] == second["parts"] == {"rollout/reward/good": 0.5, "rollout/reward/better": 0.5}
    assert first["trained"] == ["good#0", "good#1"]
    assert second["trained"] == ["better#0", "better#1"]


TIMEOUTS = """
from vime_trainer.engine import cpu
cpu.install()
distributed.initialize(EngineConfig(collective_timeout_s=77))
groups = distributed.process_groups()
result = {g.group_desc: g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}
"""


def test_the_time_out_of_collectives_is_that_of_every_group_megatrons_own_too(run_ranks: Ranks) -> None:
    (seconds,) = run_ranks(1, TIMEOUTS)
    assert {"default_pg", "DATA_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP_GLOO"} <= set(seconds)
    assert set(seconds.values()) == {77.0}
