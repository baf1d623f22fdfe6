"""In-memory twins of the services, to try rewards, filters and workers without engines.

They speak the real contracts over loopback, so the real clients and the real worker talk to them. `FakeBuffer` keeps
the rules a worker can see (leases, attempts, idempotent inserts); `FakeEngine` generates by a function of yours.
"""

from vime_client.testing.buffer import FakeBuffer
from vime_client.testing.engine import FakeEngine
from vime_client.testing.server import serving
from vime_client.testing.trainer import FakeTrainer

__all__ = ["FakeBuffer", "FakeEngine", "FakeTrainer", "serving"]
