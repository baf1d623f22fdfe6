"""The sending end of a weight update, on rank 0."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vime.bulk.v1.manifest_pb2 import CanaryPrompt
from vime_service.bulk import Deadline, Manifest, TransferStats, VersionKey, WeightSender
from vime_service.bulk.gloo import GlooTransport
from vime_service.bulk.transport import member_names
from vime_service.bulk.wire import dtype_to_proto
from vime_trainer.engine.sample import Sample

if TYPE_CHECKING:
    from vime_trainer.engine.engine import Engine

_STORE_S = 20.0
CANARY_TOKENS = 48


@dataclass
class Held:
    """Weights that were described and are ready to be sent."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]


class Sender:
    """Describes the weights that the engine holds and sends them. One store serves all generations of the process."""

    def __init__(self, engine: Engine, host: str) -> None:
        self._engine, self._host = engine, host
        self._held: Held | None = None
        self._transport: GlooTransport | None = None

    @property
    def store_address(self) -> str:
        """`host:port` of the store; opened when first asked for."""
        if self._transport is None:
            self._transport = GlooTransport.host("0", self._host, Deadline.after(_STORE_S))
        return self._transport.endpoint

    def describe(self, version: VersionKey) -> Manifest:
        """Snapshot and hash the weights. Asked again for the same version, nothing is hashed twice."""
        if self._held is None or self._held.manifest.version != version:
            # A copy: the next training step changes the engine's own while a late engine may still be catching up.
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._engine.export()}
            self._held = Held(Manifest.of(version, tensors.items()), tensors)
        return self._held.manifest

    def send(self, version: VersionKey, generation: int, world_size: int, timeout_s: float) -> TransferStats:
        """Form the group of `generation` and broadcast. Raises TransportError."""
        if self._held is None or self._held.manifest.version != version:
            held = None if self._held is None else self._held.manifest.version
            raise RuntimeError(f"version {version} was not described; held is {held}")
        assert self._transport is not None, "describe hands out the store's address before anything is sent"
        deadline = Deadline.after(timeout_s)
        started = time.monotonic()
        self._transport.form(generation, member_names(world_size), deadline)
        stats = WeightSender(self._transport, self._held.manifest, self._held.tensors).send(deadline)
        return TransferStats(stats.nbytes, time.monotonic() - started, stats.buckets)

    def close(self) -> None:
        """Close the store."""
        if self._transport is not None:
            self._transport.close()


def canary(engine: Engine, count: int) -> list[CanaryPrompt]:
    """Fixed prompts with the logprobs of the weights held: the same ids in every run of a model. Collective: every rank
    scores all of them, since there are few."""
    vocab = engine.model_shape.vocab_size
    length = min(CANARY_TOKENS, engine.model_shape.max_position_embeddings - 1)
    generator = torch.Generator().manual_seed(0x71BE)
    prompts = [torch.randint(0, vocab, (length,), generator=generator) for _ in range(count)]
    scored = engine.score([_prompt(i, ids) for i, ids in enumerate(prompts)], replay=False)
    dtype = dtype_to_proto(engine.dtype)
    return [
        CanaryPrompt(token_ids=ids.tolist(), logprobs=logprobs.tolist(), dtype=dtype)
        for ids, logprobs in zip(prompts, scored, strict=True)
    ]


def reachable_host() -> str:
    """The address under which engines reach this rank: loopback unless MASTER_ADDR says otherwise."""
    import os

    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return "127.0.0.1" if address in ("localhost", "127.0.0.1") else socket.gethostbyname(socket.gethostname())


def _prompt(index: int, ids: torch.Tensor) -> Sample:
    response = ids.numel() - 1
    return Sample(
        prompt_token_ids=ids[:1],
        response_token_ids=ids[1:],
        rollout_logprobs=torch.zeros(response),
        loss_mask=torch.ones(response, dtype=torch.bool),
        advantages=torch.zeros(response),
        group_id="canary",
        sample_index=index,
    )
