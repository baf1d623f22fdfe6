"""`python -m vime_client.worker --config FILE`: one rollout worker, until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from vime_client.config_loading import ConfigError, load_config, to_toml
from vime_client.worker.config import WorkerConfig, WorkerSettings

EXIT_FAILED = 1
EXIT_CONFIG = 2


def main() -> int:
    """Parse arguments, run the worker, return the exit code."""
    parser = argparse.ArgumentParser(prog="vime-worker", description="A rollout worker of vime.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="TOML file with settings")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one setting")
    parser.add_argument("--dry-run", action="store_true", help="check settings and rewards, print settings, and exit")
    arguments = parser.parse_args()
    try:
        config = load_config(WorkerConfig, arguments.config, arguments.set)
    except ConfigError as error:
        return _say(*error.problems, code=EXIT_CONFIG)
    if arguments.dry_run:
        return _dry_run(config)
    return run(config)


def run(config: WorkerConfig) -> int:
    """Set up logs and traces, work until SIGTERM or SIGINT, and return the exit code."""
    from vime_client.channel import ChannelError
    from vime_client.errors import RpcError
    from vime_client.logs import setup_logging
    from vime_client.parent_watch import die_with_parent
    from vime_client.rewards.functions import FunctionError
    from vime_client.rewards.pool import LoadBroken, PoolClosed
    from vime_client.telemetry import setup_telemetry
    from vime_client.worker.worker import BufferAway

    try:
        setup_logging("worker", config.log)
    except OSError as error:
        return _say(f"log file {config.log.file} cannot be written: {error.strerror}", code=EXIT_CONFIG)
    telemetry = setup_telemetry("worker", "vime-client", config.telemetry)
    if config.parent_pid is not None:
        die_with_parent(config.parent_pid)
    try:
        asyncio.run(_work(config.worker))
    except (RpcError, BufferAway, PoolClosed, LoadBroken, OSError) as error:
        return _say(str(error), code=EXIT_FAILED)
    except (ChannelError, FunctionError) as error:
        return _say(str(error), code=EXIT_CONFIG)
    finally:
        telemetry.shutdown()
    return 0


async def _work(settings: WorkerSettings) -> None:
    from vime_client.worker.worker import run_worker

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)  # a second signal changes nothing: giving leases back is bounded
    await run_worker(settings, stop)


def _dry_run(config: WorkerConfig) -> int:
    from vime_client.channel import ChannelError, open_channel
    from vime_client.rewards.pool import RewardPool
    from vime_client.worker.check import check_user_code

    async def check() -> list[str]:
        settings = config.worker
        for address in (settings.buffer_address, settings.router_address):
            await open_channel(address, settings.credentials.once()).close()  # connects to nobody
        async with RewardPool(1, settings.reward_timeout_s, settings.base_dir) as pool:
            return await check_user_code(settings, pool)

    try:
        if problems := asyncio.run(check()):
            return _say(*problems, code=EXIT_CONFIG)
    except ChannelError as error:
        return _say(str(error), code=EXIT_CONFIG)
    sys.stdout.write(to_toml(config))
    return 0


def _say(*lines: str, code: int) -> int:
    for line in lines:
        sys.stderr.write(f"vime-worker: {line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
