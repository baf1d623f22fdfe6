"""What the service asks of a generation engine. `engines/vllm.py` is the real one, `engines/fake.py` the one for tests.

An engine knows tokens, weights and pauses. It knows nothing of versions, fences, samples of one prompt, or the wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vime_service.bulk import Manifest

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class MemoryPart(StrEnum):
    """What of the device's memory is taken back."""

    WEIGHTS = "weights"
    KV = "kv_cache"


class PauseMode(StrEnum):
    """What happens to running requests when generation pauses."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What the engine is; constant while it lives.

    Attributes:
        model_id: name of the model.
        architecture: HF architecture name.
        dtype: element type of the model's weights, such as `bfloat16`.
        max_model_len: longest prompt + response in tokens.
        vocab_size: ids are below it.
        eos_token_ids: every id that ends a response.
        moe_layer_ids: layer numbers of the MoE layers, the second axis of routes; empty for a dense model.
        num_experts: experts per MoE layer; 0 for a dense model.
        experts_per_token: top-k; 0 for a dense model.
        returns_routes: whether `generate` and `score` can return routes.
        max_running_requests: requests that run at once.
        engine_version: name and version, such as `vllm 0.30.0`.
    """

    model_id: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    returns_routes: bool
    max_running_requests: int
    engine_version: str

    @property
    def routes_dtype(self) -> np.dtype[Any]:
        """uint8 up to 256 experts, else uint16."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 keeps all; `extra` are the engine's own options."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate.

    Attributes:
        request_id: unique among running requests.
        input_ids: everything the model reads before the first new token.
        resumed: how many of them, at the end, belong to the response; a stop string may begin there.
        sampling: how to draw; `max_tokens` is already cut to what the context has room for.
        seed: equal seeds give equal tokens from equal weights.
        return_routes: return the routes with the end.
        stream: yield as tokens come; otherwise only the end is yielded.
        trace_headers: W3C trace context to be passed on.
    """

    request_id: str
    input_ids: Sequence[int]
    sampling: SamplingSettings
    seed: int
    resumed: int = 0
    return_routes: bool = False
    stream: bool = False
    trace_headers: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """How a sample ended.

    Attributes:
        finish_reason: why.
        matched_stop: the stop string that ended it, if one did.
        routes: `[input + new - 1, moe_layers, top_k]`, row r belongs to token r; None if not asked for, or if the
            sample ended without a token.
        cached_tokens: input tokens served from the prefix cache.
    """

    finish_reason: FinishReason
    matched_stop: str | None
    routes: Routes | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """All new tokens so far, with the processed logprob of each sampled id; `end` is set on the last output."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    end: EngineEnd | None = None


@dataclass(frozen=True, slots=True)
class SequenceScore:
    """Logprobs of ids 1 and later at temperature 1 (float32, `[n - 1]`) and routes `[n - 1, moe_layers, top_k]`."""

    logprobs: npt.NDArray[np.float32]
    routes: Routes | None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is; the token counts are sums since start."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WeightLoadReport:
    """What a finished load did: parameters written (each whole and once), bytes read, seconds."""

    parameters: int
    nbytes: int
    seconds: float


class EngineError(Exception):
    """Base of an engine's own failures."""


class EngineDied(EngineError):
    """The engine is gone; only a restart of the service helps."""


class RequestRefused(EngineError):
    """The engine refuses a request's options; the request is wrong, not the engine."""


class ScoreAborted(EngineError):
    """A score was ended by `abort` or a pause: nothing is wrong with the engine or the sequence."""


class WeightsRefused(EngineError):
    """The staged weights cannot be loaded. Nothing was changed: the old weights still serve.

    Attributes:
        name: the tensor or parameter that is wrong first.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class WeightsBroken(EngineError):
    """A load failed after it had begun: the engine's weights are unknown."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def longest_token(self) -> int:
        """Characters that one id may stand for, at most."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, with exactly one BOS if the tokenizer adds one."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> list[int]:
        """Ids of a conversation, ready for the model's turn, with exactly one BOS if the tokenizer adds one.

        Raises:
            ValueError: there is no chat template, or it cannot render these messages.
        """

    def chat_template_digest(self) -> str:
        """Hex digest of the chat template; of the empty text if there is none."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids."""


class Engine(Protocol):
    """One model that generates, scores and takes new weights. Every method belongs to one event loop."""

    async def start(self) -> None:
        """Load the model; seconds to minutes. Raises `EngineError` when it cannot serve what it was configured for."""

    @property
    def description(self) -> EngineDescription:
        """What it is; valid after `start`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer; valid after `start`."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Generate one sample. Closing the iterator aborts it.

        Raises:
            RequestRefused: the options are wrong.
            EngineDied: the engine failed.
        """

    async def score(self, request_id: str, token_ids: Sequence[int], return_routes: bool) -> SequenceScore:
        """Logprobs (and routes) of given ids, at least two.

        Raises:
            ScoreAborted: `abort` or a pause ended it.
        """

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; each yields its end with `FinishReason.ABORT`. Unknown ids are no error."""

    def progress(self) -> Mapping[str, int]:
        """New tokens so far of every request whose end was not read yet, also if it has ended. Exact while paused."""

    def load_snapshot(self) -> EngineLoad:
        """How busy it is, as of its last step."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; new requests queue. Returns when nothing runs on the device. Idempotent."""

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent."""

    async def sleep(self) -> int:
        """Give device memory away while paused; the bytes freed."""

    async def wake(self, part: MemoryPart | None = None) -> None:
        """Take device memory back, one part or all; the weights are those from before `sleep`."""

    async def check_manifest(self, manifest: Manifest) -> None:
        """Check that loading exactly these tensors would write every parameter once. Touches no weight.

        Raises:
            WeightsRefused: naming tensors that are missing, not expected, misshaped or of another type.
        """

    async def load_weights(self, manifest: Manifest, path: Path) -> WeightLoadReport:
        """Load staged tensors (see `vime_service.bulk.FileStaging`) in place. Call it while paused.

        Raises:
            WeightsRefused: nothing was changed.
            WeightsBroken: the weights are unknown now.
        """

    async def drop_prefix_cache(self) -> None:
        """Forget all KV. Requests frozen by a pause compute theirs again. Raises `EngineError` if any KV is left."""

    async def check_health(self) -> None:
        """Raises `EngineDied` when the engine has failed."""

    async def stop(self) -> None:
        """End the engine and every process it started."""
