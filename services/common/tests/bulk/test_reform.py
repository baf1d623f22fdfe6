"""K17: a receiver dies inside a broadcast. The sender notices in time, the rest re-form, and it sends again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vime_service.bulk import BucketLayout, Deadline, Manifest, TransportError, VersionKey, WeightSender
from vime_service.bulk.gloo import GlooTransport

MEMBER = Path(__file__).with_name("reform_member.py")


def start(name: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(MEMBER), name, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def tell(member: subprocess.Popen[str], generation: int, members: list[str]) -> None:
    assert member.stdin is not None
    member.stdin.write(json.dumps({"generation": generation, "members": members}) + "\n")
    member.stdin.flush()


def answer(member: subprocess.Popen[str], threads: ThreadPoolExecutor, seconds: float = 15) -> str:
    assert member.stdout is not None
    return threads.submit(member.stdout.readline).result(seconds).strip()


@pytest.mark.timeout(60)
def test_k17_a_member_killed_mid_broadcast_is_dropped_and_the_same_version_is_sent_again(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    sent = {f"w{i}": torch.randn(1 << 18) for i in range(8)}  # 8 MiB in buckets of 512 KiB
    manifest = Manifest.of(VersionKey("run", 1, 3), sent.items(), BucketLayout(512 << 10))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest.to_dict()))
    trainer = GlooTransport.host("trainer", "127.0.0.1", Deadline.after(10))
    survivor = start("e0", trainer.endpoint, str(path))
    victim = start("e1", trainer.endpoint, str(path), "7")
    try:
        assert [answer(m, threads, 40) for m in (survivor, victim)] == ["joined", "joined"]
        began = time.monotonic()
        for member in (survivor, victim):
            tell(member, 1, ["trainer", "e0", "e1"])
        trainer.form(1, ["trainer", "e0", "e1"], Deadline.after(10))
        sender = WeightSender(trainer, manifest, sent, bucket_timeout_s=2)
        with pytest.raises(TransportError) as caught:
            sender.send(Deadline.after(10))
        assert caught.value.generation == 1
        assert victim.wait(10) == -9
        assert answer(survivor, threads).startswith("failed broadcast failed in generation 1")

        tell(survivor, 2, ["trainer", "e0"])
        trainer.form(2, ["trainer", "e0"], Deadline.after(10))
        stats = sender.send(Deadline.after(10))
        assert answer(survivor, threads) == "staged"
        assert stats.nbytes == manifest.plan.total_bytes
        assert time.monotonic() - began < 20
    finally:
        trainer.close()
        for member in (survivor, victim):
            member.kill()
            member.wait(10)
