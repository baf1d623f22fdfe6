"""Generate the samples of one prompt: admission, seeds, pieces, version spans and routing traces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import xxhash

from vime_rollout.engine import (
    Engine,
    EngineEnd,
    EngineError,
    EngineOutput,
    EngineRequest,
    FinishReason,
    RequestRefused,
    Routes,
    SamplingSettings,
    ScoreAborted,
    SequenceScore,
)
from vime_rollout.requests import GenerationRequest, check_ids, check_request, check_routes
from vime_rollout.response_text import ResponseText
from vime_rollout.tokenizing import TokenizerThread
from vime_rollout.traffic import RunningSample, Traffic, VersionSpan
from vime_rollout.weights import Fence
from vime_service.bulk.manifest import VersionKey
from vime_service.errors import Aborted, EngineFailed, Internal, InvalidArgument, PromptTooLong

PIECE_TOKENS = 32
PIECE_SECONDS = 0.05


class RoutesWrong(Internal):
    """The engine returned other routing rows than the tokens ask for. Metadata: expected, actual."""

    reason = "BAD_ROUTING_TRACE"


class WeightsChanged(Aborted):
    """A weight update or a pause ended the scoring of a sequence, twice. Metadata: version."""

    reason = "TRANSFER_FAILED"


@dataclass(frozen=True, slots=True)
class RoutingSegment:
    """Routes of the tokens from `first_token` (index into prompt + response) on, all chosen by `version`.

    `experts`: `[rows, moe_layers, top_k]`. `prefilled`: the response's rows come from this engine's prefill of tokens
    that another engine had generated.
    """

    first_token: int
    experts: Routes
    version: VersionKey | None
    prefilled: bool


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """How a sample ended; `routes` are empty unless asked for, and when no token was generated."""

    finish_reason: FinishReason
    matched_stop: str
    spans: tuple[VersionSpan, ...]
    routes: tuple[RoutingSegment, ...]
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sample: ids, logprobs and versions from `first_token` (index into the response) on."""

    sample_index: int
    first_token: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    end: SampleEnd | None
    spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """One whole sample. Ids are exactly those sampled, the terminating one included."""

    sample_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    end: SampleEnd


@dataclass(slots=True)
class _Sent:
    """What has been handed out of a sample so far."""

    tokens: int = 0
    at: float = field(default_factory=time.monotonic)


class Generation:
    """Runs requests on an engine. One instance per engine, one event loop."""

    def __init__(self, engine: Engine, traffic: Traffic, tokenizing: TokenizerThread) -> None:
        self._engine = engine
        self._traffic = traffic
        self._tokenizing = tokenizing
        self._scores = 0

    async def generate(self, request: GenerationRequest, seconds: float) -> list[GeneratedSample]:
        """All samples of a request, whole, in the order of the seeds; at most `seconds` may be waited for admission.

        Raises:
            VimeError: see `requests.check_request`, `Traffic.wait_open` and `Traffic.admit`.
            EngineFailed: the engine died, or its weights turned out wrong.
        """
        pieces: list[Piece] = [piece async for piece in self._pieces(request, seconds, stream=False)]
        pieces.sort(key=lambda piece: piece.sample_index)
        return [
            GeneratedSample(p.sample_index, p.token_ids, p.logprobs, p.text, p.end) for p in pieces if p.end is not None
        ]

    def stream(self, request: GenerationRequest, seconds: float) -> AsyncGenerator[Piece, None]:
        """The samples of a request in pieces of at least 32 tokens or 50 ms; a sample's last piece has its end."""
        return self._pieces(request, seconds, stream=True)

    async def abort(self, request_id: str) -> int:
        """End a request's samples, those that still wait for a pause to end too; how many there were."""
        waiting = await self._traffic.abort_waiting(request_id)
        prefix = f"{request_id}/"
        ids = [i for i, s in self._traffic.running.items() if i.startswith(prefix) and not s.ended]
        ids = [i for i in ids if i.rpartition("/")[0] == request_id]
        for i in ids:
            self._traffic.running[i].aborted = True
        await self._engine.abort(ids)
        return waiting + len(ids)

    async def score(
        self, token_ids: Sequence[int], return_routes: bool, fence: Fence, seconds: float
    ) -> tuple[SequenceScore, VersionKey | None]:
        """Logprobs and routes of one sequence of at least two ids, and the version that scored it.

        Raises:
            VimeError: as `generate`.
            WeightsChanged: a weight update or a pause came in between, twice in a row.
        """
        description = self._engine.description
        check_ids("token_ids", token_ids, description.vocab_size)
        check_routes(return_routes, description)
        if len(token_ids) < 2:
            raise InvalidArgument(f"a sequence of {len(token_ids)} id, at least 2 are needed", field="sequences")
        if len(token_ids) > description.max_model_len:
            raise PromptTooLong(
                f"a sequence of {len(token_ids)} tokens, at most {description.max_model_len} can be scored",
                prompt_tokens=len(token_ids),
                max_model_len=description.max_model_len,
            )
        end = time.monotonic() + seconds
        for _ in range(2):
            await self._traffic.wait_open(end - time.monotonic())
            request_id = self._score_id()
            with self._traffic.admit([request_id], fence) as (sample,):
                version = sample.spans[0].version
                try:
                    score = await self.score_unfenced(request_id, token_ids, return_routes)
                except ScoreAborted:
                    continue  # by an update or a pause; if the new weights do not pass the fence, `admit` says so
                await self._traffic.deliverable(sample)
                if sample.spans == [VersionSpan(0, version)]:
                    return score, version
        raise WeightsChanged(
            f"weight updates or pauses came in between twice while a sequence was scored, the second time on {version}",
            version=version,
        )

    async def score_unfenced(self, request_id: str, token_ids: Sequence[int], return_routes: bool) -> SequenceScore:
        """As `score`, past the gate: for the canary of an update. Raises `ScoreAborted` when it is ended."""
        try:
            score = await self._engine.score(request_id, token_ids, return_routes)
        except RequestRefused as error:
            raise InvalidArgument(str(error), field="sequences") from error
        except ScoreAborted:
            raise
        except EngineError as error:
            raise EngineFailed(f"the engine failed: {error}", cause=error) from error
        if return_routes:
            self._check_routes(score.routes, len(token_ids) - 1)
        return score

    async def _pieces(self, request: GenerationRequest, seconds: float, stream: bool) -> AsyncGenerator[Piece, None]:
        sampling = check_request(request, self._engine.description)
        since = time.monotonic()
        if not await self._traffic.wait_open(seconds, request.request_id, len(request.seeds)):
            waited = time.monotonic() - since
            for index in range(len(request.seeds)):
                end = SampleEnd(FinishReason.ABORT, "", (), (), 0, waited)
                yield Piece(index, len(request.resume_token_ids), (), (), "", end)
            return
        ids = [f"{request.request_id}/{index}" for index in range(len(request.seeds))]
        ready: asyncio.Queue[Piece | None] = asyncio.Queue(maxsize=64)

        async def run(index: int, sample: RunningSample) -> None:
            async with aclosing(self._sample(request, sampling, index, sample, stream)) as pieces:
                async for piece in pieces:
                    # bounded by: the reader of the stream; when its call ends, this task is cancelled
                    await ready.put(piece)
            # bounded by: as above
            await ready.put(None)

        with self._traffic.admit(ids, request.fence, len(request.resume_token_ids)) as samples:
            tasks = [asyncio.create_task(run(i, sample)) for i, sample in enumerate(samples)]
            try:
                left = len(tasks)
                while left:
                    piece = await _next(ready, tasks)
                    if piece is None:
                        left -= 1
                    else:
                        yield piece
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(
        self,
        request: GenerationRequest,
        sampling: SamplingSettings,
        index: int,
        sample: RunningSample,
        stream: bool,
    ) -> AsyncGenerator[Piece, None]:
        started = time.monotonic()
        sent = _Sent()
        resumed = len(request.resume_token_ids)
        text: ResponseText | None = None
        if request.return_text:
            text = await self._tokenizing.run(
                ResponseText,
                self._engine.tokenizer,
                request.resume_token_ids,
                sampling.stop,
                bool(sampling.extra.get("skip_special_tokens")),
                bool(sampling.extra.get("include_stop_str_in_output")),
            )
        call = EngineRequest(
            request_id=sample.engine_request_id,
            input_ids=[*request.prompt_token_ids, *request.resume_token_ids],
            sampling=sampling,
            seed=_seed(request.seeds[index], resumed),
            resumed=resumed,
            return_routes=request.return_routes,
            stream=stream,
            trace_headers=request.trace_headers,
        )
        async for output in self._outputs(call, sample):
            count = len(output.token_ids)
            late = time.monotonic() - sent.at >= PIECE_SECONDS and count > sent.tokens
            if output.end is None and count - sent.tokens < PIECE_TOKENS and not late:
                continue
            new_text = await self._tokenizing.run(text.grow, output.token_ids, output.end) if text else ""
            end = self._end(request, sample, output, started) if output.end else None
            first, sent.tokens, sent.at = sent.tokens, count, time.monotonic()
            yield Piece(
                index,
                resumed + first,
                output.token_ids[first:count],
                output.logprobs[first:count],
                new_text,
                end,
                spans_of(sample.spans, resumed + first, resumed + count),
            )

    async def _outputs(self, call: EngineRequest, sample: RunningSample) -> AsyncGenerator[EngineOutput, None]:
        """The engine's outputs, held back while new weights are verified, its errors in the caller's words."""
        if sample.aborted:
            yield EngineOutput((), (), EngineEnd(FinishReason.ABORT, None, None, 0))
            return
        try:
            async with aclosing(self._engine.generate(call)) as outputs:
                async for output in outputs:
                    if output.end is not None:
                        sample.ended = True
                    await self._traffic.deliverable(sample)
                    sample.made_by(len(output.token_ids))
                    yield output
        except RequestRefused as error:
            raise InvalidArgument(str(error), field="sampling") from error
        except EngineError as error:
            raise EngineFailed(f"the engine failed: {error}", cause=error) from error

    def _end(
        self, request: GenerationRequest, sample: RunningSample, output: EngineOutput, started: float
    ) -> SampleEnd:
        end = output.end
        assert end is not None
        new = len(output.token_ids)
        if len(output.logprobs) != new:
            raise Internal(f"the engine returned {len(output.logprobs)} logprobs for {new} tokens")
        total = sample.resumed + new
        spans = sample.made_by(new)
        routes: tuple[RoutingSegment, ...] = ()
        if request.return_routes and new:
            prompt = len(request.prompt_token_ids)
            self._check_routes(end.routes, prompt + total - 1)
            assert end.routes is not None
            routes = cut_routes(end.routes, prompt, sample.resumed, spans)
        return SampleEnd(
            end.finish_reason, end.matched_stop or "", spans, routes, end.cached_tokens, time.monotonic() - started
        )

    def _check_routes(self, routes: Routes | None, rows: int) -> None:
        description = self._engine.description
        shape = (rows, len(description.moe_layer_ids), description.experts_per_token)
        if routes is None or routes.shape != shape or routes.dtype != description.routes_dtype:
            actual = "none" if routes is None else f"{routes.dtype} {list(routes.shape)}"
            raise RoutesWrong(
                f"routes are {actual}, expected {description.routes_dtype} {list(shape)}", expected=shape, actual=actual
            )
        if rows and int(routes.max()) >= description.num_experts:
            largest = int(routes.max())
            raise RoutesWrong(
                f"a route names expert {largest} of {description.num_experts}",
                expected=description.num_experts,
                actual=largest,
            )

    def _score_id(self) -> str:
        self._scores += 1
        return f"score-{self._scores}/0"


def spans_of(spans: Sequence[VersionSpan], first: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans of the tokens `first` to `end` (exclusive) of a response, the first of them cut to begin at `first`."""
    if first >= end:
        return ()
    inside = [span for span in spans if first < span.first_token < end]
    current = [span for span in spans if span.first_token <= first][-1:]
    return (*(VersionSpan(first, span.version) for span in current), *inside)


def cut_routes(routes: Routes, prompt: int, resumed: int, spans: Sequence[VersionSpan]) -> tuple[RoutingSegment, ...]:
    """Cut the rows of one sample into segments of one version and one source.

    Token t is consumed, and its row made, in the step that samples token t + 1. So a version that takes over at
    response token f made the rows from `prompt + f - 1` on; the first version made all before, prompt included.

    Args:
        routes: `[prompt + response - 1, moe_layers, top_k]`.
        prompt: tokens of the prompt.
        resumed: response tokens that came with the request and were prefilled here.
        spans: the versions, in order; the first covers the first new token.
    """
    cuts = {0: spans[0].version}
    cuts.update((prompt + span.first_token - 1, span.version) for span in spans[1:])
    edges = sorted(cuts)
    segments: list[RoutingSegment] = []
    for low, high in zip(edges, [*edges[1:], len(routes)], strict=True):
        parts = [(low, high, False)]
        if resumed:  # rows of the prompt and the resumed tokens come from this engine's prefill
            border = min(max(prompt + resumed, low), high)
            parts = [(low, border, True), (border, high, False)]
        segments += [RoutingSegment(a, routes[a:b], cuts[low], source) for a, b, source in parts if a < b]
    return tuple(segments)


def _seed(seed: int, resumed: int) -> int:
    """The seed of a sample; after a resume another one, or the first random numbers would be drawn twice."""
    return seed if not resumed else xxhash.xxh3_64_intdigest(f"{seed}:{resumed}".encode())


async def _next(ready: asyncio.Queue[Piece | None], tasks: list[asyncio.Task[None]]) -> Piece | None:
    """The next piece, or the error of the first task that failed."""
    # bounded by: the caller's deadline; gRPC cancels the handler, and with it this wait
    getter = asyncio.create_task(ready.get())
    try:
        while True:
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
            if getter.done():
                return getter.result()
            pending = [task for task in tasks if not task.done()]
            # bounded by: the caller's deadline, as above
            await asyncio.wait([getter, *pending], return_when=asyncio.FIRST_COMPLETED)
    finally:
        getter.cancel()
