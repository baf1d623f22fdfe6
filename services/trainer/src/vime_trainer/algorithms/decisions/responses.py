"""Signs of degenerate responses: endless repetition, truncation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

REPETITION_TAIL = 10_000
REPETITION_RATIO = 10.0


def is_repetitive(text: str) -> bool:
    """A response of more than 10,000 characters whose last 10,000 compress more than tenfold with zlib."""
    if len(text) <= REPETITION_TAIL:
        return False
    tail = text[-REPETITION_TAIL:].encode()
    return len(tail) > REPETITION_RATIO * len(zlib.compress(tail))


def repetition_frac(texts: Sequence[str]) -> float | None:
    """Share of repetitive responses; None without responses."""
    return sum(map(is_repetitive, texts)) / len(texts) if texts else None


def truncated_ratio(finish_reasons: Sequence[str]) -> float | None:
    """Share of responses that ended with `length`; None without responses."""
    return sum(reason == "length" for reason in finish_reasons) / len(finish_reasons) if finish_reasons else None
