"""Which group goes to which data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence


def assign_groups(tokens: Sequence[int], ranks: int) -> list[int]:
    """The rank of each group, so that ranks hold about equally many tokens.

    Longest processing time first (Graham 1969): at most 4/3 of the best makespan. Deterministic: ties go to the
    earlier group and the lower rank. Every group is assigned, whatever the counts; a rank may stay empty.

    Args:
        tokens: tokens of each group, in the order of the batch.
        ranks: data-parallel size, at least 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks} must be at least 1")
    load = [0] * ranks
    chosen = [0] * len(tokens)
    for group in sorted(range(len(tokens)), key=lambda g: (-tokens[g], g)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        chosen[group] = rank
        load[rank] += tokens[group]
    return chosen
