"""Two ranks train what one rank trains: every sample used, whatever the count, and the same loss and gradient norm."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from vime.common.v1 import trajectory_pb2
from vime.common.v1.trajectory_pb2 import Sample, SamplingParams, TrajectoryGroup
from vime.trainer.v1 import trainer_service_pb2 as pb
from vime.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from vime_client.channel import open_channel
from vime_service.server import serving
from vime_service.server_config import ServerConfig
from vime_trainer.config import TrainerConfig
from vime_trainer.tools import fresh_model
from vime_trainer.wiring import Wiring

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START_S, STEP_S = 240, 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts with random weights."""
    folder = tmp_path_factory.mktemp("model")
    settings = fresh_model.config(layers=2, hidden=64)
    (folder / "config.json").write_text(json.dumps(settings))
    from safetensors.torch import save_file

    save_file(fresh_model.random_weights(settings, seed=0), folder / "model.safetensors")
    return folder


@asynccontextmanager
async def trainer(run_dir: Path, model: Path, world_size: int) -> AsyncIterator[TrainerServiceStub]:
    """A trainer service with real ranks."""
    config = TrainerConfig.model_validate(
        {
            "trainer": {
                "run_id": "dp",
                "run_dir": run_dir,
                "model_path": model,
                "buffer_address": "127.0.0.1:1",
                "router_address": "127.0.0.1:1",
                "steps": 1,
                "world_size": world_size,
                "engine": {"routing_replay": False},
                "algorithm": {"reducer": "token_mean"},
            }
        }
    )
    wiring = Wiring(config)
    async with serving("trainer", "vime-trainer", ServerConfig(), wiring.register, wiring.start) as service:
        channel = open_channel(service.address)
        try:
            yield TrainerServiceStub(channel)
        finally:
            await channel.close()


def groups(lengths: list[list[int]]) -> list[TrajectoryGroup]:
    """Groups whose samples have these response lengths, with fixed tokens and rewards."""
    source = random.Random(7)
    made = []
    for g, sizes in enumerate(lengths):
        group = TrajectoryGroup(group_id=f"g{g}", sampling=SamplingParams(temperature=1.0))
        for i, size in enumerate(sizes):
            group.samples.append(
                Sample(
                    group_id=f"g{g}",
                    sample_index=i,
                    prompt_token_ids=[6, 7, 16],
                    response_token_ids=[source.randrange(6, 30) for _ in range(size)],
                    rollout_logprobs=[-3.0] * size,
                    status=trajectory_pb2.SAMPLE_STATUS_COMPLETED,
                    reward=float(i % 2),
                )
            )
        made.append(group)
    return made


async def train(stub: TrainerServiceStub, batch: list[TrajectoryGroup]) -> pb.TrainStepResponse:
    lease = await stub.AcquireMode(pb.AcquireModeRequest(holder="test"), timeout=START_S)
    answer = await stub.TrainStep(pb.TrainStepRequest(mode_lease_id=lease.mode_lease_id, groups=batch), timeout=STEP_S)
    await stub.ReleaseMode(pb.ReleaseModeRequest(mode_lease_id=lease.mode_lease_id), timeout=STEP_S)
    return answer


async def test_k28_odd_counts_give_one_ranks_loss_and_use_every_sample(tmp_path, model):
    batches = {"seven of 1 to 7": [[1, 2, 3, 4], [5, 6, 7]], "three in one group": [[2, 3, 4]]}
    answers: dict[int, dict[str, pb.TrainStepResponse]] = {1: {}, 2: {}}
    for ranks, got in answers.items():
        async with trainer(tmp_path / str(ranks), model, ranks) as stub:
            for name, lengths in batches.items():  # each lease of the mode starts from the starting model
                got[name] = await train(stub, groups(lengths))
    for name, lengths in batches.items():
        one, two = answers[1][name], answers[2][name]
        wanted = {f"g{g}#{i}" for g, sizes in enumerate(lengths) for i in range(len(sizes))}
        assert set(one.trained_samples) == set(two.trained_samples) == wanted
        assert not one.left_out
        assert not two.left_out
        for metric in ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff"):
            assert two.metrics[metric] == pytest.approx(one.metrics[metric], rel=1e-5, abs=1e-7), (name, metric)


async def test_a_group_that_cannot_be_trained_is_refused_with_its_reason_and_the_next_step_works(tmp_path, model):
    async with trainer(tmp_path / "bad", model, 1) as stub:
        lease = await stub.AcquireMode(pb.AcquireModeRequest(holder="test"), timeout=START_S)
        (bad,) = groups([[3, 3]])
        bad.samples[0].rollout_logprobs.append(-1.0)
        request = pb.TrainStepRequest(mode_lease_id=lease.mode_lease_id, groups=[bad])
        with pytest.raises(Exception, match="3 response tokens but rollout_logprobs has shape"):
            await stub.TrainStep(request, timeout=STEP_S)
        good = pb.TrainStepRequest(mode_lease_id=lease.mode_lease_id, groups=groups([[3, 3]]))
        assert not (await stub.TrainStep(good, timeout=STEP_S)).skipped


async def test_a_second_driver_is_refused_while_the_first_holds_the_mode(tmp_path, model):
    async with trainer(tmp_path / "mode", model, 1) as stub:
        await stub.AcquireMode(pb.AcquireModeRequest(holder="first"), timeout=START_S)
        with pytest.raises(Exception, match="first drives single steps"):
            await stub.AcquireMode(pb.AcquireModeRequest(holder="second"), timeout=START_S)
        with pytest.raises(Exception, match="first drives single steps"):
            await stub.Start(pb.StartRequest(), timeout=STEP_S)
