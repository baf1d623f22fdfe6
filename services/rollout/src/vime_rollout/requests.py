"""What a generation request must be, checked before anything runs: every refusal names the field and the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vime_rollout.engine import EngineDescription, SamplingSettings
from vime_rollout.sampling_options import OPTIONS, Bounds, read_options
from vime_rollout.weights import ANY_WEIGHTS, Fence
from vime_service.errors import BadRoutingTrace, InexactSampling, InvalidArgument, PromptTooLong

MAX_SAMPLES = 1024
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """All samples of one prompt.

    Attributes:
        request_id: client-made, unique among running requests.
        prompt_token_ids: the prompt, used as it is.
        sampling: how to draw.
        seeds: one per sample.
        fence: the weights it may run on.
        return_routes: return routing traces.
        return_text: return the response as text beside the ids.
        resume_token_ids: response tokens generated before, on another engine; only with one seed.
        require_exact_logprobs: refuse settings whose logprobs the trainer cannot reproduce.
        trace_headers: W3C trace context.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingSettings
    seeds: Sequence[int]
    fence: Fence = ANY_WEIGHTS
    return_routes: bool = False
    return_text: bool = False
    resume_token_ids: Sequence[int] = ()
    require_exact_logprobs: bool = True
    trace_headers: Mapping[str, str] | None = None


def check_request(request: GenerationRequest, engine: EngineDescription) -> SamplingSettings:
    """Refuse what cannot be generated; the sampling settings with `max_tokens` cut to the context's room.

    Raises:
        InvalidArgument: a field is wrong.
        PromptTooLong: the prompt leaves no room for a response.
        InexactSampling: the logprobs would not be those of the whole distribution.
        BadRoutingTrace: routes are asked for, and the engine has none.
    """
    if not request.request_id:
        raise InvalidArgument("request_id is empty", field="request_id")
    check_ids("prompt_token_ids", request.prompt_token_ids, engine.vocab_size)
    if request.resume_token_ids:
        check_ids("resume_token_ids", request.resume_token_ids, engine.vocab_size)
    _check_seeds(request)
    check_routes(request.return_routes, engine)
    sampling = request.sampling
    _check_sampling(sampling, engine)
    extra = read_options(sampling.extra, Bounds(engine.vocab_size, sampling.max_tokens))
    if request.require_exact_logprobs:
        _check_exact(sampling)
    budget = _budget(request, engine)
    if "min_tokens" in extra:  # the engine counts from here on, and its budget may have been cut
        extra["min_tokens"] = min(max(0, extra["min_tokens"] - len(request.resume_token_ids)), budget)
    return replace(sampling, max_tokens=budget, extra=extra)


def check_routes(wanted: bool, engine: EngineDescription) -> None:
    """Refuse routes from an engine that has none."""
    if wanted and not engine.returns_routes:
        raise BadRoutingTrace(
            f"routes are asked for, and {engine.model_id!r} has {len(engine.moe_layer_ids)} MoE layers or returns none",
            expected="routes",
            actual="none",
        )


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse no ids, and ids outside the vocabulary."""
    if not ids:
        raise InvalidArgument(f"{name} is empty", field=name)
    largest = max(ids)
    if largest >= vocab_size or min(ids) < 0:
        wrong = largest if largest >= vocab_size else min(ids)
        raise InvalidArgument(
            f"{name} has id {wrong}, the vocabulary has {vocab_size}", field=name, id=wrong, vocab_size=vocab_size
        )


def _check_seeds(request: GenerationRequest) -> None:
    count = len(request.seeds)
    if not 1 <= count <= MAX_SAMPLES:
        raise InvalidArgument(f"{count} seeds, 1 to {MAX_SAMPLES} are allowed", field="seeds", actual=count)
    if not all(0 <= seed <= MAX_SEED for seed in request.seeds):
        raise InvalidArgument(f"seeds must be 0 to {MAX_SEED}", field="seeds")
    if request.resume_token_ids and count != 1:
        raise InvalidArgument(f"resume_token_ids go with one seed, not {count}", field="resume_token_ids", seeds=count)


def _check_sampling(sampling: SamplingSettings, engine: EngineDescription) -> None:
    if sampling.max_tokens < 1:
        raise InvalidArgument(f"max_tokens is {sampling.max_tokens}, at least 1 is needed", field="max_tokens")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidArgument(f"temperature is {sampling.temperature}, it must be finite and >= 0", field="temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidArgument(f"top_p is {sampling.top_p}, it must be in (0, 1]", field="top_p")
    if sampling.top_k < 0:
        raise InvalidArgument(f"top_k is {sampling.top_k}, it must be >= 0", field="top_k")
    if any(not stop for stop in sampling.stop):
        raise InvalidArgument("stop has an empty string", field="stop")
    if sampling.stop_token_ids:
        check_ids("stop_token_ids", sampling.stop_token_ids, engine.vocab_size)


def _check_exact(sampling: SamplingSettings) -> None:
    wrong: list[tuple[str, object]] = []
    if sampling.top_p < 1:
        wrong.append(("top_p", sampling.top_p))
    if sampling.top_k:
        wrong.append(("top_k", sampling.top_k))
    wrong += [(name, value) for name, value in sampling.extra.items() if not OPTIONS[name].exact]
    if wrong:
        name, value = wrong[0]
        raise InexactSampling(
            f"{name} = {value!r}: the engine does not return the set it sampled from, so the trainer cannot reproduce "
            "these logprobs; set allow_inexact_sampling for text that is not trained on",
            field=name,
            value=value,
        )


def _budget(request: GenerationRequest, engine: EngineDescription) -> int:
    resumed = len(request.resume_token_ids)
    length = len(request.prompt_token_ids) + resumed
    room = engine.max_model_len - length
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {length} tokens and the context {engine.max_model_len}: no room for a response",
            prompt_tokens=length,
            max_model_len=engine.max_model_len,
        )
    left = request.sampling.max_tokens - resumed
    if left < 1:
        raise InvalidArgument(
            f"{resumed} tokens are resumed, max_tokens is {request.sampling.max_tokens}: nothing is left to generate",
            field="resume_token_ids",
            max_tokens=request.sampling.max_tokens,
        )
    return min(left, room)
