"""From samples to right-padded micro-batches: every sample is used, whatever their number and the number of ranks.

Padding, not packing: on this engine (no TransformerEngine) packed attention would need a dense mask over the whole
pack and rotary embeddings document by document. Samples of similar length share a micro-batch, so little is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn.utils.rnn import pad_sequence

from vime_trainer.engine.replay import align
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.shape import ModelShape


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens that go through the model together. `rows` are positions in the caller's list of samples.

    The model consumes all tokens but the last one of each sample: its successor was never sampled. `response_at[b, t]`
    is the position whose logits predict response token t of row b. A micro-batch without samples holds one padding
    token, so that a rank that has run out of samples still joins every collective.
    """

    rows: list[int]
    input_ids: torch.Tensor
    """int64 [batch, width]."""
    targets: torch.Tensor
    """int64 [batch, width]: the next token of each position; 0 in the padding."""
    temperatures: torch.Tensor
    """float32 [batch]."""
    response_at: torch.Tensor
    """int64 [rows, longest response]; 0 in the padding."""
    response_lengths: list[int]
    routes: list[torch.Tensor] | None
    """One int64 [width * batch, top_k] per MoE layer in the router's token order; None: not replayed."""

    @property
    def tokens(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    def response(self, per_position: torch.Tensor) -> torch.Tensor:
        """[batch, width] values per position -> [rows, longest response], differentiable.

        Padding holds arbitrary values.
        """
        return per_position[: len(self.rows)].gather(1, self.response_at)


def plan(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Split samples into micro-batches of at most `token_budget` positions (rows x longest row), longest samples first.

    Deterministic; each index appears exactly once. A sample longer than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for index in order:
        current = batches[-1] if batches else None
        if current is not None and (len(current) + 1) * lengths[current[0]] <= token_budget:
            current.append(index)
        else:
            batches.append([index])
    if sorted(i for batch in batches for i in batch) != list(range(len(lengths))):
        raise AssertionError(f"the plan does not use each of {len(lengths)} samples once")
    return batches


def build(
    samples: Sequence[Sample], rows: list[int], shape: ModelShape, device: torch.device, replay: bool
) -> MicroBatch:
    """Assemble the micro-batch of `rows` on `device`, with their routes if `replay`."""
    chosen = [samples[i] for i in rows]
    if not chosen:
        return _empty(shape, device, replay)
    tokens = [torch.cat([s.prompt_token_ids, s.response_token_ids]).to(torch.int64) for s in chosen]
    input_ids = pad_sequence([t[:-1] for t in tokens], batch_first=True)
    response_at = pad_sequence(
        [torch.arange(s.prompt_token_ids.numel() - 1, s.consumed) for s in chosen], batch_first=True
    )
    routes = None
    if replay:
        # Sample.check_against has made sure that there is a trace.
        traces = [cast(torch.Tensor, s.routed_experts) for s in chosen]
        routes = align(traces, [s.consumed for s in chosen], input_ids.size(1), shape)
    return MicroBatch(
        rows=rows,
        input_ids=input_ids.to(device),
        targets=pad_sequence([t[1:] for t in tokens], batch_first=True).to(device),
        temperatures=torch.tensor([s.temperature for s in chosen], dtype=torch.float32, device=device),
        response_at=response_at.to(device),
        response_lengths=[s.response_token_ids.numel() for s in chosen],
        routes=None if routes is None else [r.to(device) for r in routes],
    )


def _empty(shape: ModelShape, device: torch.device, replay: bool) -> MicroBatch:
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return MicroBatch(
        rows=[],
        input_ids=token,
        targets=token,
        temperatures=torch.ones(1, device=device),
        response_at=torch.zeros(0, 1, dtype=torch.int64, device=device),
        response_lengths=[],
        routes=[r.to(device) for r in align([], [], 1, shape)] if replay else None,
    )


def response_column(values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """1-D rows of ragged length -> right-padded [rows, longest] on `device`, padding 0; [0, 1] for no rows."""
    if not values:
        return torch.zeros(0, 1, device=device)
    return pad_sequence(list(values), batch_first=True).to(device)


def rows_of(positions: Sequence[int], device: torch.device) -> torch.Tensor:
    """Positions as an index tensor, int64 on `device`."""
    return torch.tensor(positions, dtype=torch.int64, device=device)
