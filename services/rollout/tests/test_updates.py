"""Weight updates end to end over the fake engine: what serves, what fails, and what running samples see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from vime_rollout.engine import FinishReason, PauseMode
from vime_rollout.engines.fake import FakeEngine, make_weights
from vime_rollout.staging_area import StagingArea, remove_stale
from vime_rollout.traffic import VersionSpan
from vime_rollout.transfers import Rendezvous
from vime_rollout.updates import CanaryPrompt, Updater
from vime_rollout.weights import Fence, FenceKind
from vime_service.bulk import Deadline, WeightSender
from vime_service.bulk.inline import InlineTransport
from vime_service.errors import (
    DeadlineExceeded,
    DigestMismatch,
    EngineFailed,
    FailedPrecondition,
    InvalidArgument,
    LoadFailed,
    ManifestRefused,
    NotFound,
    ResourceExhausted,
    TransferFailed,
    Unavailable,
    VersionConflict,
)

from .conftest import Stack, Weights, manifest_of, version
from .test_generation import PROMPT, slow, until_running

A, B, C = make_weights(0), make_weights(1), make_weights(2)


async def canary_for(weights: Weights) -> list[CanaryPrompt]:
    """The logprobs that a trainer with these weights would send."""
    trainer = FakeEngine()
    trainer.weights = dict(weights)
    prompts = [list(range(start, start + 30)) for start in (0, 50, 100, 150)]
    return [CanaryPrompt(ids, (await trainer.score("t", ids, False)).logprobs.tolist()) for ids in prompts]


async def greedy(stack: Stack, request_id: str = "g") -> list[int]:
    return list((await stack.generate(request_id, PROMPT, max_tokens=30, temperature=0.0))[0].token_ids)


async def greedy_of(weights: Weights, stack: Stack) -> list[int]:
    engine = FakeEngine()
    engine.weights = dict(weights)
    fresh = Stack(engine, stack.config)
    fresh.weights.serve_initial()
    return await greedy(fresh)


async def test_after_an_update_the_engine_is_a_fresh_one_with_those_weights(fake_stack: Stack) -> None:
    for step, weights in ((1, B), (2, C), (3, B)):
        done = await fake_stack.publish(step, weights, await canary_for(weights))
        assert done.parameters == 2
        assert done.canary_difference is not None
        assert done.canary_difference < 1e-6
        assert await greedy(fake_stack) == await greedy_of(weights, fake_stack)
    assert fake_stack.weights.serving is not None
    assert fake_stack.weights.serving.version == version(3)


async def test_the_same_version_again_needs_no_transfer_and_commits_at_once(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    prepared = await fake_stack.updater.prepare(manifest_of(1, A), Rendezvous("inline", "", 9, 1, 2))
    assert prepared.already_serving
    assert (await fake_stack.updater.commit(version(1), [], 0, PauseMode.KEEP)).pause_seconds == 0
    with pytest.raises(VersionConflict):
        await fake_stack.updater.prepare(manifest_of(1, B), Rendezvous("inline", "", 9, 1, 2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"router.weight": None}, "missing: router.weight"),
        ({"lm_head.weight": torch.ones(3)}, "not expected: lm_head.weight"),
        ({"router.weight": torch.ones(2, 8, 259)}, "router.weight is [2, 8, 259], expected [2, 8, 260]"),
        ({"router.weight": A["router.weight"].bfloat16()}, "router.weight is bfloat16, expected float32"),
    ],
)
async def test_k13_tensors_that_do_not_make_up_the_model_are_refused_by_name(
    fake_stack: Stack, change: dict[str, torch.Tensor | None], named: str
) -> None:
    await fake_stack.publish(1, A)
    before = await greedy(fake_stack)
    wrong = {name: tensor for name, tensor in {**B, **change}.items() if tensor is not None}
    with pytest.raises(ManifestRefused) as caught:
        await fake_stack.publish(2, wrong)
    assert named in str(caught.value)
    assert fake_stack.weights.name == "SERVING"
    assert await greedy(fake_stack) == before
    await fake_stack.publish(3, B)


async def test_k13_bytes_that_arrive_wrong_fail_the_staging_by_name_and_the_old_version_serves(
    fake_stack: Stack,
) -> None:
    await fake_stack.publish(1, A)
    manifest = manifest_of(2, B)
    damaged = {name: tensor.clone() for name, tensor in B.items()}
    damaged["router.weight"][0, 0, 0] += 1
    with pytest.raises(DigestMismatch, match=r"'router\.weight'"):
        await fake_stack.stage(manifest, damaged)
    assert fake_stack.weights.name == "SERVING"
    with pytest.raises(FailedPrecondition, match="is not staged"):
        await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
    await fake_stack.publish(2, B)
    assert await greedy(fake_stack) == await greedy_of(B, fake_stack)


async def test_a_sender_that_never_comes_fails_the_transfer_in_its_own_time(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    await fake_stack.updater.prepare(manifest_of(2, B), Rendezvous("inline", "", 50, 1, 2), 0.3)
    with pytest.raises(TransferFailed, match="forming failed in generation 50 at rank 1"):
        await fake_stack.updater.await_staged(version(2), 5)
    assert fake_stack.weights.name == "SERVING"


async def test_waiting_for_a_transfer_has_the_callers_deadline(fake_stack: Stack) -> None:
    await fake_stack.updater.prepare(manifest_of(2, B), Rendezvous("inline", "", 50, 1, 2), 5)
    with pytest.raises(DeadlineExceeded, match=r"is not staged after 0\.1 s"):
        await fake_stack.updater.await_staged(version(2), 0.1)
    await fake_stack.updater.abort(version(2), "test")


@pytest.mark.parametrize("how", ["aborted", "prepared anew", "closed"])
async def test_who_waits_for_a_transfer_that_is_given_up_is_told_at_once(fake_stack: Stack, how: str) -> None:
    """No thread that waits for its group to form can be interrupted: whoever waits must not wait with it."""
    updater = fake_stack.updater
    await updater.prepare(manifest_of(2, B), Rendezvous("inline", "", 50, 1, 2), 5)
    waiting = asyncio.create_task(updater.await_staged(version(2), 40))
    await asyncio.sleep(0)
    if how == "aborted":
        ending = asyncio.create_task(updater.abort(version(2), "test"))
    elif how == "prepared anew":
        ending = asyncio.create_task(updater.prepare(manifest_of(2, B), Rendezvous("inline", "", 51, 1, 2), 5))
    else:
        ending = asyncio.create_task(updater.close())
    with pytest.raises(TransferFailed, match="was given up"):
        await waiting
    assert not ending.done()  # it waits for the thread, at most two seconds
    ending.cancel()


async def test_a_second_prepare_with_a_new_generation_replaces_the_first_transfer(fake_stack: Stack) -> None:
    await fake_stack.updater.prepare(manifest_of(1, A), Rendezvous("inline", "", 50, 1, 2), 0.5)
    await fake_stack.publish(1, A)
    assert fake_stack.weights.name == "SERVING"


async def test_generation_goes_on_while_weights_arrive(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    manifest = manifest_of(2, B)
    rendezvous = Rendezvous("inline", "", 60, 1, 2)
    await fake_stack.updater.prepare(manifest, rendezvous, 10)
    assert fake_stack.weights.name == "STAGING"
    (during,) = await fake_stack.generate("r", PROMPT)
    assert during.end.spans == (VersionSpan(0, version(1)),)
    sender = InlineTransport(fake_stack.hub, "0")

    def send() -> None:
        sender.form(60, rendezvous.members, Deadline.after(5))
        WeightSender(sender, manifest, B).send(Deadline.after(5))

    await asyncio.gather(asyncio.to_thread(send), fake_stack.updater.await_staged(version(2), 5))
    assert (await fake_stack.generate("s", PROMPT))[0].end.spans == (VersionSpan(0, version(1)),)
    await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
    assert (await fake_stack.generate("t", PROMPT))[0].end.spans == (VersionSpan(0, version(2)),)


async def test_samples_kept_through_an_update_know_which_version_made_which_token(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    call = asyncio.create_task(fake_stack.generate("r", PROMPT, [1, 2, 3], max_tokens=200, return_routes=True))
    await until_running(fake_stack, "r/2")
    await fake_stack.publish(2, B)
    await until_running(fake_stack, "r/2", 60)
    await fake_stack.publish(3, C)
    tables = {version(1): A, version(2): B, version(3): C}
    for sample in await call:
        spans = sample.end.spans
        assert [span.version for span in spans] == [version(1), version(2), version(3)]
        assert 0 < spans[1].first_token < spans[2].first_token < 200
        ids = [PROMPT[-1], *sample.token_ids]
        for index, logprob in enumerate(sample.logprobs):
            made_by = [span.version for span in spans if span.first_token <= index][-1]
            assert made_by is not None
            expected = tables[made_by]["table.weight"][ids[index]].log_softmax(0)[ids[index + 1]]
            assert logprob == pytest.approx(float(expected), abs=1e-5)
        rows = np.concatenate([segment.experts for segment in sample.end.routes])
        for segment in sample.end.routes:
            assert segment.version is not None
            consumed = (PROMPT + list(sample.token_ids))[segment.first_token :][: len(segment.experts)]
            scores = tables[segment.version]["router.weight"][:, :, consumed]
            assert np.array_equal(segment.experts, scores.topk(2, dim=1).indices.permute(2, 0, 1).numpy())
        assert len(rows) == len(PROMPT) + 200 - 1


async def test_a_sample_whose_fence_the_new_version_does_not_pass_ends_with_its_tokens(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    fence = Fence(FenceKind.EXACTLY, version(1))
    exact = asyncio.create_task(fake_stack.generate("exact", PROMPT, fence=fence, max_tokens=300))
    other = asyncio.create_task(fake_stack.generate("other", PROMPT, max_tokens=60))
    await asyncio.gather(until_running(fake_stack, "exact/0"), until_running(fake_stack, "other/0"))
    await fake_stack.publish(2, B)
    (sample,) = await asyncio.wait_for(exact, 5)
    assert sample.end.finish_reason is FinishReason.ABORT
    assert len(sample.token_ids) >= 5
    assert sample.end.spans == (VersionSpan(0, version(1)),)
    assert len((await other)[0].end.spans) == 2


@pytest.mark.parametrize(("mode", "reason"), [(PauseMode.ABORT, "abort"), (PauseMode.WAIT, "length")])
async def test_an_update_can_end_what_runs_or_wait_for_it(fake_stack: Stack, mode: PauseMode, reason: str) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    calls = [asyncio.create_task(fake_stack.generate(f"r{i}", PROMPT, max_tokens=60)) for i in range(32)]
    await until_running(fake_stack, "r31/0", 1)
    await fake_stack.publish(2, B, mode=mode)
    samples = [sample for call in calls for sample in await asyncio.wait_for(call, 2)]
    assert {sample.end.finish_reason.value for sample in samples} == {reason}
    assert {sample.end.spans for sample in samples} == {(VersionSpan(0, version(1)),)}


async def test_a_canary_that_disagrees_leaves_the_engine_dirty_and_shows_nothing_of_the_wrong_weights(
    fake_stack: Stack,
) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack)
    call = asyncio.create_task(fake_stack.generate("r", PROMPT, max_tokens=300))
    await until_running(fake_stack, "r/0")
    with pytest.raises(LoadFailed, match=r"of the canary .* allowed 0\.0001"):
        await fake_stack.publish(2, B, await canary_for(C))
    with pytest.raises(EngineFailed, match="weights are unknown"):
        await asyncio.wait_for(call, 2)
    assert fake_stack.weights.name == "DIRTY"
    with pytest.raises(Unavailable, match="DIRTY"):
        await fake_stack.generate("s", PROMPT)
    await fake_stack.publish(3, C, await canary_for(C))
    assert await greedy(fake_stack) == await greedy_of(C, fake_stack)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
async def test_a_canary_that_is_not_finite_never_passes(fake_stack: Stack, bad: float) -> None:
    canary = await canary_for(B)
    broken = [CanaryPrompt(canary[0].token_ids, [bad, *canary[0].logprobs[1:]])]
    with pytest.raises(LoadFailed, match="inf, allowed"):
        await fake_stack.publish(1, B, broken)
    assert fake_stack.weights.name == "DIRTY"


async def test_a_load_that_breaks_leaves_the_engine_dirty_until_the_next_version(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    assert isinstance(fake_stack.engine, FakeEngine)
    fake_stack.engine.fail_next_load = "parameter qkv_proj is missing 8 of 16 elements"
    with pytest.raises(LoadFailed, match="missing 8 of 16 elements"):
        await fake_stack.publish(2, B)
    assert fake_stack.weights.name == "DIRTY"
    await fake_stack.publish(2, B)
    assert await greedy(fake_stack) == await greedy_of(B, fake_stack)


async def test_staged_bytes_that_change_before_the_load_are_refused_and_the_old_version_serves(
    fake_stack: Stack,
) -> None:
    await fake_stack.publish(1, A)
    await fake_stack.stage(manifest_of(2, B), B)
    (staged,) = fake_stack.config.staging_dir.glob("vime-rollout-*/*")
    with staged.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(ManifestRefused, match=r"'table\.weight'"):
        await fake_stack.updater.commit(version(2), [], 0, PauseMode.KEEP)
    assert fake_stack.weights.name == "SERVING"
    assert await greedy(fake_stack) == await greedy_of(A, fake_stack)


async def test_a_load_that_takes_too_long_is_dirty(fake_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await fake_stack.publish(1, A)

    async def never(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(fake_stack.engine, "load_weights", never)
    monkeypatch.setattr(
        fake_stack.updater, "_config", fake_stack.config.model_copy(update={"load_timeout_seconds": 0.1})
    )
    with pytest.raises(LoadFailed, match=r"loading took longer than 0\.1 s"):
        await fake_stack.publish(2, B)
    assert fake_stack.weights.name == "DIRTY"


async def test_an_engine_that_does_not_stand_still_keeps_the_old_version(
    fake_stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fake_stack.publish(1, A)
    slow(fake_stack, 0.05)
    call = asyncio.create_task(fake_stack.generate("r", PROMPT, max_tokens=40))
    await until_running(fake_stack, "r/0", 1)
    hasty = fake_stack.config.model_copy(update={"pause_timeout_seconds": 0.1})
    monkeypatch.setattr(fake_stack.updater, "_config", hasty)
    with pytest.raises(EngineFailed, match="did not stand still for version run/1/2"):
        await fake_stack.publish(2, B, mode=PauseMode.WAIT)
    assert fake_stack.weights.name == "SERVING"
    slow(fake_stack, 0.0)
    assert (await call)[0].end.spans == (VersionSpan(0, version(1)),)


async def test_a_commit_outlives_its_caller_and_answers_a_second_one(
    fake_stack: Stack,
) -> None:
    await fake_stack.stage(manifest_of(1, A), A)
    first = asyncio.create_task(fake_stack.updater.commit(version(1), [], 0, PauseMode.KEEP))
    await asyncio.sleep(0)
    second = asyncio.create_task(fake_stack.updater.commit(version(1), [], 0, PauseMode.KEEP))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).parameters == 2
    assert fake_stack.weights.name == "SERVING"


async def test_an_aborted_update_gives_its_memory_back_and_can_be_sent_again(fake_stack: Stack) -> None:
    await fake_stack.publish(1, A)
    await fake_stack.stage(manifest_of(2, B), B)
    assert list(fake_stack.config.staging_dir.glob("vime-rollout-*/*"))
    await fake_stack.updater.abort(version(2), "test")
    assert not list(fake_stack.config.staging_dir.glob("vime-rollout-*/*"))
    assert fake_stack.weights.name == "SERVING"
    await fake_stack.updater.abort(version(2), "again")
    await fake_stack.publish(2, B)


async def test_staging_memory_is_used_again_unless_its_transfer_failed(fake_stack: Stack) -> None:
    def files() -> list[tuple[str, int]]:
        return [(p.name, p.stat().st_ino) for p in fake_stack.config.staging_dir.glob("vime-rollout-*/*")]

    await fake_stack.publish(1, A)
    (first,) = files()
    await fake_stack.publish(2, B)
    assert files() == [first]
    damaged = {**C, "table.weight": C["table.weight"] + 1}
    with pytest.raises(DigestMismatch):
        await fake_stack.stage(manifest_of(3, C), damaged)
    await fake_stack.publish(3, C)
    (second,) = files()
    assert second[0] != first[0]
    assert await greedy(fake_stack) == await greedy_of(C, fake_stack)


async def test_what_was_never_prepared_cannot_be_awaited_or_committed(fake_stack: Stack) -> None:
    for call in (
        fake_stack.updater.await_staged(version(1), 1),
        fake_stack.updater.commit(version(1), [], 0, PauseMode.KEEP),
    ):
        with pytest.raises(NotFound, match="no transfer of version run/1/1"):
            await call


async def test_too_little_room_for_staging_is_refused_with_both_numbers(
    fake_stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ResourceExhausted, match=r"has 1000 bytes free, staging needs \d+"):
        await fake_stack.publish(1, A)
    assert fake_stack.weights.name == "EMPTY"


async def test_a_version_can_be_pulled_from_a_file(fake_stack: Stack) -> None:
    from safetensors.torch import save_file

    assert fake_stack.config.payload_dir is not None
    save_file(B, fake_stack.config.payload_dir / "v1.safetensors")
    await fake_stack.updater.pull(manifest_of(1, B), "v1.safetensors", await canary_for(B), 1e-4, 10)
    assert await greedy(fake_stack) == await greedy_of(B, fake_stack)
    with pytest.raises(DigestMismatch):
        await fake_stack.updater.pull(manifest_of(2, C), "v1.safetensors", [], 0, 10)
    with pytest.raises(NotFound, match=r"no payload 'none\.safetensors'"):
        await fake_stack.updater.pull(manifest_of(3, C), "none.safetensors", [], 0, 10)
    (fake_stack.config.payload_dir / "text").write_text("cos\nsystem\n(S'touch marker'\ntR.")
    with pytest.raises(TransferFailed, match="not a safetensors file"):
        await fake_stack.updater.pull(manifest_of(4, C), "text", [], 0, 10)
    assert await greedy(fake_stack) == await greedy_of(B, fake_stack)


@pytest.mark.parametrize("key", ["../secret", "/etc/passwd", "a/../../b"])
async def test_a_payload_key_cannot_leave_its_directory(fake_stack: Stack, key: str) -> None:
    with pytest.raises(InvalidArgument, match="leaves the payload store"):
        await fake_stack.updater.pull(manifest_of(1, A), key, [], 0, 1)


async def test_staging_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / "vime-rollout-999999999"
    dead.mkdir()
    (dead / "weights-1").write_bytes(b"x")
    mine = StagingArea(tmp_path)
    assert not dead.exists()
    assert remove_stale(tmp_path) == []
    assert mine.path.is_dir()
    mine.close()
    assert not mine.path.exists()


async def test_a_closed_updater_leaves_no_files(fake_stack: Stack) -> None:
    await fake_stack.stage(manifest_of(1, A), A)
    updater: Updater = fake_stack.updater
    await updater.close()
    assert [p.name for p in fake_stack.config.staging_dir.iterdir()] == ["payloads"]
