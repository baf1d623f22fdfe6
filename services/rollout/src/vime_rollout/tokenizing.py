"""The one thread that uses the tokenizer: Hugging Face's are not safe to use from several at once.

It also keeps long texts off the event loop, which every running sample shares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TokenizerThread:
    """Runs work with the tokenizer, one piece at a time, in the order it came."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "tokenizer")

    async def run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of `work`."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **options))

    def close(self) -> None:
        """Take no more work."""
        self._pool.shutdown(wait=False)
