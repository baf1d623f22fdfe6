"""Transfers over both transports: equal bytes everywhere, and every failure typed, named and in time."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vime_service.bulk import (
    BucketLayout,
    Deadline,
    DigestMismatch,
    Manifest,
    ManifestError,
    MemoryStaging,
    Transport,
    TransportError,
    VersionKey,
    WeightReceiver,
    WeightSender,
)
from vime_service.bulk.gloo import open_store
from vime_service.bulk.manifest import byte_view

from .conftest import Fabric

V1 = VersionKey("run", 1, 1)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(33, 16, generator=generator).to(torch.bfloat16),
        "router.bias": torch.randn(5, generator=generator),
        "scale": torch.randn((), generator=generator),
        "steps": torch.arange(3),
        "head": torch.randn(33, 16, generator=generator).to(torch.bfloat16),
    }


def form_all(
    transports: dict[str, Transport], generation: int, pool: ThreadPoolExecutor, names: list[str] | None = None
) -> None:
    names = names or list(transports)
    for done in [pool.submit(transports[n].form, generation, names, Deadline.after(10)) for n in names]:
        done.result()


def receive(transport: Transport, manifest: Manifest, seconds: float = 10) -> dict[str, torch.Tensor]:
    staging = MemoryStaging(manifest.plan.total_bytes)
    return WeightReceiver(transport, manifest, staging).receive(Deadline.after(seconds))


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
def test_all_receivers_get_every_bit_and_the_next_version_uses_the_same_group(
    fabric: Fabric, threads: ThreadPoolExecutor, bucket_bytes: int
) -> None:
    transports = fabric(["trainer", "e0", "e1"])
    form_all(transports, 1, threads)
    for step in (1, 2):
        sent = weights(step)
        manifest = Manifest.of(VersionKey("run", 1, step), sent.items(), BucketLayout(bucket_bytes))
        got = [threads.submit(receive, transports[n], manifest) for n in ("e0", "e1")]
        stats = WeightSender(transports["trainer"], manifest, sent).send(Deadline.after(10))
        assert stats.nbytes == manifest.plan.total_bytes
        assert stats.buckets == manifest.plan.num_buckets
        for future in got:
            staged = future.result()
            assert list(staged) == list(sent)
            assert all(torch.equal(byte_view(staged[n]), byte_view(t)) for n, t in sent.items())


def test_bytes_that_changed_after_the_manifest_fail_at_every_receiver_by_name(
    fabric: Fabric, threads: ThreadPoolExecutor
) -> None:
    transports = fabric(["trainer", "e0"])
    form_all(transports, 1, threads)
    sent = weights()
    manifest = Manifest.of(V1, sent.items(), BucketLayout(64))
    sent["router.bias"][3] += 1
    got = threads.submit(receive, transports["e0"], manifest)
    WeightSender(transports["trainer"], manifest, sent).send(Deadline.after(10))
    with pytest.raises(DigestMismatch) as caught:
        got.result()
    assert caught.value.name == "router.bias"


def test_a_missing_sender_ends_the_wait_at_the_deadline_and_the_error_says_where(
    fabric: Fabric, threads: ThreadPoolExecutor
) -> None:
    transports = fabric(["trainer", "e0"])
    form_all(transports, 4, threads)
    manifest = Manifest.of(V1, weights().items())
    started = time.monotonic()
    with pytest.raises(TransportError, match="broadcast failed in generation 4 at rank 1 after") as caught:
        receive(transports["e0"], manifest, seconds=0.5)
    assert (caught.value.generation, caught.value.rank) == (4, 1)
    assert 0.3 < caught.value.seconds <= time.monotonic() - started < 8


def test_abort_from_another_thread_ends_a_pending_receive(fabric: Fabric, threads: ThreadPoolExecutor) -> None:
    transports = fabric(["trainer", "e0"])
    form_all(transports, 1, threads)
    waiting = threads.submit(receive, transports["e0"], Manifest.of(V1, weights().items()), 30)
    threading.Timer(0.2, transports["e0"].abort).start()
    started = time.monotonic()
    with pytest.raises(TransportError, match="abort"):
        waiting.result()
    assert time.monotonic() - started < 15


def test_a_member_that_never_comes_fails_the_forming_in_time(fabric: Fabric, threads: ThreadPoolExecutor) -> None:
    transports = fabric(["trainer", "e0", "e1"])
    names = list(transports)
    started = time.monotonic()
    forming = [threads.submit(transports[n].form, 1, names, Deadline.after(1)) for n in ("trainer", "e0")]
    for future in forming:
        with pytest.raises(TransportError, match="forming failed in generation 1"):
            future.result()
    assert time.monotonic() - started < 15


def test_after_a_failure_the_group_is_unusable_until_formed_again_without_the_lost(
    fabric: Fabric, threads: ThreadPoolExecutor
) -> None:
    transports = fabric(["trainer", "e0", "e1"])
    form_all(transports, 1, threads)
    sent = weights()
    manifest = Manifest.of(V1, sent.items(), BucketLayout(64))
    sender = WeightSender(transports["trainer"], manifest, sent, bucket_timeout_s=0.5)
    got = threads.submit(receive, transports["e0"], manifest, 2)  # e1 never takes part
    failures = [threads.submit(sender.send, Deadline.after(3)).exception(), got.exception()]
    # gloo hands a small bucket to the kernel before the sender can know, so one end may not notice
    assert any(isinstance(failure, TransportError) for failure in failures)
    with pytest.raises(ValueError, match="generation 1 is not above 1"):
        transports["trainer"].form(1, ["trainer", "e0"], Deadline.after(1))
    form_all(transports, 2, threads, ["trainer", "e0"])
    got = threads.submit(receive, transports["e0"], manifest)
    sender.send(Deadline.after(10))
    assert torch.equal(got.result()["embed"], sent["embed"])


def test_a_transport_outside_any_group_refuses_to_broadcast(fabric: Fabric) -> None:
    transports = fabric(["trainer", "e0"])
    with pytest.raises(TransportError, match="no group is formed"):
        transports["e0"].broadcast(torch.zeros(4, dtype=torch.uint8), Deadline.after(1))


def test_groups_that_cannot_be_are_refused(fabric: Fabric) -> None:
    trainer = fabric(["trainer", "e0"])["trainer"]
    with pytest.raises(ValueError, match="not among the members"):
        trainer.form(1, ["e0", "e1"], Deadline.after(1))
    with pytest.raises(ValueError, match="two distinct members"):
        trainer.form(1, ["trainer"], Deadline.after(1))


def test_a_sender_whose_tensors_differ_from_its_manifest_is_refused(fabric: Fabric) -> None:
    transport = fabric(["trainer", "e0"])["trainer"]
    sent = weights()
    manifest = Manifest.of(V1, sent.items())
    with pytest.raises(ManifestError, match=r"absent: \['head'\]"):
        WeightSender(transport, manifest, {n: t for n, t in sent.items() if n != "head"})
    with pytest.raises(ManifestError, match="'embed' has 2112 bytes, its manifest says 1056"):
        WeightSender(transport, manifest, {**sent, "embed": sent["embed"].float()})


def test_a_store_listens_on_its_own_address_and_on_no_other() -> None:
    store = open_store("127.0.0.1", 0, Deadline.after(10), host=True)
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):  # torch's own would answer here, and on every other interface
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    joined = open_store("127.0.0.1", store.port, Deadline.after(10), host=False)
    joined.set("key", b"value")
    assert store.get("key") == b"value"


def test_a_store_whose_port_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=rf"opening the store 127\.0\.0\.1:{port}.*in use"):
            open_store("127.0.0.1", port, Deadline.after(5), host=True)
