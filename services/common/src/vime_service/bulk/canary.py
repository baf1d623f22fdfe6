"""How far a canary lets the logprobs of trainer and engine differ: it follows from their dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """A statistic of |Δ logprob| over the canary's tokens, and the largest value that healthy weights give."""

    limit: float
    """In nats."""
    quantile: float | None
    """Which quantile is looked at; None: the mean."""

    @property
    def statistic(self) -> str:
        """Its name, for people."""
        return "mean" if self.quantile is None else f"{self.quantile:.0%} quantile of"

    def difference(self, ours: npt.ArrayLike, theirs: npt.ArrayLike) -> float:
        """The statistic in float64; infinite when a value is not finite."""
        gap = np.abs(np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64))
        if not bool(np.isfinite(gap).all()):
            return float("inf")
        return float(gap.mean() if self.quantile is None else np.quantile(gap, self.quantile))


# Both compute alike: what one token of many differs by is a fault, so the mean sees it.
_EXACT = CanaryRule(1e-4, None)
# Rounding turns near ties of a router: a few tokens then take other experts and differ by whole nats, which moves any
# mean. Nine tokens of ten do not: 0.08 to 0.14 in healthy models, 0.5 to 4 with two experts exchanged, 7 with a matrix
# transposed (services/trainer/tests/engine/test_canary.py).
_ROUNDED = CanaryRule(0.5, 0.9)


def canary_rule(dtypes: Sequence[str]) -> CanaryRule:
    """The rule for logprobs that were computed in these types, such as `float32` and `bfloat16`."""
    return _EXACT if all(dtype in ("float32", "float64") for dtype in dtypes) else _ROUNDED
