"""Which weights pass which fence."""

from __future__ import annotations

import pytest

from vime_router.fences import Fence, FenceKind, Version

V = Version("run", 2, 10)


@pytest.mark.parametrize(
    ("fence", "served", "passes"),
    [
        (Fence(), V, True),
        (Fence(), None, True),
        (Fence(FenceKind.AT_LEAST, V), V, True),
        (Fence(FenceKind.AT_LEAST, V), Version("run", 2, 11), True),
        (Fence(FenceKind.AT_LEAST, V), Version("run", 2, 9), False),
        (Fence(FenceKind.AT_LEAST, V), Version("run", 3, 10), True),
        (Fence(FenceKind.AT_LEAST, V), Version("run", 3, 9), False),  # that trainer went back behind the fence
        (Fence(FenceKind.AT_LEAST, V), Version("run", 1, 99), False),  # weights of a lost incarnation
        (Fence(FenceKind.AT_LEAST, Version("run", 5, 10)), Version("run", 1, 99), False),  # one of several lost ones
        (Fence(FenceKind.AT_LEAST, Version("run", 5, 10)), Version("run", 4, 10), False),
        (Fence(FenceKind.AT_LEAST, Version("run", 1, 10)), Version("run", 5, 9), False),  # of a lease that is lost
        (Fence(FenceKind.AT_LEAST, Version("run", 1, 10)), Version("run", 5, 10), True),
        (Fence(FenceKind.AT_LEAST, V), Version("other", 9, 99), False),
        (Fence(FenceKind.AT_LEAST, V), None, False),
        (Fence(FenceKind.EXACTLY, V), V, True),
        (Fence(FenceKind.EXACTLY, V), Version("run", 2, 11), False),
        (Fence(FenceKind.EXACTLY, V), Version("run", 3, 10), False),
        (Fence(FenceKind.EXACTLY, V), None, False),
    ],
)
def test_a_fence_compares_run_incarnation_and_step(fence: Fence, served: Version | None, passes: bool) -> None:
    assert fence.passes(served) is passes


def test_a_fence_says_what_it_wants() -> None:
    assert str(Fence()) == "any"
    assert str(Fence(FenceKind.AT_LEAST, V)) == "at_least run/2/10"
