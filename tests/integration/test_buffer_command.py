"""`vime buffer` over a real buffer: counts and laws, and a quarantined group all the way into the looking glass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.buffer_process import RUN, BufferProcess, Stubs, finished_group, write_prompts

from vime.buffer.v1.batch_service_pb2 import (
    AnnounceVersionRequest,
    LeaseBatchRequest,
    OpenIncarnationRequest,
    QuarantineGroupsRequest,
    UnusableGroup,
)
from vime.buffer.v1.prompt_service_pb2 import InsertGroupRequest, LeasePromptsRequest
from vime.common.v1.weight_version_pb2 import WeightVersion

VIME = Path(sys.executable).with_name("vime")
_S = 30.0


def vime(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(VIME), *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
async def buffer(tmp_path):
    write_prompts(tmp_path / "train.jsonl", range(20))
    table = f'source = {{ path = "{tmp_path}/train.jsonl" }}\nsampling = {{ max_tokens = 16 }}\n'
    process = BufferProcess(tmp_path, table + "samples_per_prompt = 2\ngroups_per_step = 2\n")
    await process.start()
    yield process
    await process.kill()


async def quarantine_one(stubs: Stubs) -> str:
    """Lease a batch of two groups and take one of them out; its id."""
    version = WeightVersion(run_id=RUN, incarnation=1)
    await stubs.batches.OpenIncarnation(OpenIncarnationRequest(run_id=RUN), timeout=_S)
    await stubs.batches.AnnounceVersion(AnnounceVersionRequest(version=version), timeout=_S)
    answer = await stubs.prompts.LeasePrompts(LeasePromptsRequest(worker_id="foreign", max_prompts=2), timeout=_S)
    for lease in answer.leases:
        request = InsertGroupRequest(lease_id=lease.lease_id, group=finished_group(lease))
        await stubs.prompts.InsertGroup(request, timeout=_S)
    batch = await stubs.batches.LeaseBatch(LeaseBatchRequest(incarnation=1, train_step=1), timeout=_S)
    bad = batch.groups[1].group_id
    unusable = UnusableGroup(group_id=bad, attempt=0, detail="layer 7 is not a layer of this model")
    request = QuarantineGroupsRequest(incarnation=1, train_step=1, groups=[unusable])
    await stubs.batches.QuarantineGroups(request, timeout=_S)
    return bad


async def test_a_quarantined_group_is_listed_with_its_reason_and_read_by_the_looking_glass(buffer, tmp_path):
    async with buffer.channel() as channel:
        bad = await quarantine_one(Stubs(channel))
    address = f"127.0.0.1:{buffer.port}"
    shown = vime("buffer", address)
    assert shown.returncode == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert "inserted 2 = stored 0 + leased 1 + consumed 0 + retired 0 + dropped 1 (unusable 1)" in words
    assert f"{bad}#0" in words
    assert "layer 7 is not a layer" in words
    assert "foreign" in words

    kept = vime("buffer", address, "--group", f"{bad}#0")
    assert kept.returncode == 0, kept.stderr
    (tmp_path / "bad.json").write_text(kept.stdout)
    looked_at = vime("inspect", "advantages", str(tmp_path / "bad.json"), "--json")
    assert looked_at.returncode == 0, looked_at.stderr
    rewards = {row["id"]: row["reward"] for row in json.loads(looked_at.stdout)["trajectories"]}
    assert rewards == {f"{bad}#0": 0.0, f"{bad}#1": 1.0}


async def test_a_group_that_is_not_in_quarantine_is_named(buffer):
    refused = vime("buffer", f"127.0.0.1:{buffer.port}", "--group", "none#3")
    assert refused.returncode == 2
    assert "none" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(("where", "word"), [("127.0.0.1:1", "127.0.0.1:1"), ("nowhere", "neither a run folder")])
def test_a_buffer_that_is_not_there_is_a_sentence(where, word):
    refused = vime("buffer", where)
    assert refused.returncode == 2
    assert word in refused.stderr
    assert "Traceback" not in refused.stderr
