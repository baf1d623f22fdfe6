"""An answer of vLLM's engine core, which is another process: in time, or an error that says what failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from vime_rollout.engine import EngineDied, EngineError
from vime_rollout.engines import vllm_compat

T = TypeVar("T")


async def answer_of(what: str, answer: Awaitable[T], seconds: float | None) -> T:
    """Await `answer`. A core that is frozen is not found dead, and would keep its caller waiting for ever.

    Args:
        what: names the call in errors.
        answer: the call.
        seconds: its bound; None where it may take as long as running samples do, and the caller has a deadline.

    Raises:
        EngineDied: the core has ended.
        EngineError: it did not answer in time, or answered with a failure of whatever type.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await answer
    except Exception as error:
        if limit.expired():
            raise EngineError(f"{what} took longer than {seconds:g} s") from error
        if isinstance(error, EngineError):
            raise
        if vllm_compat.is_engine_death(error):
            raise EngineDied(str(error) or "the engine core has ended") from error
        raise EngineError(f"{what} failed: {type(error).__name__}: {error}") from error
