"""A rollout engine without a model: the contract of GenerationService, tokens from a formula, and faults on request.

Equal seeds give equal tokens on any engine, as the contract says, so that a test can tell a repeated or lost token.
Runs inside a test, or as a process of its own (`python fake_engine.py --engine-id … --router …`) that can be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from vime.common.v1.engine_pb2 import EngineInfo, EngineLoad, EngineState, EngineStatus
from vime.common.v1.tensor_pb2 import Dtype, TensorRef
from vime.common.v1.trajectory_pb2 import FinishReason, RoutingSegment, RoutingTrace
from vime.common.v1.weight_version_pb2 import Fence, VersionSpan, WeightVersion
from vime.rollout.v1 import generation_service_pb2 as pb
from vime.rollout.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    add_GenerationServiceServicer_to_server,
)
from vime.router.v1.router_service_pb2 import HeartbeatRequest
from vime.router.v1.router_service_pb2_grpc import RouterServiceStub
from vime_client.channel import ChannelSettings, open_channel
from vime_service.auth import Gate
from vime_service.errors import EngineFailed, FenceNotMet, InvalidArgument, Unavailable, VimeError
from vime_service.interceptors import ChassisInterceptor
from vime_service.server_config import ServerConfig

VOCAB = 1000


def token_of(seed: int, position: int) -> int:
    """The token that every fake engine samples with this seed at this position of the response."""
    return int.from_bytes(blake2b(f"{seed}:{position}".encode(), digest_size=4).digest()) % VOCAB


def tokens_of(seed: int, count: int, start: int = 0) -> list[int]:
    """`count` tokens from `start` on."""
    return [token_of(seed, position) for position in range(start, start + count)]


def logprob_of(token: int) -> float:
    """The logprob of a token, a number that float32 holds exactly."""
    return -(token % 64) / 64


def version(step: int, incarnation: int = 1, run_id: str = "run") -> WeightVersion:
    """A weight version."""
    return WeightVersion(run_id=run_id, incarnation=incarnation, step=step)


@dataclass
class Script:
    """What the engine does wrong, or slowly. May be changed while it runs.

    Attributes:
        chunk: tokens per piece of a stream.
        chunk_seconds: time each piece takes.
        silent_seconds: time before the first token.
        fail_at_token: the call fails with `fault` before this token of the response; None for never.
        faults_left: how many calls fail so; None for all.
        fault: what they fail with.
        reject: every call is the client's fault.
        routes_bytes: size of the routing trace of each sample.
    """

    chunk: int = 4
    chunk_seconds: float = 0.0
    silent_seconds: float = 0.0
    fail_at_token: int | None = None
    faults_left: int | None = None
    fault: VimeError = field(default_factory=lambda: EngineFailed("the fake engine fails as told"))
    reject: bool = False
    routes_bytes: int = 0


@dataclass
class Seen:
    """What the engine noticed."""

    requests: list[str] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    running: int = 0
    answered: int = 0
    cancelled: int = 0
    aborted: int = 0


class FakeEngine(GenerationServiceServicer):
    """One engine. `async with FakeEngine("rollout-0") as engine: await engine.beat(router_channel)`."""

    def __init__(
        self,
        engine_id: str,
        *,
        served: WeightVersion | None = None,
        script: Script | None = None,
        model_id: str = "tiny",
        updatable: bool = True,
    ) -> None:
        self.script = script or Script()
        self.seen = Seen()
        self.tells_load = True
        self.foreign_load = 0
        self.kv_cache_usage = 0.0
        self.state = EngineState.ENGINE_STATE_SERVING if served else EngineState.ENGINE_STATE_EMPTY
        self.served = served
        self.info = EngineInfo(
            engine_id=engine_id, boot_id=uuid.uuid4().hex, model_id=model_id, updatable=updatable, vocab_size=VOCAB
        )
        self._aborts: dict[str, asyncio.Event] = {}
        self._server: grpc.aio.Server | None = None

    # -------------------------------------------------------------- life

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Serve; the address with the real port."""
        interceptor = ChassisInterceptor("rollout.vime", Gate(), max_call_seconds=60.0, untraced=lambda method: False)
        self._server = grpc.aio.server(interceptors=[interceptor], options=ServerConfig().grpc_options())
        add_GenerationServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.info.address = f"{address.rpartition(':')[0]}:{port}"
        return self.info.address

    async def kill(self) -> None:
        """Stop at once, calls in flight included."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def serve_version(self, served: WeightVersion) -> None:
        """A weight update has been committed."""
        self.served = served
        self.state = EngineState.ENGINE_STATE_SERVING

    def known_at(self, address: str) -> EngineStatus:
        """What a heartbeat says of one that serves at `address`, for tests without a network."""
        self.info.address = address
        return self.status()

    # -------------------------------------------------------------- heartbeats

    def status(self) -> EngineStatus:
        """What the next heartbeat says."""
        load = EngineLoad(running=self.seen.running + self.foreign_load, kv_cache_usage=self.kv_cache_usage)
        return EngineStatus(
            info=self.info,
            state=self.state,
            weight_version=self.served,
            load=load if self.tells_load else None,
        )

    async def beat(self, router: grpc.aio.Channel) -> float:
        """Send one heartbeat; the period that the router asks for, in seconds."""
        request = HeartbeatRequest(status=self.status(), highest_seen=self.served)
        response = await RouterServiceStub(router).Heartbeat(request, timeout=2.0)
        return float(response.period.ToTimedelta().total_seconds())

    @asynccontextmanager
    async def beating(self, router: grpc.aio.Channel) -> AsyncIterator[None]:
        """Heartbeats go on inside the block."""
        await self.beat(router)
        task = asyncio.create_task(self._beat_for_ever(router))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _beat_for_ever(self, router: grpc.aio.Channel) -> None:
        period = 0.05
        while True:
            await asyncio.sleep(period)
            with suppress(grpc.aio.AioRpcError):  # a router that restarts is told again in the next period
                period = await self.beat(router)

    # -------------------------------------------------------------- the contract

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """See the contract."""
        with self._run(request.request_id, context):
            samples = []
            self._check(request)
            for index, seed in enumerate(request.seeds):
                ids: list[int] = []
                reason, served = FinishReason.FINISH_REASON_LENGTH, self.served
                async for piece, why in self._pieces(request, seed):
                    ids += piece
                    reason = why
                samples.append(self._sample(request, index, ids, reason, [(0, served)]))
            return pb.GenerateResponse(samples=samples, engine_id=self.info.engine_id)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """See the contract."""
        generate = request.generate
        with self._run(generate.request_id, context):
            self._check(generate)
            for index, seed in enumerate(generate.seeds):
                position = len(generate.resume_token_ids)
                spans: list[tuple[int, WeightVersion | None]] = []
                reason = FinishReason.FINISH_REASON_LENGTH
                async for ids, why in self._pieces(generate, seed):
                    reason = why
                    if ids and (not spans or spans[-1][1] != self.served):
                        spans.append((position, self.served))
                    yield pb.GenerateStreamResponse(
                        sample_index=index,
                        first_token=position,
                        response_token_ids=ids,
                        rollout_logprobs=[logprob_of(token) for token in ids],
                        engine_id=self.info.engine_id,
                        version_spans=[VersionSpan(first_token=position, weight_version=self.served)] if ids else [],
                    )
                    position += len(ids)
                yield pb.GenerateStreamResponse(
                    sample_index=index,
                    first_token=position,
                    end=self._sample(generate, index, [], reason, spans),
                    engine_id=self.info.engine_id,
                )

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """See the contract."""
        with self._run(request.request_id, context):
            self._check_fence(request.fence)
            await asyncio.sleep(self.script.silent_seconds)
            scores = [
                pb.SequenceScore(logprobs=[logprob_of(i) for i in sequence.ids[1:]], weight_version=self.served)
                for sequence in request.sequences
            ]
            return pb.ScoreResponse(scores=scores, engine_id=self.info.engine_id)

    async def Render(self, request: pb.RenderRequest, context: Any) -> pb.RenderResponse:
        """See the contract: one id per character."""
        return pb.RenderResponse(prompt_token_ids=[ord(char) % VOCAB for char in request.text], template_digest="text")

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        """See the contract."""
        return pb.DecodeResponse(texts=["".join(chr(i) for i in sequence.ids) for sequence in request.sequences])

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """See the contract."""
        event = self._aborts.get(request.request_id)
        if event is None:
            return pb.AbortResponse()
        event.set()
        self.seen.aborted += 1
        return pb.AbortResponse(aborted=1)

    # -------------------------------------------------------------- inside

    @contextmanager
    def _run(self, request_id: str, context: Any) -> Iterator[None]:
        self.seen.requests.append(request_id)
        self.seen.deadlines.append(context.time_remaining())
        self.seen.traceparents += [value for key, value in context.invocation_metadata() if key == "traceparent"]
        self.seen.running += 1
        self._aborts[request_id] = asyncio.Event()
        try:
            yield
            self.seen.answered += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.seen.cancelled += 1
            raise
        finally:
            self.seen.running -= 1
            del self._aborts[request_id]

    def _check(self, request: pb.GenerateRequest) -> None:
        if self.script.reject:
            raise InvalidArgument("the fake engine rejects as told", field="prompt_token_ids")
        self._check_fence(request.fence)

    def _check_fence(self, fence: Fence) -> None:
        if self.state != EngineState.ENGINE_STATE_SERVING:
            raise Unavailable("no weights are served")
        kind = fence.WhichOneof("kind") or "any"
        if kind != "any" and self.served is None:
            raise FenceNotMet("these weights were never published", fence=kind)
        wanted = fence.exactly if kind == "exactly" else fence.at_least
        if kind == "any" or self.served is None:
            return
        short = self.served.incarnation < wanted.incarnation or self.served.step < wanted.step
        if short or (kind == "exactly" and self.served != wanted):
            raise FenceNotMet("the weights do not pass", fence=kind, serving=self.served.step)

    async def _pieces(
        self, request: pb.GenerateRequest, seed: int
    ) -> AsyncIterator[tuple[list[int], FinishReason.ValueType]]:
        """Chunks of one sample and why it ended, if that was the last."""
        script, aborted = self.script, self._aborts[request.request_id]
        if script.silent_seconds:
            await _wait(aborted, script.silent_seconds)
        position, end = len(request.resume_token_ids), request.sampling.max_tokens
        while position < end:
            count = min(script.chunk, end - position)
            self._fail_if_told(position + count)
            if script.chunk_seconds:
                await _wait(aborted, script.chunk_seconds)
            if aborted.is_set():
                yield [], FinishReason.FINISH_REASON_ABORT
                return
            yield tokens_of(seed, count, position), FinishReason.FINISH_REASON_LENGTH
            position += count

    def _fail_if_told(self, reached: int) -> None:
        script = self.script
        if script.fail_at_token is None or reached <= script.fail_at_token or script.faults_left == 0:
            return
        if script.faults_left is not None:
            script.faults_left -= 1
        raise script.fault

    def _sample(
        self,
        request: pb.GenerateRequest,
        index: int,
        ids: list[int],
        reason: FinishReason.ValueType,
        spans: list[tuple[int, WeightVersion | None]],
    ) -> pb.GeneratedSample:
        routes = None
        if request.return_routes and self.script.routes_bytes:
            segment = RoutingSegment(
                rows=self.script.routes_bytes // 2,
                weight_version=self.served,
                experts=TensorRef(dtype=Dtype.DTYPE_UINT16, inline=bytes(self.script.routes_bytes)),
            )
            routes = RoutingTrace(segments=[segment])
        return pb.GeneratedSample(
            sample_index=index,
            response_token_ids=ids,
            rollout_logprobs=[logprob_of(token) for token in ids],
            finish_reason=reason,
            version_spans=[VersionSpan(first_token=first, weight_version=v) for first, v in spans],
            routed_experts=routes,
            generation_time=Duration(nanos=1),
        )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def main() -> None:
    """A process that serves version `--step` and beats until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--router", required=True)
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=4)
    parser.add_argument("--chunk-seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    script = Script(chunk=arguments.chunk, chunk_seconds=arguments.chunk_seconds)
    engine = FakeEngine(arguments.engine_id, served=version(arguments.step), script=script)
    address = await engine.start(arguments.address)
    async with open_channel(arguments.router, ChannelSettings(max_attempts=1)) as router:
        print(address, flush=True)
        while True:  # ends with the process
            period = 0.2
            with suppress(grpc.aio.AioRpcError):
                period = await engine.beat(router)
            await asyncio.sleep(period)


if __name__ == "__main__":
    asyncio.run(main())
