"""The worker as a program: how it ends, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

from vime_client.config_loading import load_config
from vime_client.rewards.pool import PoolClosed
from vime_client.testing import FakeBuffer, FakeEngine, serving
from vime_client.worker.__main__ import run
from vime_client.worker.config import WorkerConfig, WorkerSettings

REWARD = """
def score(text):
    return 1.0
"""


def write_config(path: Path, address: str, reward: str = "reward.py:score") -> Path:
    (path / "reward.py").write_text(REWARD)
    file = path / "worker.toml"
    worker = {
        "buffer_address": address,
        "router_address": address,
        "base_dir": str(path),
        "rewards": {"default": reward},
        "reward_processes": 1,
    }
    file.write_text(tomli_w.dumps({"worker": worker, "telemetry": {"traces_file": str(path / "traces.jsonl")}}))
    return file


async def test_the_program_ends_within_seconds_of_sigterm_with_code_0_and_writes_spans(tmp_path: Path) -> None:
    buffer = FakeBuffer([{"prompt": "x"}])
    async with serving(buffer, FakeEngine()) as address:
        config = write_config(tmp_path, address)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vime_client.worker", "--config", str(config)), stderr=asyncio.subprocess.PIPE
        )
        await buffer.settled(1, 20)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 8)
        assert process.returncode == 0
    assert '"worker.group"' in (tmp_path / "traces.jsonl").read_text()


@pytest.mark.parametrize(
    ("reward", "says"),
    [("nothere.py:score", "nothere.py does not exist"), ("reward.py:scor", 'did you mean "score"')],
)
async def test_a_wrong_reward_ends_the_program_with_one_sentence(tmp_path: Path, reward: str, says: str) -> None:
    config = write_config(tmp_path, "127.0.0.1:1", reward)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vime_client.worker", "--config", str(config), "--dry-run"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ},
    )
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert says in err.decode()
    assert "Traceback" not in err.decode()


@pytest.mark.parametrize(
    ("buffer", "token", "says"),
    [
        ("buffer", None, 'address "buffer" must have the form host:port'),
        ("127.0.0.1:1", "nothere.token", "nothere.token cannot be read: No such file or directory"),
        ("10.0.0.1:1", "worker.token", "refusing to send a token in plaintext to 10.0.0.1:1"),
    ],
)
async def test_what_keeps_a_worker_from_starting_is_one_sentence(
    tmp_path: Path, recipe: Path, buffer: str, token: str | None, says: str
) -> None:
    (tmp_path / "worker.token").write_text("secret")
    more = [] if token is None else ["--set", f'worker.credentials.token_file="{tmp_path / token}"']
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vime_client.cli", "worker", str(recipe)),
        *("--buffer", buffer, "--router", "127.0.0.1:1", *more),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 2
    assert err.decode().strip().splitlines()[-1].startswith("vime-worker: ")
    assert says in err.decode()
    assert "Traceback" not in err.decode()


async def test_a_missing_token_is_found_before_anything_starts(tmp_path: Path) -> None:
    config = write_config(tmp_path, "127.0.0.1:1")
    nothere = f'worker.credentials.token_file="{tmp_path}/nothere"'
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vime_client.worker", "--config", str(config), "--dry-run", "--set", nothere),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 2
    assert err.decode() == f"vime-worker: token file {tmp_path}/nothere cannot be read: No such file or directory\n"


def test_a_pool_that_can_start_no_more_processes_ends_the_worker_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def closed(settings: WorkerSettings, stop: asyncio.Event) -> Counter[str]:
        raise PoolClosed("the reward pool is closed")

    config = load_config(WorkerConfig, write_config(tmp_path, "127.0.0.1:1"), ["log.stderr=false"])
    monkeypatch.setattr("vime_client.worker.worker.run_worker", closed)
    assert run(config) == 1
    assert capsys.readouterr().err == "vime-worker: the reward pool is closed\n"
