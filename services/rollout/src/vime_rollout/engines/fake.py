"""A deterministic engine with a table for a model: real logprobs, real routes, real weights, no vLLM.

The model has two tensors, under the names that a manifest must use. The next token after t is drawn from
softmax(`table.weight`[t] / temperature); its experts are the top-k of `router.weight`[layer, :, t]. It makes the same
promises as the real engine, and passes the same tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from vime_rollout.engine import (
    EngineDescription,
    EngineDied,
    EngineEnd,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    FinishReason,
    MemoryPart,
    PauseMode,
    RequestRefused,
    Routes,
    ScoreAborted,
    SequenceScore,
    Tokenizer,
    WeightLoadReport,
    WeightsBroken,
    WeightsRefused,
)
from vime_rollout.sampling_options import OPTIONS
from vime_service.bulk import BulkError, Manifest
from vime_service.bulk.buckets import unpack, verify
from vime_service.bulk.staging import map_file

_BYTES = 256
EOS, END_OF_TURN, BOS = 256, 257, 258
VOCAB = 260


class ByteTokenizer:
    """One id per UTF-8 byte, and a few special ids above."""

    longest_token = 1
    special: ClassVar[dict[int, str]] = {EOS: "<|eos|>", END_OF_TURN: "<|end|>", BOS: "<|bos|>", 259: "<|unused|>"}

    def encode_text(self, text: str) -> list[int]:
        """See `Tokenizer.encode_text`."""
        return [BOS, *text.encode()]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> list[int]:
        """See `Tokenizer.encode_chat`."""
        ids = [BOS]
        if tools:
            ids += [*json.dumps(tools).encode(), END_OF_TURN]
        for message in messages:
            ids += [*f"{message['role']}:{message['content']}".encode(), END_OF_TURN]
        return [*ids, *b"assistant:"]

    def chat_template_digest(self) -> str:
        """See `Tokenizer.chat_template_digest`."""
        return xxhash.xxh3_128_hexdigest(b"role:content<|end|>")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """See `Tokenizer.decode`."""
        out, run = [], bytearray()
        for token in token_ids:
            if token < _BYTES:
                run.append(token)
                continue
            out.append(run.decode(errors="replace"))
            run = bytearray()
            if not skip_special_tokens:
                out.append(self.special[token])
        return "".join([*out, run.decode(errors="replace")])


@dataclass(slots=True)
class _Run:
    """One request: its tokens so far, whether somebody ended it, and what its reader has not taken yet.

    It runs whether or not it is read. A reader that comes late gets all at once, as from the real engine.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[npt.NDArray[Any]] = field(default_factory=list)
    aborted: bool = False
    ended: bool = False
    unread: EngineOutput | Exception | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, what: EngineOutput | Exception) -> None:
        """Put before the reader; it holds all that was told before."""
        self.unread = what
        self.news.set()


class FakeEngine:
    """See `vime_rollout.engine.Engine`.

    Args:
        layers, experts, top_k: shape of the router; 0 layers is a dense model.
        step_seconds: time one token takes.
        max_model_len: length of the context.
        seed: makes the initial weights.
    """

    def __init__(
        self,
        layers: int = 2,
        experts: int = 8,
        top_k: int = 2,
        step_seconds: float = 0.0,
        max_model_len: int = 512,
        seed: int = 0,
        model_id: str = "fake",
    ) -> None:
        self.step_seconds = step_seconds
        self.weights = make_weights(seed, layers, experts)
        self.fail_next_load = ""
        self._top_k = top_k if layers else 0
        self._paused: PauseMode | None = None
        self._changed = asyncio.Condition()
        self._runs: dict[str, _Run] = {}
        self._waiting = 0
        self._generated = 0
        self._prompted = 0
        self._dead = ""
        self._cache: list[list[int]] = []
        self._cached = 0
        self.description = EngineDescription(
            model_id=model_id,
            architecture="FakeForCausalLM",
            dtype="float32",
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=(EOS, END_OF_TURN),
            moe_layer_ids=tuple(range(1, layers + 1)),
            num_experts=experts if layers else 0,
            experts_per_token=self._top_k,
            returns_routes=bool(layers),
            max_running_requests=64,
            engine_version="fake 1",
        )
        self.tokenizer: Tokenizer = ByteTokenizer()

    async def start(self) -> None:
        """See `Engine.start`."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See `Engine.generate`."""
        unknown = sorted(request.sampling.extra.keys() - OPTIONS.keys())
        if unknown:
            raise RequestRefused(f"unknown sampling option {unknown[0]!r}")
        run = self._runs[request.request_id] = _Run()
        producing = asyncio.create_task(self._produce(request, run))
        try:
            while True:
                # bounded by: the caller, as every generation; the producer ends in an end or a failure
                await run.news.wait()
                run.news.clear()
                output = run.unread
                assert output is not None
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.end is not None:
                    return
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)
            await self._leave(request.request_id)

    async def _produce(self, request: EngineRequest, run: _Run) -> None:
        random = np.random.Generator(np.random.Philox(key=request.seed))
        cached = self._lookup(request.input_ids)
        self._prompted += len(request.input_ids)
        self._cached += cached
        end: EngineEnd | None = None
        try:
            while end is None:
                if await self._step(run):
                    self._sample(request, run, random)
                    end = self._finished(request, run, cached)
                else:
                    end = self._end(request, run, FinishReason.ABORT, None, cached)
                if end is not None or request.stream:
                    run.tell(EngineOutput(list(run.tokens), list(run.logprobs), end))
        except Exception as error:  # noqa: BLE001  its reader raises it
            run.tell(error)
        run.ended = True
        async with self._changed:
            self._changed.notify_all()

    async def score(self, request_id: str, token_ids: Sequence[int], return_routes: bool) -> SequenceScore:
        """See `Engine.score`."""
        run = self._runs[request_id] = _Run()
        try:
            if not await self._step(run):
                raise ScoreAborted(f"{request_id}: scoring was aborted")
            rows = [self._logprobs(token, 1.0)[after] for token, after in pairwise(token_ids)]
            routes = self._routes(token_ids[:-1]) if return_routes else None
            return SequenceScore(np.asarray(rows, dtype=np.float32), routes)
        finally:
            await self._leave(request_id)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort`."""
        async with self._changed:
            for request_id in request_ids:
                if request_id in self._runs:
                    self._runs[request_id].aborted = True
            self._changed.notify_all()

    def progress(self) -> Mapping[str, int]:
        """See `Engine.progress`."""
        return {request_id: len(run.tokens) for request_id, run in self._runs.items()}

    def load_snapshot(self) -> EngineLoad:
        """See `Engine.load_snapshot`."""
        running = sum(not run.ended for run in self._runs.values()) - self._waiting
        usage = min(1.0, running / self.description.max_running_requests)
        return EngineLoad(running, self._waiting, usage, self._generated, self._prompted, self._cached)

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        async with self._changed:
            self._paused = mode
            if mode is PauseMode.WAIT:
                held = [run for run in self._runs.values() if run.tokens and not run.ended]
                # bounded by: the caller; whoever pauses has a deadline
                await self._changed.wait_for(lambda: all(run.ended or run not in self._runs.values() for run in held))
        if mode is PauseMode.ABORT:
            await self.abort(list(self._runs))
        await asyncio.sleep(0)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        async with self._changed:
            self._paused = None
            self._changed.notify_all()

    async def sleep(self) -> int:
        """See `Engine.sleep`."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.weights.values())

    async def wake(self, part: MemoryPart | None = None) -> None:
        """See `Engine.wake`."""

    async def check_manifest(self, manifest: Manifest) -> None:
        """See `Engine.check_manifest`."""
        self._alive()
        diff = manifest.compare({name: ("float32", tuple(t.shape)) for name, t in self.weights.items()})
        if diff:
            names = [*diff.missing, *diff.extra, *(m[0] for m in diff.misshaped), *(m[0] for m in diff.wrong_dtype)]
            raise WeightsRefused(diff.describe(), names[0])

    async def load_weights(self, manifest: Manifest, path: Path) -> WeightLoadReport:
        """See `Engine.load_weights`."""
        await self.check_manifest(manifest)
        staged = map_file(path, manifest.plan.total_bytes)
        try:
            verify(manifest, staged)
        except BulkError as error:
            raise WeightsRefused(str(error)) from error
        if self.fail_next_load:
            reason, self.fail_next_load = self.fail_next_load, ""
            raise WeightsBroken(reason)
        for name, tensor in unpack(manifest, staged).items():
            self.weights[name] = tensor.clone()
        return WeightLoadReport(len(self.weights), manifest.plan.total_bytes, 0.0)

    async def drop_prefix_cache(self) -> None:
        """See `Engine.drop_prefix_cache`."""
        self._alive()
        self._cache.clear()

    async def check_health(self) -> None:
        """See `Engine.check_health`."""
        self._alive()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self.abort(list(self._runs))

    async def die(self, reason: str) -> None:
        """Behave as an engine whose process was killed."""
        async with self._changed:
            self._dead = reason
            self._changed.notify_all()

    # ---------------------------------------------------------------- the model

    async def _step(self, run: _Run) -> bool:
        """One step's time, and the time paused; False when the request was ended meanwhile."""

        def may_run() -> bool:
            frozen = self._paused is not None and not (self._paused is PauseMode.WAIT and run.tokens)
            return bool(self._dead) or run.aborted or not frozen

        while True:
            if not may_run():
                self._waiting += 1
                try:
                    async with self._changed:
                        # bounded by: the pause, which its owner or its expiry ends
                        await self._changed.wait_for(may_run)
                finally:
                    self._waiting -= 1
            await asyncio.sleep(self.step_seconds)
            self._alive()
            if run.aborted:
                return False
            if may_run():  # a pause that came during the step undoes it
                return True

    async def _leave(self, request_id: str) -> None:
        del self._runs[request_id]
        async with self._changed:
            self._changed.notify_all()

    def _alive(self) -> None:
        if self._dead:
            raise EngineDied(self._dead)

    def _logprobs(self, token: int, temperature: float) -> npt.NDArray[np.float64]:
        logits = self.weights["table.weight"][token].numpy().astype(np.float64) / (temperature or 1.0)
        shifted: npt.NDArray[np.float64] = logits - logits.max()
        normalised: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
        return normalised

    def _sample(self, request: EngineRequest, run: _Run, random: np.random.Generator) -> None:
        last = run.tokens[-1] if run.tokens else request.input_ids[-1]
        logprobs = self._logprobs(last, request.sampling.temperature)
        if request.sampling.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = min(int(np.searchsorted(np.exp(logprobs).cumsum(), random.random())), VOCAB - 1)
        if self.description.returns_routes:
            run.routes.append(self._routes([last] if run.tokens else request.input_ids))
        run.tokens.append(token)
        run.logprobs.append(float(np.float32(logprobs[token])))
        self._generated += 1

    def _routes(self, token_ids: Sequence[int]) -> Routes:
        scores = self.weights["router.weight"][:, :, list(token_ids)]
        top = scores.topk(self._top_k, dim=1).indices.permute(2, 0, 1)
        routes: Routes = top.numpy().astype(self.description.routes_dtype)
        return routes

    def _finished(self, request: EngineRequest, run: _Run, cached: int) -> EngineEnd | None:
        sampling, token = request.sampling, run.tokens[-1]
        eos = () if sampling.ignore_eos else self.description.eos_token_ids
        if token in eos or token in sampling.stop_token_ids:
            return self._end(request, run, FinishReason.STOP, None, cached)
        resumed = request.input_ids[len(request.input_ids) - request.resumed :]
        text = self.tokenizer.decode([*resumed, *run.tokens]) if sampling.stop else ""
        matched = next((stop for stop in sampling.stop if stop in text), None)
        if matched is not None:
            return self._end(request, run, FinishReason.STOP, matched, cached)
        if len(run.tokens) >= sampling.max_tokens:
            return self._end(request, run, FinishReason.LENGTH, None, cached)
        return None

    def _end(
        self, request: EngineRequest, run: _Run, reason: FinishReason, matched: str | None, cached: int
    ) -> EngineEnd:
        self._cache.append([*request.input_ids, *run.tokens[:-1]])
        routes: Routes | None = np.concatenate(run.routes) if request.return_routes and run.routes else None
        return EngineEnd(reason, matched, routes, cached)

    def _lookup(self, ids: Sequence[int]) -> int:
        """Tokens of the longest prefix seen before, in blocks of 16; never the whole input."""
        best = 0
        for seen in self._cache:
            same = 0
            for ours, theirs in zip(ids[:-1], seen, strict=False):
                if ours != theirs:
                    break
                same += 1
            best = max(best, same)
        return best // 16 * 16


def make_weights(seed: int, layers: int = 2, experts: int = 8) -> dict[str, torch.Tensor]:
    """Random weights of the fake model: `table.weight` `[vocab, vocab]`, `router.weight` `[layers, experts, vocab]`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"table.weight": torch.randn(VOCAB, VOCAB, generator=generator) * 2}
    if layers:
        weights["router.weight"] = torch.randn(layers, experts, VOCAB, generator=generator)
    return weights
