"""R3: train on the expert choices that the rollout engine made (routing replay).

Source of the idea: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv
2510.11370). Only the choice is replayed. Megatron gathers the router's *live* logits at the replayed experts, so the
mixing weights and the router's gradient stay those of the current weights.

A trace row belongs to one consumed token. The router sees the tokens of a micro-batch [batch, length] sequence-first,
so rows are brought into the order [length, batch] before they are flattened; padding is routed to a sentinel that is
spread over all experts, never to expert 0, and does not count.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import nn

from vime_trainer.engine.errors import RoutingTraceError
from vime_trainer.engine.model import routers
from vime_trainer.engine.shape import ModelShape


def check_trace(name: str, trace: torch.Tensor, rows: int, shape: ModelShape) -> None:
    """Raise RoutingTraceError unless `trace` is [rows, moe_layers, top_k] of distinct expert ids in range."""
    wanted = (rows, len(shape.moe_layers), shape.top_k)
    if tuple(trace.shape) != wanted:
        raise RoutingTraceError(
            f"{name}: routing trace is {tuple(trace.shape)}, expected {wanted} (rows, MoE layers, top-k); "
            f"the model's MoE layers are {shape.moe_layers}"
        )
    if trace.dtype not in (torch.uint8, torch.uint16):
        raise RoutingTraceError(f"{name}: routing trace is {trace.dtype}, expected uint8 or uint16")
    ids = trace.to(torch.int64)
    high = int(ids.max())
    if high >= shape.num_experts:
        row, layer, _ = (int(i) for i in (ids == high).nonzero()[0])
        raise RoutingTraceError(
            f"{name}: expert {high} at row {row}, MoE layer {layer}; the model has {shape.num_experts} experts"
        )
    ordered = ids.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    if bool(twice.any()):
        row, layer = (int(i) for i in twice.nonzero()[0])
        raise RoutingTraceError(
            f"{name}: experts {ids[row, layer].tolist()} at row {row}, MoE layer {layer} repeat within the top-k"
        )


def sentinel(rows: int, shape: ModelShape) -> torch.Tensor:
    """int64 [rows, top_k]: routes of tokens that carry no loss, spread evenly over the experts, distinct within a
    row."""
    first = torch.arange(rows)[:, None] * shape.top_k
    return (first + torch.arange(shape.top_k)) % shape.num_experts


def align(traces: Sequence[torch.Tensor], lengths: Sequence[int], width: int, shape: ModelShape) -> list[torch.Tensor]:
    """Traces of the rows of a right-padded micro-batch -> one int64 [width * batch, top_k] per MoE layer, in router
    order.

    `lengths` are the consumed tokens of each row; each trace must have exactly as many rows. The result's row s *
    batch + b is position s of row b: Megatron's hidden states are [length, batch, hidden].
    """
    batch = max(1, len(traces))  # a micro-batch without samples holds one row of padding
    rows = sentinel(width * batch, shape).view(width, batch, 1, shape.top_k).repeat(1, 1, len(shape.moe_layers), 1)
    for b, (trace, length) in enumerate(zip(traces, lengths, strict=True)):
        check_trace(f"row {b} of the micro-batch", trace, length, shape)
        rows[:length, b] = trace.to(torch.int64)
    return [rows[:, :, i].reshape(width * batch, shape.top_k) for i in range(len(shape.moe_layers))]


def tokens_per_expert(traces: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """int64 [moe_layers, experts]: how many real tokens go to each expert.

    Padding is not in a trace, so it cannot count.
    """
    counts = torch.zeros(len(shape.moe_layers), shape.num_experts, dtype=torch.int64)
    for trace in traces:
        ids = trace.to(torch.int64).transpose(0, 1).reshape(len(shape.moe_layers), -1)
        counts.scatter_add_(1, ids, torch.ones_like(ids))
    return counts


class RoutingReplay:
    """Replays traces through the routers of one model. Off unless inside of `session()`."""

    def __init__(self, model: nn.Module, shape: ModelShape, recompute: bool) -> None:
        self._routers = routers(model)
        self._shape = shape
        self._recompute = recompute
        self._loaded = 0
        self._calls = [0] * len(self._routers)
        self._active = False

    def load(self, per_layer: Sequence[torch.Tensor]) -> None:
        """Give the next micro-batch's routes (from `align`) to the routers. Only inside of a session."""
        if not self._active:
            raise RoutingTraceError("routes were loaded outside of a replay session")
        if len(per_layer) != len(self._routers):
            raise RoutingTraceError(f"{len(per_layer)} layers of routes for {len(self._routers)} routers")
        for router, rows in zip(self._routers, per_layer, strict=True):
            router.router_replay.set_target_indices(rows)
        self._loaded += 1

    @contextmanager
    def session(self) -> Iterator["RoutingReplay"]:
        """Replay inside of the block.

        Nothing stays behind, whatever happens in it; a clean exit checks that all was used.
        """
        if self._active:
            raise RoutingTraceError("a replay session is open already")
        self._active, self._loaded, self._calls = True, 0, [0] * len(self._routers)
        hooks = [r.register_forward_pre_hook(self._hook(i)) for i, r in enumerate(self._routers)]
        try:
            yield self
            self._check_all_used()
        finally:
            for hook in hooks:
                hook.remove()
            for router in self._routers:
                router.router_replay.clear_router_replay_action()
                router.router_replay.clear_indices()
            self._active = False

    def _hook(self, index: int) -> Any:
        # Per router and call, not one global action: forward and backward passes of micro-batches may interleave. The
        # first pass of a recomputed layer runs without gradients; the second one takes the oldest routes not yet
        # recomputed.
        def before(router: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            replay: Any = router.router_replay
            recomputing = self._recompute and router.training and torch.is_grad_enabled()
            target = (
                replay.replay_backward_list[0]
                if recomputing and replay.replay_backward_list
                else replay.target_topk_idx
            )
            if target is None:
                raise RoutingTraceError(f"router {index} runs inside of a replay session, but no routes are loaded")
            tokens = args[0].shape[:-1].numel()
            if target.size(0) != tokens:
                raise RoutingTraceError(
                    f"router {index} sees {tokens} tokens but {target.size(0)} rows of routes are loaded"
                )
            action = RouterReplayAction.REPLAY_BACKWARD if recomputing else RouterReplayAction.REPLAY_FORWARD
            replay.set_router_replay_action(action)
            self._calls[index] += 0 if recomputing else 1

        return before

    def _check_all_used(self) -> None:
        for index, calls in enumerate(self._calls):
            if calls != self._loaded:
                raise RoutingTraceError(
                    f"routes of {self._loaded} micro-batches were loaded, router {index} replayed {calls}"
                )


class RouteRecorder:
    """Records the model's own choices, e.g. to serve as a trace of itself in checks."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers(model)

    @contextmanager
    def session(self) -> Iterator["RouteRecorder"]:
        """Record inside of the block."""
        try:
            for router in self._routers:
                router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
            yield self
        finally:
            for router in self._routers:
                router.router_replay.clear_router_replay_action()
                router.router_replay.clear_indices()

    def routes(self, batch: int) -> torch.Tensor:
        """int64 [batch, length, moe_layers, top_k] of the last forward pass."""
        layers = [r.router_replay.get_recorded_indices() for r in self._routers]
        return torch.stack([t.view(-1, batch, t.size(-1)).transpose(0, 1) for t in layers], dim=2)
