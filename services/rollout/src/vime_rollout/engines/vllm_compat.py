"""Everything that differs between the vLLM releases we stand on (0.26 on GPU, 0.30 on CPU), or is vLLM's own inside.

| what | 0.26 | 0.30 |
| --- | --- | --- |
| a wrong request raises | ValueError | VLLMClientError (a ValueError no more) |
| `SamplingParams.stream_interval` | engine argument only | also per request |
| CPU build returns routes | no build | yes |
| `finish_weight_update(weight_version)` | no argument | optional (not used here) |

The same in both, and used: `AsyncLLM.output_processor` (`add_request`, `request_states`, `tokenizer`), `detokenizer`,
`AsyncLLM.engine_core.outputs_queue`, the `reload` functions, `initialize_model`, `MoERunner.layer_id`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

DRAIN_WAIT_S = 5.0


def version() -> str:
    """vLLM's own version."""
    from vllm import __version__

    return str(__version__)


def request_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises when a request is wrong."""
    from vllm import exceptions

    newer = getattr(exceptions, "VLLMClientError", None)
    return (ValueError, newer) if newer is not None else (ValueError,)


def is_engine_death(error: Exception) -> bool:
    """Whether vLLM says that its engine core has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def on_taken(engine: Any, tell: Callable[[str, Any], int]) -> None:
    """Call `tell` with the caller's id and the state of every request that the front end takes from now on.

    The front end's own table forgets a request when its end has come in, which is before the end is read. The state
    that is told here goes on to say how many tokens there were. `tell` returns how many tokens of the prompt belong to
    the response: a stop string may begin in their text.
    """
    processor = engine.output_processor
    add = processor.add_request

    def adding(request: Any, *args: Any, **options: Any) -> None:
        add(request, *args, **options)
        state = processor.request_states[request.request_id]
        resumed = tell(state.external_req_id, state)
        if resumed and request.sampling_params.detokenize:
            state.detokenizer = detokenizer_after(processor.tokenizer, request, resumed)

    processor.add_request = adding


def detokenizer_after(tokenizer: Any, request: Any, resumed: int) -> Any:
    """The detokenizer of a request that has come `resumed` tokens far, which are the end of its prompt.

    vLLM's own begins with the text of the first new token, and where the prompt ends inside a character, with the text
    of the whole prompt.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    cut = len(request.prompt_token_ids) - resumed
    shorter = copy.copy(request)
    shorter.prompt_token_ids = request.prompt_token_ids[:cut]
    made: Any = IncrementalDetokenizer.from_new_request(tokenizer, shorter)
    slow = hasattr(made, "prompt_len")
    for token in request.prompt_token_ids[cut:]:
        if slow:
            made.token_ids.append(token)
            made.prompt_len += 1
        made.output_text += made.decode_next(token)
    return made


def tokens_of(state: Any) -> int:
    """New tokens so far of a request that the front end took."""
    return int(state.detokenizer.num_output_tokens()) if state.detokenizer else 0


def known_requests(engine: Any) -> set[str]:
    """Ids of the requests that the front end holds."""
    return {state.external_req_id for state in engine.output_processor.request_states.values()}


async def outputs_drained(engine: Any) -> None:
    """Wait until the front end has taken in everything that the engine core has sent.

    A pause is answered after the last step's outputs were sent, on the same socket; they may still be queued here.
    """
    async with asyncio.timeout(DRAIN_WAIT_S):
        while not engine.engine_core.outputs_queue.empty():  # noqa: ASYNC110  the queue is vLLM's, it has no event
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)
