"""`python -m vime_rollout --config FILE`: the rollout service, one engine."""

from __future__ import annotations

import sys

from vime_rollout.config import RolloutConfig
from vime_service.runner import run_service, service_cli


def run(config: RolloutConfig) -> int:
    """Serve until stopped; the exit code."""
    from vime_rollout.wiring import Rollout

    rollout = Rollout(config.rollout)
    return run_service("rollout", "vime-rollout", config, rollout.register, rollout.start)


def main() -> int:
    """The command line."""
    return service_cli("rollout", "vime-rollout", RolloutConfig, run)


if __name__ == "__main__":  # vLLM's children import this module again
    sys.exit(main())
