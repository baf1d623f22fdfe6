"""Which of the engines that may take a call gets it. One file per policy; the file's name is the policy's name."""

from __future__ import annotations

from vime_router.policies.base import Candidate, Choice, Policy
from vime_router.policies.round_robin import RoundRobin, RoundRobinConfig
from vime_router.policies.sticky_least_loaded import StickyLeastLoaded, StickyLeastLoadedConfig

__all__ = [
    "Candidate",
    "Choice",
    "Policy",
    "RoundRobin",
    "RoundRobinConfig",
    "StickyLeastLoaded",
    "StickyLeastLoadedConfig",
]
