"""Replay through the real router: same numbers in every layout, live gradients, nothing left behind."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vime_trainer.algorithms.losses import PolicyLossConfig
from vime_trainer.engine.config import EngineConfig, OptimizerConfig, TestHooks
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import RoutingTraceError
from vime_trainer.engine.model import routers
from vime_trainer.engine.objective import PolicyLoss
from vime_trainer.engine.replay import RouteRecorder
from vime_trainer.engine.sample import Sample

pytestmark = pytest.mark.engine
Maker = Callable[..., Sample]
LOSS = PolicyLoss(PolicyLossConfig(reducer="token_mean"))
LENGTHS = [(1, 2), (2, 4), (4, 5), (3, 9), (6, 2)]


def make(path: Path, **settings: object) -> Engine:
    return Engine.from_hf(path, EngineConfig(**{"optimizer": OptimizerConfig(lr=1e-2), **settings}))


def own_routes(engine: Engine, sample: Sample) -> torch.Tensor:
    """The model's own choices on the consumed tokens of one sample, as a trace."""
    ids = torch.cat([sample.prompt_token_ids, sample.response_token_ids])[None, :-1]
    recorder = RouteRecorder(engine._module)
    with recorder.session():
        engine.next_token_logits(ids, torch.tensor([ids.size(1)]))
        return recorder.routes(1)[0].to(torch.uint8)


def test_replaying_the_models_own_choices_changes_nothing(moe_dir: Path, sample_maker: Maker) -> None:
    engine = make(moe_dir)
    samples = [sample_maker(p, r) for p, r in LENGTHS]
    own = [sample_maker(p, r, routed_experts=own_routes(engine, s)) for (p, r), s in zip(LENGTHS, samples, strict=True)]
    free = engine.score(own, replay=False)
    for a, b in zip(free, engine.score(own), strict=True):
        assert (a - b).abs().max() <= 1e-6
    forced = engine.score(samples)
    assert max((a - b).abs().max() for a, b in zip(free, forced, strict=True)) > 1e-2  # other routes do matter


@pytest.mark.parametrize("shift", [1, -1])
def test_a_trace_shifted_by_one_token_is_noticed_in_the_numbers(moe_dir: Path, sample_maker: Maker, shift: int) -> None:
    engine = make(moe_dir)
    sample = sample_maker(4, 9)
    own = own_routes(engine, sample)
    free = engine.score([sample], replay=False)[0]
    shifted = engine.score([sample_maker(4, 9, routed_experts=own.roll(shift, 0))])[0]
    assert (free - shifted).abs().max() > 1e-3


@pytest.mark.parametrize("recompute", [False, True])
def test_every_layout_gives_the_same_logprobs_loss_and_gradient(
    moe_dir: Path, sample_maker: Maker, recompute: bool
) -> None:
    samples = [sample_maker(p, r, seed=i) for i, (p, r) in enumerate(LENGTHS)]
    results = []
    for budget in (1, 14, 24, 4096):  # one by one, by twos, by threes, all at once
        engine = make(moe_dir, micro_batch_tokens=budget, recompute=recompute)
        results.append(engine.train_step(samples, LOSS))
    alone = make(moe_dir)
    single = [alone.score([s])[0] for s in samples]
    for result in results:
        for a, b in zip(single, result.logprobs, strict=True):
            assert (a - b).abs().max() <= 1e-5
        assert result.loss == pytest.approx(results[0].loss, abs=1e-6)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)


def test_recompute_replays_the_same_routes_in_the_backward_pass(moe_dir: Path, sample_maker: Maker) -> None:
    samples = [sample_maker(p, r, seed=i) for i, (p, r) in enumerate(LENGTHS)]
    norms, calls, maps = [], [], []
    for recompute in (False, True):
        engine = make(moe_dir, micro_batch_tokens=24, recompute=recompute)
        seen: list[torch.Tensor] = []
        for router in routers(engine._module):
            router.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out[1].clone()))
        norms.append(engine.train_step(samples, LOSS).grad_norm)
        calls.append(len(seen))
        maps.append(seen)
    assert calls[1] == 2 * calls[0]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    # Within a micro-batch of two MoE layers: forward 0, 1, then recomputed 1, 0.
    for first in range(0, calls[1], 4):
        forward, again = maps[1][first : first + 2], maps[1][first + 2 : first + 4]
        assert all(torch.equal(a, b) for a, b in zip(forward, reversed(again), strict=True))


def test_k16_the_router_learns_from_the_lowest_scoring_experts(moe_dir: Path, sample_maker: Maker) -> None:
    engine = make(moe_dir)
    probe = sample_maker(3, 6)
    ids = torch.cat([probe.prompt_token_ids, probe.response_token_ids])[None, :-1]
    logits: list[torch.Tensor] = []
    hooks = [
        router.register_forward_pre_hook(lambda m, a, logits=logits: logits.append(a[0].flatten(0, 1) @ m.weight.t()))
        for router in routers(engine._module)
    ]
    engine.next_token_logits(ids, torch.tensor([ids.size(1)]))
    for hook in hooks:
        hook.remove()
    lowest = torch.stack([x.topk(2, largest=False).indices for x in logits], dim=1).to(torch.uint8)
    mixing: list[torch.Tensor] = []
    for router in routers(engine._module):
        router.register_forward_hook(lambda _m, _a, out: mixing.append(out[0].detach().clone()))
    before = [router.weight.detach().clone() for router in routers(engine._module)]
    result = engine.train_step([sample_maker(3, 6, routed_experts=lowest)], LOSS)
    assert torch.isfinite(torch.tensor(result.loss))
    for layer, (router, old) in enumerate(zip(routers(engine._module), before, strict=True)):
        assert router.weight.main_grad.norm() > 0
        assert not torch.equal(router.weight, old)
        chosen = mixing[layer].gather(1, lowest[:, layer].long())
        assert (chosen > 0).all()
        torch.testing.assert_close(chosen.sum(1), torch.ones(len(chosen)))


@pytest.mark.parametrize("recompute", [False, True])
def test_swapped_experts_move_the_free_forward_pass_but_never_a_replayed_one(
    moe_dir: Path, sample_maker: Maker, recompute: bool
) -> None:
    samples = [sample_maker(p, r, seed=i) for i, (p, r) in enumerate(LENGTHS)]
    plain = make(moe_dir, recompute=recompute)
    swapped = make(moe_dir, recompute=recompute, test_hooks=TestHooks(swap_kth_expert_fraction=0.5))

    def worst(replay: bool) -> float:
        pairs = zip(plain.score(samples, replay), swapped.score(samples, replay), strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)

    assert worst(replay=False) > 1e-2
    assert worst(replay=True) == 0
    a, b = plain.train_step(samples, LOSS), swapped.train_step(samples, LOSS)
    assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)


def test_nothing_stays_behind_after_an_exception(moe_dir: Path, sample_maker: Maker) -> None:
    engine = make(moe_dir)
    samples = [sample_maker(3, 6)]
    free = engine.score(samples, replay=False)[0]

    class Broken(PolicyLoss):
        def share(self, batch: object, counts: object) -> None:  # type: ignore[override]
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        engine.train_step(samples, Broken(LOSS.config))
    for router in routers(engine._module):
        assert router.router_replay.router_replay_action is None
        assert router.router_replay.target_topk_idx is None
        assert router.router_replay.replay_backward_list == []
        assert not router._forward_pre_hooks
    assert torch.equal(engine.score(samples, replay=False)[0], free)
    assert not engine.train_step(samples, LOSS).skipped


def test_a_sample_without_routes_is_refused_before_the_step(moe_dir: Path, sample_maker: Maker) -> None:
    engine = make(moe_dir)
    samples = [sample_maker(3, 6), sample_maker(3, 4, routed_experts=None, sample_index=7)]
    with pytest.raises(RoutingTraceError, match=r"g0/7.*0 of 6 routing rows"):
        engine.train_step(samples, LOSS)
    assert engine.optimizer_steps == 0


def test_routes_of_another_length_than_the_micro_batch_stop_the_router(moe_dir: Path) -> None:
    engine = make(moe_dir)
    replay = engine._forward._replay
    assert replay is not None

    def run(rows: int | None, forward: bool) -> None:
        with replay.session():
            if rows is not None:
                replay.load([torch.zeros(rows, 2, dtype=torch.int64)] * 2)
            if forward:
                engine.next_token_logits(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([4]))

    with pytest.raises(RoutingTraceError, match="sees 4 tokens but 3 rows"):
        run(3, forward=True)
    with pytest.raises(RoutingTraceError, match="no routes are loaded"):
        run(None, forward=True)
    with pytest.raises(RoutingTraceError, match="routes of 1 micro-batches were loaded, router 0 replayed 0"):
        run(3, forward=False)
