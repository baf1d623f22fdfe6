"""The one interface that every way of moving weight bytes implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vime_service.bulk.deadline import Deadline


class Transport(Protocol):
    """Moves byte buckets from one sender (rank 0) to all other members of a group.

    A group has a generation number. After any `TransportError` the group is broken: the control plane drops the dead,
    and the survivors `form` again with a higher generation. A member enters `broadcast` only once the control plane
    has said that the transfer begins, so that an idle member is never parked in a collective.
    """

    @property
    def name(self) -> str:
        """What the contracts call this transport."""

    def form(self, generation: int, members: Sequence[str], deadline: Deadline) -> None:
        """Join the group of `members` (rank order, the sender first). Leaves the previous group, if any.

        Raises:
            TransportError: not every member joined before the deadline.
            ValueError: the generation is not higher than the last, or this process is not a member.
        """

    def broadcast(self, bucket: torch.Tensor, deadline: Deadline) -> None:
        """Send (rank 0) or fill (others) one flat uint8 host tensor.

        Raises:
            TransportError: a peer died, the deadline passed, or `abort` was called.
        """

    def abort(self) -> None:
        """Make a `broadcast` running in another thread fail soon. The group is unusable afterwards."""

    def close(self) -> None:
        """Leave the group and free what the transport holds. Calling it again does nothing."""


def check_membership(me: str, last_generation: int, generation: int, members: Sequence[str]) -> int:
    """This member's rank in a group about to be formed; `ValueError` for a group that cannot be."""
    if generation <= last_generation:
        raise ValueError(f"generation {generation} is not above {last_generation}, the last this member joined")
    if len(set(members)) != len(members) or len(members) < 2:
        raise ValueError(f"a group needs at least two distinct members, got {list(members)}")
    if me not in members:
        raise ValueError(f"{me!r} is not among the members {list(members)} of generation {generation}")
    return members.index(me)


def member_names(world_size: int) -> list[str]:
    """Names of a transfer group's members by rank; both ends make them from the rendezvous that the trainer sends."""
    return [str(rank) for rank in range(world_size)]
