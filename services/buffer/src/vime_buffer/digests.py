"""The digest that makes an insert idempotent."""

from __future__ import annotations

import xxhash


def payload_digest(payload: bytes) -> bytes:
    """xxh3-128 of the group as it was serialized, deterministically and with unknown fields: nothing is left out."""
    return xxhash.xxh3_128_digest(payload)
