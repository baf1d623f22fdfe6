"""`python -m vime_client.launcher RUN_DIR`: supervise the services of `RUN_DIR/services/plan.json`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path


def main() -> int:
    """The exit code: 0 if training finished."""
    run_dir = Path(sys.argv[1])
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported; see vime_service.runner

    from vime_client.launcher.plan import load_plan
    from vime_client.launcher.state import AlreadyHeld, hold
    from vime_client.logs import LogConfig, setup_logging

    setup_logging("launcher", LogConfig(file=run_dir / "logs" / "launcher.jsonl"))
    try:
        with hold(run_dir, "supervisor"):
            return asyncio.run(_run(load_plan(run_dir), run_dir))
    except AlreadyHeld as error:
        sys.stderr.write(f"vime-launcher: {error}\n")
        return 1


async def _run(plan: object, run_dir: Path) -> int:
    from vime_client.launcher.plan import RunPlan
    from vime_client.launcher.supervisor import Supervisor

    assert isinstance(plan, RunPlan)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, stop.set)  # a second one changes nothing: stopping is bounded
    return await Supervisor(plan, run_dir).run(stop)


if __name__ == "__main__":
    sys.exit(main())
