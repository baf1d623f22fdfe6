"""Which samples belong together: dense ids, the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_trainer.algorithms.ranks import Reduce


@dataclass(frozen=True)
class Index:
    """Sample b belongs to member `ids_B[b]` of `size` groups (or trajectories) in the global batch.

    Ids are dense, 0 ≤ id < `size`, and mean the same on every rank, so a vector [size] can be all-reduced.
    A member may have no sample here, or none anywhere.
    """

    ids_B: Tensor
    size: int

    def __post_init__(self) -> None:
        if self.ids_B.dtype != torch.int64 or self.ids_B.ndim != 1:
            raise ValueError(f"ids_B must be int64 [B], got {self.ids_B.dtype} {tuple(self.ids_B.shape)}")
        if self.ids_B.numel() and not 0 <= int(self.ids_B.min()) <= int(self.ids_B.max()) < self.size:
            low, high = int(self.ids_B.min()), int(self.ids_B.max())
            raise ValueError(f"ids_B spans [{low}, {high}], outside [0, {self.size})")

    def rows(self, selection: Tensor | slice) -> Index:
        """The same members, for a selection of samples."""
        return Index(self.ids_B[selection], self.size)


def index_of(keys: Sequence[Hashable] | Tensor, universe: Sequence[Hashable] | None = None) -> Index:
    """An `Index` from arbitrary keys (strings, sparse ints). `universe` lists every key of the global batch in an
    order all ranks share; without it the batch is `keys` alone. Raises `ValueError` for a key not in `universe`.
    """
    names: list[Hashable] = keys.tolist() if isinstance(keys, Tensor) else list(keys)
    position = {name: place for place, name in enumerate(dict.fromkeys(names if universe is None else universe))}
    unknown = next((name for name in names if name not in position), None)
    if unknown is not None:
        raise ValueError(f"key {unknown!r} is not among the {len(position)} keys of the global batch")
    device = keys.device if isinstance(keys, Tensor) else None
    return Index(torch.tensor([position[name] for name in names], dtype=torch.int64, device=device), len(position))


def each_alone(samples: int, device: torch.device) -> Index:
    """Every sample its own member: the default when no trajectory forked."""
    return Index(torch.arange(samples, device=device), samples)


def trajectory_key(place: int, trajectory_id: Hashable, sample: Hashable) -> tuple[int, str, Hashable]:
    """What the samples of one trajectory share: the place of their group in the batch, and the id they forked under.

    Ids are the group's own: two groups may both have a `t0`. A sample without an id (None or "") stands alone, under
    a key that no id can equal.
    """
    alone = trajectory_id is None or trajectory_id == ""
    return (place, "alone", sample) if alone else (place, "forked", trajectory_id)


def digest(key: Hashable) -> int:
    """63 bits that stand for `key`, the same in every process. Keys are told apart by their `repr`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def global_index(keys: Sequence[Hashable], reduce: Reduce, device: torch.device | None = None) -> Index:
    """The `Index` of this rank's keys where no rank knows those of the others. Every rank must call it.

    Ranks exchange digests, so no object is unpickled from the wire.
    """
    own_B = torch.tensor([digest(key) for key in keys], dtype=torch.int64, device=device)
    everywhere_J = torch.unique(torch.cat(reduce.gather(own_B)))  # sorted: the same on every rank
    return Index(torch.searchsorted(everywhere_J, own_B), everywhere_J.numel())
