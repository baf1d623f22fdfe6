"""Sums, maxima and lists over data-parallel ranks, as functions that the caller hands in.

The library knows no process group: `LOCAL` says "this tensor is the whole batch"; a trainer hands in its
collectives; tests and the looking glass run ranks as threads (`simulate`). Every rank must make the same calls,
also one that holds no samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Combined = TypeVar("Combined")


def _same(x: Tensor) -> Tensor:
    return x


def _alone(x: Tensor) -> list[Tensor]:
    return [x]


@dataclass(frozen=True)
class Reduce:
    """Element-wise sum and maximum over ranks; each returns the result on every rank and may work in place.

    `gather`: every rank's 1-D tensor, whatever its length, in the order of the ranks.
    """

    sum: Callable[[Tensor], Tensor] = _same
    max: Callable[[Tensor], Tensor] = _same
    gather: Callable[[Tensor], list[Tensor]] = _alone


LOCAL = Reduce()


def simulate(ranks: int, work: Callable[[int, Reduce], Result], timeout_s: float = 60.0) -> list[Result]:
    """Run `work(rank, reduce)` as `ranks` threads that meet in `reduce`; the results in rank order.

    Raises what a failing rank raised; when one fails or does not arrive within `timeout_s`, the others stop too.
    """
    barrier = threading.Barrier(ranks, timeout=timeout_s)
    slots: list[Tensor] = [torch.empty(0)] * ranks

    def meet(rank: int, x: Tensor, combine: Callable[[list[Tensor]], Combined]) -> Combined:
        slots[rank] = x
        barrier.wait()
        combined = combine(list(slots))
        barrier.wait()  # nobody may overwrite a slot that another still reads
        return combined

    def run(rank: int) -> Result:
        return work(
            rank,
            Reduce(
                sum=lambda x: meet(rank, x, lambda slots: torch.stack(slots).sum(0)),
                max=lambda x: meet(rank, x, lambda slots: torch.stack(slots).amax(0)),
                gather=lambda x: meet(rank, x, list),
            ),
        )

    def release_others(finished: Future[Result]) -> None:
        if finished.exception() is not None:
            barrier.abort()

    # bounded by: the barrier's time; a rank that fails or is late breaks it for all
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        for future in futures:
            future.add_done_callback(release_others)
    causes = [future.exception() for future in futures]
    root = next((error for error in causes if error and not isinstance(error, threading.BrokenBarrierError)), None)
    if root is not None:
        raise root
    # bounded by: the block above, which ends when all are done
    return [future.result() for future in futures]
