"""`python -m vime_buffer --config FILE`: the buffer as a process."""

from __future__ import annotations

import sys

from vime_buffer.config import BufferConfig
from vime_service.runner import run_service, service_cli


def main() -> int:
    """Run the service from the command line; the exit code."""
    return service_cli("buffer", "vime-buffer", BufferConfig, _run)


def _run(config: BufferConfig) -> int:
    from vime_buffer.wiring import registration  # gRPC and numpy: --help answers without them

    return run_service("buffer", "vime-buffer", config, registration(config.buffer))


if __name__ == "__main__":
    sys.exit(main())
