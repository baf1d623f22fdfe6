"""One numbering of trajectories for all data-parallel ranks."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vime_trainer.algorithms.index import Index
from vime_trainer.engine.distributed import all_reduce_max, data_parallel_size
from vime_trainer.engine.sample import Sample


def global_trajectories(samples: Sequence[Sample], device: torch.device) -> Index | None:
    """Which samples fork from one trajectory, numbered alike on every rank; None when nowhere a trajectory id is set.

    Ranks exchange 63-bit digests of the ids, so no object is unpickled from the wire.
    """
    named = torch.tensor([float(any(s.trajectory_id for s in samples))], device=device)
    if not bool(all_reduce_max(named).item()):
        return None
    own = torch.tensor([_digest(s) for s in samples], dtype=torch.int64, device=device)
    everywhere = torch.unique(torch.cat([own, *_gather(own)]))  # sorted: the same on every rank
    return Index(torch.searchsorted(everywhere, own), everywhere.numel())


def _digest(sample: Sample) -> int:
    key = sample.trajectory_id or f"{sample.group_id}/{sample.sample_index}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def _gather(own: torch.Tensor) -> list[torch.Tensor]:
    ranks = data_parallel_size()
    if ranks == 1:
        return []
    group = parallel_state.get_data_parallel_group()
    sizes = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=own.device), group=group)
    longest = max(int(s) for s in sizes)
    padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
    parts = [torch.zeros_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]
