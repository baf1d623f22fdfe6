"""vime.rollout.v1.GenerationService over a `Core`: contract in, domain, contract out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from opentelemetry import propagate

from vime.rollout.v1 import generation_service_pb2 as pb
from vime.rollout.v1 import generation_service_pb2_grpc
from vime_rollout import convert
from vime_rollout.answer_size import check_generation_fits, check_scores_fit
from vime_rollout.core import Core
from vime_rollout.generation import RoutingSegment
from vime_service.bulk.wire import version_to_proto
from vime_service.deadlines import remaining
from vime_service.errors import InvalidArgument, NotFound, Unavailable

_RESERVE_S = 0.2


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """See the contract.

    Args:
        core: the engine.
        max_message_bytes: the largest message that the server sends.
    """

    def __init__(self, core: Core, max_message_bytes: int) -> None:
        self._core = core
        self._limit = max_message_bytes

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """See the contract."""
        core = self._ready(request.model_id)
        wanted = convert.generation_in(request, _trace_headers())
        check_generation_fits(wanted, core.engine.description, self._limit, stream=False)
        samples = await core.generation.generate(wanted, remaining(context, reserve=_RESERVE_S))
        engine = core.engine.description
        return pb.GenerateResponse(
            samples=[convert.sample_out(sample, engine) for sample in samples], engine_id=core.config.engine_id
        )

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """See the contract."""
        core = self._ready(request.generate.model_id)
        wanted = convert.generation_in(request.generate, _trace_headers())
        engine = core.engine.description
        check_generation_fits(wanted, engine, self._limit, stream=True)
        async with aclosing(core.generation.stream(wanted, remaining(context, reserve=_RESERVE_S))) as pieces:
            async for piece in pieces:
                yield pb.GenerateStreamResponse(
                    sample_index=piece.sample_index,
                    first_token=piece.first_token,
                    response_token_ids=piece.token_ids,
                    rollout_logprobs=piece.logprobs,
                    text=piece.text,
                    end=convert.end_out(piece.sample_index, piece.end, engine) if piece.end else None,
                    engine_id=core.config.engine_id,
                    version_spans=[convert.span_out(span) for span in piece.spans],
                )

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """See the contract."""
        core = self._ready(request.model_id)
        convert.refuse_adapter("Score", request.adapter_id)
        if request.HasField("temperature") and request.temperature != 1.0:
            raise InvalidArgument(
                f"temperature {request.temperature:g}: this engine scores at temperature 1", field="temperature"
            )
        if not request.sequences:
            raise InvalidArgument("sequences is empty", field="sequences")
        lengths = [len(sequence.ids) for sequence in request.sequences]
        check_scores_fit(lengths, request.return_routes, core.engine.description, self._limit)
        fence = convert.fence_in(request.fence)
        seconds = remaining(context, reserve=_RESERVE_S)
        response = pb.ScoreResponse(engine_id=core.config.engine_id)
        for sequence in request.sequences:
            score, version = await core.generation.score(list(sequence.ids), request.return_routes, fence, seconds)
            entry = response.scores.add(logprobs=score.logprobs.tolist())
            if score.routes is not None:
                segment = RoutingSegment(0, score.routes, version, False)
                entry.routed_experts.CopyFrom(convert.trace_out([segment], core.engine.description))
            if version is not None:
                entry.weight_version.CopyFrom(version_to_proto(version))
        return response

    async def Render(self, request: pb.RenderRequest, context: Any) -> pb.RenderResponse:
        """See the contract."""
        core = self._ready(request.model_id)
        if request.WhichOneof("input") is None:
            raise InvalidArgument("neither text nor chat is set", field="input")
        if request.HasField("chat"):
            rendered = await core.render_chat(*convert.chat_in(request.chat))
        else:
            rendered = await core.render_text(request.text)
        return pb.RenderResponse(prompt_token_ids=rendered.prompt_token_ids, template_digest=rendered.template_digest)

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        """See the contract."""
        core = self._ready(request.model_id)
        vocab_size = core.engine.description.vocab_size
        for sequence in request.sequences:
            if sequence.ids and max(sequence.ids) >= vocab_size:
                raise InvalidArgument(
                    f"id {max(sequence.ids)}, the vocabulary has {vocab_size}", field="sequences", vocab_size=vocab_size
                )
        texts = [await core.decode(list(s.ids), request.skip_special_tokens) for s in request.sequences]
        return pb.DecodeResponse(texts=texts)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """See the contract."""
        return pb.AbortResponse(aborted=await self._ready("").generation.abort(request.request_id))

    def _ready(self, model_id: str) -> Core:
        if not self._core.started:
            raise Unavailable("the engine is loading its model", retry_after=1.0)
        served = self._core.engine.description.model_id
        if model_id and model_id != served:
            raise NotFound(f"model {model_id!r} is not served here, {served!r} is", kind="model", name=model_id)
        return self._core


def _trace_headers() -> dict[str, str] | None:
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers or None
