"""The buffer as a process: starts, says what is wrong in one sentence, and loses nothing when it is killed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import grpc
import pytest

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import batch_service_pb2_grpc as batch_grpc
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1 import prompt_service_pb2_grpc as prompt_grpc
from vime.common.v1 import weight_version_pb2 as version_pb
from vime_buffer.testing import proto_group, write_prompts

CONFIG = """
[server]
port_file = "{folder}/address"
grace_seconds = 0.5
[buffer]
dir = "{folder}/ledger"
run_id = "run"
[buffer.tables.train]
source = {{ path = "train.jsonl" }}
sampling = {{ max_tokens = 8 }}
groups_per_step = 2
"""


def command(folder, *arguments):
    return [sys.executable, "-m", "vime_buffer", "--config", str(folder / "buffer.toml"), *arguments]


def run(folder, *arguments):
    return subprocess.run(command(folder, *arguments), capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path):
    write_prompts(tmp_path / "train.jsonl", 4)
    (tmp_path / "buffer.toml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


@contextmanager
def started(folder):
    address = folder / "address"
    address.unlink(missing_ok=True)
    process = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not address.exists():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end, "the buffer did not start within 60 s"
            time.sleep(0.02)
        with grpc.insecure_channel(address.read_text().strip()) as channel:
            yield process, channel
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_what_was_acked_survives_sigkill_and_sigterm_ends_with_zero(folder):
    version = version_pb.WeightVersion(run_id="run", incarnation=1, step=0)
    with started(folder) as (process, channel):
        batches, prompts = batch_grpc.BatchServiceStub(channel), prompt_grpc.PromptServiceStub(channel)
        batches.OpenIncarnation(batch_pb.OpenIncarnationRequest(run_id="run"), timeout=10)
        batches.AnnounceVersion(batch_pb.AnnounceVersionRequest(version=version), timeout=10)
        request = prompt_pb.LeasePromptsRequest(worker_id="w", max_prompts=2)
        leases = prompts.LeasePrompts(request, timeout=10).leases
        groups = [proto_group(lease) for lease in leases]
        insert = prompt_pb.InsertGroupRequest(lease_id=leases[0].lease_id, group=groups[0])
        prompts.InsertGroup(insert, timeout=10)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    with started(folder) as (process, channel):
        batches, prompts = batch_grpc.BatchServiceStub(channel), prompt_grpc.PromptServiceStub(channel)
        assert prompts.InsertGroup(insert, timeout=10).already_present
        prompts.InsertGroup(
            prompt_pb.InsertGroupRequest(lease_id=leases[1].lease_id, group=groups[1]), timeout=10
        )  # the lease outlived the process
        batch = batches.LeaseBatch(batch_pb.LeaseBatchRequest(incarnation=1, train_step=1), timeout=10)
        ids = [group.group_id for group in batch.groups]
        assert ids == [lease.group_id for lease in leases]
        (message,) = batches.GetGroups(batch_pb.GetGroupsRequest(group_ids=ids), timeout=10)
        assert list(message.groups) == groups
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        (("groups_per_step = 2", "groups_per_stp = 2"), 2, 'did you mean "buffer.tables.train.groups_per_step"?'),
        (("groups_per_step = 2", "groups_per_step = 2\ncapacity = 1"), 2, "groups_per_step 2 is above capacity 1"),
        (('"train.jsonl"', '"missing.jsonl"'), 2, "missing.jsonl does not exist"),
        (('"train.jsonl"', '"bad.jsonl"'), 1, "bad.jsonl line 2 (byte 16): not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_with_a_non_zero_exit(folder, change, code, sentence):
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    path = folder / "buffer.toml"
    path.write_text(path.read_text().replace(*change))
    ended = run(folder)
    assert ended.returncode == code
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("vime-buffer: ")]
    assert sentence in line
    assert "Traceback" not in ended.stderr


def test_a_busy_port_is_named(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run(folder, "--set", f"server.port={port}")
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr


def test_a_dry_run_prints_the_resolved_settings_and_makes_nothing(folder):
    ended = run(folder, "--dry-run", "--set", "buffer.seed=9")
    assert ended.returncode == 0
    assert "seed = 9" in ended.stdout
    assert "max_drops_in_a_row = 40" in ended.stdout
    assert not (folder / "ledger").exists()


def test_help_imports_neither_grpc_nor_numpy():
    code = "import sys, vime_buffer.config; print({'grpc', 'numpy'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "set()\n", "")
