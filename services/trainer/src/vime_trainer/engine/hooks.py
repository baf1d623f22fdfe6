"""Deliberate faults for tests. Nothing here runs unless a setting asks for it."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import nn

from vime_trainer.engine.model import routers


class SwapKthExpert(RouterReplay):  # type: ignore[misc]
    """A router's replay object that exchanges the k-th for the (k+1)-th expert of some tokens in the router's OWN
    top-k.

    Models what another kernel, type or layout does to near ties, only more. Replayed routes pass untouched: with
    replay on, a run with this hook must give the same numbers as one without. The choice of tokens depends on their
    number and the seed alone, so that a recomputed layer swaps the same ones.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        super().__init__()
        self._fraction = fraction
        self._seed = seed

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [tokens, experts] -> the chosen scores and expert ids, both [tokens, topk]."""
        replaying = self.router_replay_action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD)
        if replaying or topk >= scores.size(1):
            result: tuple[torch.Tensor, torch.Tensor] = super().get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
            return result
        _, ids = torch.topk(scores, topk + 1, dim=1)
        draw = torch.rand(scores.size(0), generator=torch.Generator().manual_seed(self._seed)).to(scores.device)
        last = torch.where(draw < self._fraction, ids[:, topk], ids[:, topk - 1])
        chosen = torch.cat([ids[:, : topk - 1], last[:, None]], dim=1)
        if self.router_replay_action == RouterReplayAction.RECORD:
            self.record_indices(chosen)
        return scores.gather(1, chosen), chosen


def install_swap(model: nn.Module, fraction: float, seed: int) -> None:
    """Give every router of `model` a SwapKthExpert. Call it before a RoutingReplay is made."""
    for number, router in enumerate(routers(model)):
        replay: Any = SwapKthExpert(fraction, seed + number)
        router.router_replay = replay
