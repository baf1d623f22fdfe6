"""`python -m vime_buffer --config FILE`: the buffer as a process."""

from __future__ import annotations

import sys

from vime_buffer.config import BufferConfig
from vime_service.runner import Checked, run_service, service_cli


def main() -> int:
    """Run the service from the command line; the exit code."""
    return service_cli("buffer", "vime-buffer", BufferConfig, _run, check=_check)


def _run(config: BufferConfig) -> int:
    from vime_buffer.wiring import registration  # gRPC and numpy: --help answers without them

    return run_service("buffer", "vime-buffer", config, registration(config.buffer))


def _check(config: BufferConfig) -> Checked:
    from vime_buffer.catalog import check_data

    return Checked(*check_data(config.buffer.tables.values(), config.server.max_message_bytes))


if __name__ == "__main__":
    sys.exit(main())
