"""An engine in memory that generates by a function of yours."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from vime.common.v1 import trajectory_pb2, weight_version_pb2
from vime.rollout.v1 import generation_service_pb2 as pb
from vime.rollout.v1 import generation_service_pb2_grpc
from vime_client.testing.server import refuse

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Reply:
    """One generated sample: its text (one token per character) and why it ended."""

    text: str
    finish_reason: trajectory_pb2.FinishReason.ValueType = trajectory_pb2.FINISH_REASON_STOP


Generate = Callable[[pb.GenerateRequest], Sequence[Reply] | Awaitable[Sequence[Reply]]]


def echo(request: pb.GenerateRequest) -> list[Reply]:
    """Every sample repeats the prompt, cut at max_tokens."""
    text = "".join(map(chr, request.prompt_token_ids))
    cut = text[: request.sampling.max_tokens]
    reason = trajectory_pb2.FINISH_REASON_STOP if cut == text else trajectory_pb2.FINISH_REASON_LENGTH
    return [Reply(cut, reason)] * len(request.seeds)


class FakeEngine(generation_service_pb2_grpc.GenerationServiceServicer):
    """Tokens are characters. Logprobs are -1. It says that version {run, 1, step} generated everything.

    Attributes:
        requests: the Generate requests it saw.
        cancelled: request ids whose caller went away.
    """

    def __init__(self, generate: Generate = echo, *, run_id: str = "fake", step: int = 0) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled: list[str] = []
        self.version = weight_version_pb2.WeightVersion(run_id=run_id, incarnation=1, step=step)
        self._generate = generate
        self._refusals: list[tuple[grpc.StatusCode, str]] = []

    def refuse(self, code: grpc.StatusCode, reason: str, times: int) -> None:
        """Answer the next `times` Generate calls with an error."""
        self._refusals += [(code, reason)] * times

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register at a server."""
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    async def Render(self, request: pb.RenderRequest, context: _Context) -> pb.RenderResponse:
        """One id per character; messages are joined."""
        text = request.text or "".join(message.content for message in request.chat.messages)
        return pb.RenderResponse(prompt_token_ids=list(map(ord, text)), template_digest="text")

    async def Decode(self, request: pb.DecodeRequest, context: _Context) -> pb.DecodeResponse:
        """Characters of the ids."""
        return pb.DecodeResponse(texts=["".join(map(chr, sequence.ids)) for sequence in request.sequences])

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> pb.GenerateResponse:
        """What the function says."""
        self.requests.append(request)
        if self._refusals:
            code, reason = self._refusals.pop(0)
            await refuse(context, code, "refused as asked", reason)
        try:
            answer = self._generate(request)
            # bounded by: the caller's deadline, which cancels this handler
            replies = await answer if inspect.isawaitable(answer) else answer
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        return pb.GenerateResponse(
            engine_id="fake-0", samples=[self._sample(i, reply) for i, reply in enumerate(replies)]
        )

    def _sample(self, index: int, reply: Reply) -> pb.GeneratedSample:
        return pb.GeneratedSample(
            sample_index=index,
            response_token_ids=list(map(ord, reply.text)),
            rollout_logprobs=[-1.0] * len(reply.text),
            finish_reason=reply.finish_reason,
            version_spans=[weight_version_pb2.VersionSpan(first_token=0, weight_version=self.version)],
            text=reply.text,
        )
