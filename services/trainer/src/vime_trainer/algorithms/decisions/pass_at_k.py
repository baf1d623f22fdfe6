"""Unbiased pass@k. Chen et al. (arXiv 2107.03374).

pass@k = 1 − C(n − c, k) / C(n, k)        n samples of a prompt, c of them correct
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that k of `samples` drawn without replacement hold a correct one."""
    if not 0 <= correct <= samples:
        raise ValueError(f"correct={correct} must be in [0, samples={samples}]")
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be in [1, samples={samples}]")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_rates(rewards: Sequence[float | None], group_ids: Sequence[Hashable]) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, …, the mean over the groups with at least k scored samples. Correct is reward == 1;
    unscored (None, NaN) samples are not counted. Empty when nothing is scored.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards, {len(group_ids)} group ids")
    counts: dict[Hashable, tuple[int, int]] = {}
    for reward, group in zip(rewards, group_ids, strict=True):
        if reward is not None and not math.isnan(reward):
            n, c = counts.get(group, (0, 0))
            counts[group] = (n + 1, c + (reward == 1))
    largest = max((n for n, _ in counts.values()), default=0)
    rates: dict[int, float] = {}
    for k in (2**power for power in range(largest.bit_length())):
        scores = [pass_at_k(n, c, k) for n, c in counts.values() if n >= k]
        rates[k] = math.fsum(scores) / len(scores)
    return rates
