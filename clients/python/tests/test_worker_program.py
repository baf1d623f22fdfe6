"""The worker as a program: how it ends, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path
from statistics import stdev
from typing import Any

import grpc
import pytest
import tomli_w

from vime.plugin.v1 import plugin_service_pb2
from vime_client.config_loading import load_config
from vime_client.rewards.pool import PoolClosed
from vime_client.testing import FakeBuffer, FakeEngine, serving
from vime_client.worker.__main__ import run
from vime_client.worker.config import WorkerConfig, WorkerSettings

from .test_clients import Plugin

REWARD = """
def score(text):
    return 1.0
"""


def write_config(path: Path, address: str, **more: object) -> Path:
    (path / "reward.py").write_text(REWARD)
    file = path / "worker.toml"
    worker = {
        "buffer_address": address,
        "router_address": address,
        "base_dir": str(path),
        "rewards": {"default": "reward.py:score"},
        "reward_processes": 1,
        **more,
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


async def dry_run(config: Path, *more: str) -> tuple[int | None, str]:
    """Exit code and complaints of a dry run."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vime_client.worker", "--config", str(config), "--dry-run", *more),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert "Traceback" not in err.decode()
    return process.returncode, err.decode()


async def test_wrong_rewards_filters_and_records_are_told_together_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "syntax.py").write_text("def score(text):\n    return (1.0\n")
    (tmp_path / "raises.py").write_text("import math\n\nLIMIT = math.sqrt(-1)\n\ndef score(text):\n    return 1.0\n")
    (tmp_path / "quits.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "asks.py").write_text("def score(text, lable):\n    return 1.0\n")
    (tmp_path / "batch.py").write_text("def score(samples, text):\n    return [1.0 for _ in samples]\n")
    (tmp_path / "filter.py").write_text("def keep(samples, reward):\n    return True\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": 2}\n\n{"prompt": "1+2=", "label": 3}\n')
    (tmp_path / "sft.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+2=", "respones": "3"}\n')
    rewards = {
        "default": "asks.py:score",
        "gone": "nothere.py:score",
        "name": "reward.py:scor",
        "syntax": "syntax.py:score",
        "raises": "raises.py:score",
        "quits": "quits.py:score",
        "batch": "batch.py:score",
        "module": "no_such_module:score",
        "good": "reward.py:score",
    }
    sources = {"train": "train", "sft": "sft", "eval/batch": "train", "eval/good": "train"}
    tables = {name: {"source": str(tmp_path / f"{file}.jsonl")} for name, file in sources.items()}
    for name in ("batch", "good"):
        tables[f"eval/{name}"]["reward"] = name
    tables["sft"]["reward"] = "good"
    config = write_config(tmp_path, "127.0.0.1:1", rewards=rewards, tables=tables, filter="filter.py:keep")
    code, err = await dry_run(config)
    assert code == 2
    told = err.splitlines()
    assert len(told) == 10
    for says in (
        'reward "default"|asks for "lable", which is neither known of a sample (|, text, token_ids) nor a key of '
        'train.jsonl line 1 (label, prompt); did you mean "label"?',
        'reward "gone"|nothere.py does not exist',
        'reward "name"|has no function scor; did you mean "score"?',
        "reward \"syntax\"|cannot be imported: SyntaxError: '(' was never closed (syntax.py, line 2)",
        'reward "raises"|cannot be imported: ValueError: |(raises.py:3)',
        'reward "quits"|cannot be loaded: the reward process ended with exit code 3',
        'reward "batch"|asks for "text", which is neither known of a group',
        'reward "module"|cannot be imported: ModuleNotFoundError',
        'filter|asks for "reward", which|did you mean "rewards"?',
        'table "sft": record sft.jsonl line 2 has no key "response"',
    ):
        parts = says.split("|")
        assert [line for line in told if all(part in line for part in parts)], (says, err)


async def test_a_record_far_down_that_lacks_a_key_is_named_by_its_line(tmp_path: Path) -> None:
    lines = ['{"prompt": "p", "label": 1}\n'] * 99 + ['{"prompt": "p"}\n'] + ['{"prompt": "p", "label": 1}\n'] * 20
    (tmp_path / "train.jsonl").write_text("".join(lines))
    tables = {"train": {"source": str(tmp_path / "train.jsonl")}}
    config = write_config(tmp_path, "127.0.0.1:1", tables=tables)
    (tmp_path / "reward.py").write_text("def score(text, label, weight=1.0):\n    return weight\n")
    code, err = await dry_run(config)
    assert code == 2
    assert 'asks for "label"' in err
    assert "nor a key of train.jsonl line 100 (prompt)" in err


async def test_records_that_the_buffer_skips_or_never_reads_refuse_nothing(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(text, label):\n    return 1.0\n")
    whole, lacks = '{"prompt": "p", "label": 1}\n', '{"prompt": "p"}\n'
    (tmp_path / "lenient.jsonl").write_text(whole + lacks + '{"label": 1}\n')
    (tmp_path / "limited.jsonl").write_text(whole * 2 + lacks)
    (tmp_path / "long.jsonl").write_text(whole + '{"prompt": "' + "x" * (1 << 26) + '"}\n' + lacks)
    tables = {
        "train": {"source": str(tmp_path / "lenient.jsonl"), "required_keys": ["label"]},
        "eval/limited": {"source": str(tmp_path / "limited.jsonl"), "limit": 2},
        "eval/long": {"source": str(tmp_path / "long.jsonl")},
    }
    assert await dry_run(write_config(tmp_path, "127.0.0.1:1", tables=tables)) == (0, "")


class Judge(Plugin):
    """Looks at what it is given, as a program of somebody does."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__([plugin_service_pb2.SampleScore(reward=1.0)])
        self._code = code

    async def ScoreSamples(self, request: Any, context: Any) -> plugin_service_pb2.ScoreSamplesResponse:
        if request.prompt.chat.messages[-1].content != "1+1?" or not request.samples[0].response_text:
            await context.abort(self._code, "no question, or no answer")
        if self._code is not grpc.StatusCode.OK:
            await context.abort(self._code, "invalid literal for int(): 'check'")
        return await super().ScoreSamples(request, context)

    async def DecideGroups(self, request: Any, context: Any) -> plugin_service_pb2.DecideGroupsResponse:
        stdev(sample.reward for sample in request.groups[0].samples)  # of one sample there is none
        return await super().DecideGroups(request, context)


@pytest.mark.parametrize(
    ("code", "refused"),
    [(grpc.StatusCode.OK, False), (grpc.StatusCode.UNKNOWN, False), (grpc.StatusCode.NOT_FOUND, True)],
)
async def test_a_plugin_is_shown_a_prompt_of_the_table_and_may_not_like_what_is_made_up(
    tmp_path: Path, code: grpc.StatusCode, refused: bool
) -> None:
    (tmp_path / "chat.jsonl").write_text('{"question": [{"role": "user", "content": "1+1?"}]}\n')
    tables = {"train": {"source": str(tmp_path / "chat.jsonl"), "prompt_key": "question"}}
    async with serving(Judge(code)) as address:
        url = f"grpc://{address}"
        config = write_config(tmp_path, "127.0.0.1:1", rewards={"default": url}, filter=url, tables=tables)
        assert (await dry_run(config))[0] == (2 if refused else 0)


async def test_a_reward_that_breaks_while_it_is_loaded_may_be_started_again(tmp_path: Path) -> None:
    config = write_config(tmp_path, "127.0.0.1:1")
    (tmp_path / "reward.py").write_text("import os\nos._exit(3)\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vime_client.worker", "--config", str(config)), stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "reward.py:score cannot be loaded: the reward process ended with exit code 3" in err.decode()


@pytest.mark.parametrize(
    ("scores", "decisions", "says"),
    [
        (1, 1, []),
        (2, 0, ["returned 2 scores for 1 samples", "filter: plugin {address} returned 0 decisions for 1 group"]),
    ],
)
async def test_a_plugin_is_asked_once_before_the_start(
    tmp_path: Path, scores: int, decisions: int, says: list[str]
) -> None:
    plugin = Plugin([plugin_service_pb2.SampleScore(reward=1.0)] * scores, decisions=decisions)
    async with serving(plugin) as address:
        url = f"grpc://{address}"
        config = write_config(tmp_path, "127.0.0.1:1", rewards={"default": url}, filter=url)
        code, err = await dry_run(config)
    assert code == (2 if says else 0), err
    assert len(err.splitlines()) == len(says)
    for sentence in says:
        assert sentence.format(address=address) in err
    if not says:
        code, err = await dry_run(config)  # it is gone now
        assert code == 2
        assert f'reward "default": plugin {address}: ' in err


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
    code, err = await dry_run(config, "--set", nothere)
    assert code == 2
    assert err == f"vime-worker: token file {tmp_path}/nothere cannot be read: No such file or directory\n"


def test_a_pool_that_can_start_no_more_processes_ends_the_worker_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def closed(settings: WorkerSettings, stop: asyncio.Event) -> Counter[str]:
        raise PoolClosed("the reward pool is closed")

    config = load_config(WorkerConfig, write_config(tmp_path, "127.0.0.1:1"), ["log.stderr=false"])
    monkeypatch.setattr("vime_client.worker.worker.run_worker", closed)
    assert run(config) == 1
    assert capsys.readouterr().err == "vime-worker: the reward pool is closed\n"
