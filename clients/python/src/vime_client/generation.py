"""Token-in, token-out generation, by one engine or by a router: a client cannot tell."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence

from vime.common.v1 import trajectory_pb2, weight_version_pb2
from vime.rollout.v1 import generation_service_pb2 as pb
from vime.rollout.v1 import generation_service_pb2_grpc
from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import rpc_errors

CALL_SECONDS = 30.0
"""Deadline of calls that do not generate."""


class GenerationClient:
    """Thin, typed calls of vime.rollout.v1.GenerationService. Every call has a deadline and raises `RpcError`."""

    def __init__(self, address: str, settings: ChannelSettings | None = None) -> None:
        self.address = address
        self._channel = open_channel(address, settings)
        self._stub = generation_service_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> GenerationClient:
        """Use as a context manager to close the channel at the end."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel."""
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def render(self, prompt: str | trajectory_pb2.Chat, timeout_s: float = CALL_SECONDS) -> list[int]:
        """Token ids of text or of a chat, with exactly one BOS if the tokenizer has one."""
        request = pb.RenderRequest(text=prompt) if isinstance(prompt, str) else pb.RenderRequest(chat=prompt)
        with rpc_errors("rollout.Render"):
            return list((await self._stub.Render(request, timeout=timeout_s)).prompt_token_ids)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: trajectory_pb2.SamplingParams,
        seeds: Sequence[int],
        *,
        timeout_s: float,
        request_id: str = "",
        session_id: str = "",
        fence: weight_version_pb2.Fence | None = None,
        return_routes: bool = False,
        return_text: bool = True,
        allow_inexact_sampling: bool = False,
    ) -> pb.GenerateResponse:
        """One sample per seed, in their order. Cancelling the call ends the samples on the engine."""
        request = pb.GenerateRequest(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            seeds=seeds,
            fence=fence,
            return_routes=return_routes,
            return_text=return_text,
            session_id=session_id,
            allow_inexact_sampling=allow_inexact_sampling,
        )
        with rpc_errors("rollout.Generate"):
            return await self._stub.Generate(request, timeout=timeout_s)

    async def stream(self, request: pb.GenerateRequest, timeout_s: float) -> AsyncIterator[pb.GenerateStreamResponse]:
        """The pieces of a generation as they come."""
        with rpc_errors("rollout.GenerateStream"):
            async for piece in self._stub.GenerateStream(pb.GenerateStreamRequest(generate=request), timeout=timeout_s):
                yield piece

    async def score(self, request: pb.ScoreRequest, timeout_s: float) -> pb.ScoreResponse:
        """Logprobs and routes of given tokens."""
        with rpc_errors("rollout.Score"):
            return await self._stub.Score(request, timeout=timeout_s)

    async def decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Texts of token sequences."""
        request = pb.DecodeRequest(
            sequences=[trajectory_pb2.TokenIds(ids=ids) for ids in sequences], skip_special_tokens=skip_special_tokens
        )
        with rpc_errors("rollout.Decode"):
            return list((await self._stub.Decode(request, timeout=CALL_SECONDS)).texts)

    async def abort(self, request_id: str) -> int:
        """End the samples of a running Generate; how many there were."""
        with rpc_errors("rollout.Abort"):
            return (await self._stub.Abort(pb.AbortRequest(request_id=request_id), timeout=CALL_SECONDS)).aborted
