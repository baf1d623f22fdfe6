"""What an answer may weigh. One that could not pass the message cap is refused before anything is generated for it.

Routes are most of it, and they travel inside the answer: a mixture of 48 layers with 8 experts a token has 384 bytes
for every token of prompt and response, where ids and logprobs have nine.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime_rollout.engine import EngineDescription
from vime_rollout.requests import GenerationRequest
from vime_service.answer_size import check_answer

_TOKEN_BYTES = 9  # an id, at most five as a varint, and a float32
_LOGPROB_BYTES = 4
_ENTRY_BYTES = 1024  # everything of a sample or a score that does not grow with its tokens
_PER_SEGMENT = 4096  # routes come in segments of 1 MiB with less than 256 bytes of their own


def route_bytes(engine: EngineDescription) -> int:
    """Bytes of routes per token."""
    return len(engine.moe_layer_ids) * engine.experts_per_token * engine.routes_dtype.itemsize


def check_generation_fits(request: GenerationRequest, engine: EngineDescription, limit: int, *, stream: bool) -> None:
    """Refuse a request whose largest answer is larger than a message; a stream has a message per sample for the routes.

    The text, if asked for, is not counted.

    Raises:
        InvalidArgument: naming both numbers.
    """
    prompt = len(request.prompt_token_ids)
    tokens = min(request.sampling.max_tokens, max(0, engine.max_model_len - prompt))
    routes = (prompt + tokens) * route_bytes(engine) if request.return_routes else 0
    samples = 1 if stream else len(request.seeds)
    whole = f"{samples} samples of {prompt} + at most {tokens} tokens"
    _check("seeds", whole, samples * _with_frame(tokens * _TOKEN_BYTES + routes), limit, engine, request.return_routes)


def check_scores_fit(lengths: Sequence[int], routes: bool, engine: EngineDescription, limit: int) -> None:
    """As `check_generation_fits`, of sequences to be scored."""
    each = _LOGPROB_BYTES + (route_bytes(engine) if routes else 0)
    needed = sum(_with_frame(length * each) for length in lengths)
    _check("sequences", f"{len(lengths)} sequences of {sum(lengths)} tokens", needed, limit, engine, routes)


def _with_frame(nbytes: int) -> int:
    return nbytes + nbytes // _PER_SEGMENT + _ENTRY_BYTES


def _check(field: str, what: str, needed: int, limit: int, engine: EngineDescription, routes: bool) -> None:
    share = f", {route_bytes(engine)} bytes of routes a token" if routes else ""
    check_answer(field, what + share, needed, limit)
