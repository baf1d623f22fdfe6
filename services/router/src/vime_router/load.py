"""How busy an engine is: the router's own counts, which cannot leak, and what the engine's heartbeats add to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vime_router.directory import EngineLoad


class LoadBook:
    """What runs on one life of one engine.

    The engine's own figures are older than the router's and contain what the router sent. Only the rest counts on top:
    what others had running there when the heartbeat came.

    Attributes:
        calls: calls that run there through this router now.
        samples: samples that those calls asked for.
        foreign: samples of others, as of the last heartbeat.
        kv_cache_usage: share of the KV cache in use as of the last heartbeat; 0 if the engine does not tell.
        sent: calls sent since it registered.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.samples = 0
        self.foreign = 0
        self.kv_cache_usage = 0.0
        self.sent = 0

    @property
    def total(self) -> int:
        """Samples on the engine, as far as anybody knows."""
        return self.samples + self.foreign

    @contextmanager
    def hold(self, samples: int) -> Iterator[None]:
        """Count a call of `samples` samples while the block runs, however it ends."""
        self.calls += 1
        self.samples += samples
        self.sent += 1
        try:
            yield
        finally:
            self.calls -= 1
            self.samples -= samples

    def hear(self, load: EngineLoad | None) -> None:
        """Take in what a heartbeat says; None means that the engine cannot tell: own counts alone then decide."""
        if load is None:
            self.foreign, self.kv_cache_usage = 0, 0.0
            return
        self.foreign = max(0, load.running + load.waiting - self.samples)
        self.kv_cache_usage = load.kv_cache_usage
