"""Time that a test can hold (shared with the client)."""

from vime_client.clock import Clock, ManualClock, MonotonicClock

__all__ = ["Clock", "ManualClock", "MonotonicClock"]
