"""`python -m vime_trainer --config FILE`."""

from __future__ import annotations

import sys

from vime_service.runner import run_service, service_cli
from vime_trainer.config import TrainerConfig


def main() -> int:
    """The exit code."""
    return service_cli("trainer", "vime-trainer", TrainerConfig, _run)


def _run(config: TrainerConfig) -> int:
    from vime_trainer.wiring import Wiring

    wiring = Wiring(config)
    return run_service("trainer", "vime-trainer", config, wiring.register, wiring.start)


if __name__ == "__main__":
    sys.exit(main())
