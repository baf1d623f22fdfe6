"""`python -m vime_trainer.rank --config FILE`: started by the trainer service, never by hand."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path


def main() -> int:
    """Run until told to exit. 0: told to; 1: the service is gone or the rank failed."""
    parser = argparse.ArgumentParser(prog="vime-trainer-rank", description="A rank of the trainer; started by it.")
    parser.add_argument("--config", type=Path, required=True, help="the trainer's configuration file")
    arguments = parser.parse_args()
    if "VIME_LAUNCH_ID" not in os.environ:
        sys.stderr.write(
            "vime-trainer-rank: VIME_LAUNCH_ID is not set; ranks are started by `python -m vime_trainer`\n"
        )
        return 2

    from vime_client.config_loading import load_config
    from vime_client.logs import setup_logging
    from vime_client.parent_watch import die_with_parent
    from vime_trainer.config import TrainerConfig

    die_with_parent(int(os.environ["VIME_PARENT_PID"]))
    config = load_config(TrainerConfig, arguments.config)
    if config.trainer.engine.device == "cpu":  # before torch is imported
        # mcore's fusions are torch.compile, which on CPU would compile C++ for minutes.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Threads of several processes on few cores slow each other down 10 to 30 times.
        os.environ.setdefault("OMP_NUM_THREADS", str(config.trainer.engine.threads))
    name = f"trainer-rank-{os.environ['RANK']}"
    setup_logging(name, config.log)

    from vime_service.telemetry import setup_telemetry
    from vime_trainer.rank.worker import RankWorker

    telemetry = setup_telemetry(name, "vime-trainer", config.telemetry)
    try:
        return asyncio.run(RankWorker(config).run())
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    sys.exit(main())
