"""`python -m vime_router --config FILE`: the router service."""

from __future__ import annotations

import sys

from vime_router.config import RouterConfig
from vime_service.runner import run_service, service_cli


def run(config: RouterConfig) -> int:
    """Serve until stopped; the exit code."""
    from vime_router.wiring import Router
    from vime_service.server import Service

    async def register(service: Service) -> None:
        await Router(config.router).register(service)

    return run_service("router", "vime-router", config, register)


def main() -> int:
    """The command line."""
    return service_cli("router", "vime-router", RouterConfig, run)


if __name__ == "__main__":
    sys.exit(main())
