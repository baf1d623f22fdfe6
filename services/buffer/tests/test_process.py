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
from vime.buffer.v1 import table_service_pb2 as table_pb
from vime.buffer.v1 import table_service_pb2_grpc as table_grpc
from vime.common.v1 import weight_version_pb2 as version_pb
from vime_buffer.catalog import check_data
from vime_buffer.testing import proto_group, table, write_prompts

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
        (('"train.jsonl"', '"missing.jsonl"'), 2, "missing.jsonl cannot be read: No such file"),
        (('"train.jsonl"', '"bad.jsonl"'), 2, "bad.jsonl line 2 (byte 16): not valid JSON"),
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


def test_a_killed_buffer_starts_without_its_file_and_goes_on_when_it_is_back(folder):
    version = version_pb.WeightVersion(run_id="run", incarnation=1, step=0)
    ask = prompt_pb.LeasePromptsRequest(worker_id="w", max_prompts=2)
    with started(folder) as (process, channel):
        batches, prompts = batch_grpc.BatchServiceStub(channel), prompt_grpc.PromptServiceStub(channel)
        batches.OpenIncarnation(batch_pb.OpenIncarnationRequest(run_id="run"), timeout=10)
        batches.AnnounceVersion(batch_pb.AnnounceVersionRequest(version=version), timeout=10)
        leases = prompts.LeasePrompts(ask, timeout=10).leases
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    (folder / "train.jsonl").rename(folder / "away")
    with started(folder) as (_, channel):
        batches, prompts = batch_grpc.BatchServiceStub(channel), prompt_grpc.PromptServiceStub(channel)
        tables = table_grpc.TableServiceStub(channel)
        blocked = tables.GetTable(table_pb.GetTableRequest(name="train"), timeout=10).table.blocked
        assert blocked == f"prompt source {folder}/train.jsonl cannot be read: No such file or directory"
        for lease in leases:  # what was leased before needs no file
            insert = prompt_pb.InsertGroupRequest(lease_id=lease.lease_id, group=proto_group(lease))
            prompts.InsertGroup(insert, timeout=10)
        batch = batches.LeaseBatch(batch_pb.LeaseBatchRequest(incarnation=1, train_step=1), timeout=10)
        assert [group.group_id for group in batch.groups] == [lease.group_id for lease in leases]
        version.step = 1
        done = batch_pb.CompleteStepRequest(
            incarnation=1, train_step=1, outcome=batch_pb.STEP_OUTCOME_TRAINED, published_version=version
        )
        batches.CompleteStep(done, timeout=10)
        assert prompts.LeasePrompts(ask, timeout=10).blocked_by == prompt_pb.BLOCK_REASON_SOURCE
        (folder / "away").rename(folder / "train.jsonl")
        ask.wait.seconds = 30
        assert [lease.prompt.index for lease in prompts.LeasePrompts(ask, timeout=40).leases] == [2, 3]


def test_a_dry_run_tells_every_fault_of_the_data(folder):
    lines = [f'{{"prompt": "p", "answer": {n}}}' for n in range(120)]
    lines[99] = '{"prompt": "p"}'
    lines[110] = '{"prompt": 7, "answer": 1}'
    (folder / "missing_key.jsonl").write_text("\n".join(lines))
    (folder / "parquet.jsonl").write_bytes(b"PAR1" + bytes(99))
    (folder / "empty.jsonl").write_text("")
    (folder / "large.jsonl").write_text('{"prompt": "' + "x" * 70_000_000 + '"}')
    (folder / "lenient.jsonl").write_text('{"prompt": "\\ud83d"}\n{"prompt": "p"}')
    path = folder / "buffer.toml"
    text = path.read_text().replace('path = "train.jsonl"', 'path = "missing_key.jsonl", required_keys = ["answer"]')
    for name in ("parquet", "empty", "large", "nowhere", "lenient"):
        lenient = ", lenient = true" if name == "lenient" else ""
        text += f'[buffer.tables."eval/{name}"]\nsource = {{ path = "{name}.jsonl"{lenient} }}\n'
        text += "sampling = { max_tokens = 8 }\n"
    path.write_text(text)
    ended = run(folder, "--dry-run")
    assert ended.returncode == 2
    at = [sum(len(line) + 1 for line in lines[:n]) for n in range(120)]
    room = (64 << 20) - (64 << 10) - 10 - 8192
    assert ended.stderr.splitlines() == [
        f'vime-buffer: table "train": {folder}/missing_key.jsonl line 100 (byte {at[99]}): key "answer" is missing',
        f'vime-buffer: table "train": {folder}/missing_key.jsonl line 111 (byte {at[110]}): "prompt" must be text, a '
        "list of messages or a list of token ids, not a number",
        f'vime-buffer: table "eval/parquet": prompt source {folder}/parquet.jsonl is a Parquet file; it must be '
        "JSONL, one JSON object on each line",
        f'vime-buffer: table "eval/empty": prompt source {folder}/empty.jsonl has no records',
        f'vime-buffer: table "eval/large": {folder}/large.jsonl line 1 (byte 0): a line of 70000014 bytes, '
        f"one record may have at most {room}",
        f'vime-buffer: table "eval/nowhere": prompt source {folder}/nowhere.jsonl cannot be read: '
        "No such file or directory",
    ]
    assert f"# {folder}/lenient.jsonl: bad lines that are skipped: {{'lone_surrogate': 1}}" in ended.stdout


def test_what_a_dry_run_leaves_unchecked_is_said(folder):
    path = write_prompts(folder / "train.jsonl", 100)
    tables = [table(path)]
    with path.open("a") as file:
        file.write("nonsense\n")
    assert len(check_data(tables, 1 << 20)[0]) == 1
    assert check_data(tables, 1 << 20, at_most=100) == ([], [f"{path}: only the first 104 bytes were checked"])


def test_other_settings_than_the_ledgers_are_final_and_a_folder_in_use_is_not(folder):
    with started(folder):
        taken = run(folder, "--set", "server.port=0")
    assert (taken.returncode, "open in another process" in taken.stderr) == (1, True)
    other = run(folder, "--set", "buffer.tables.train.max_staleness=2")
    assert (other.returncode, "max_staleness is 0 in the ledger and cannot become 2" in other.stderr) == (2, True)


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
