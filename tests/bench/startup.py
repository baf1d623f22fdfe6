"""How soon `--help` answers, as a multiple of importing the command-line libraries alone.

`make bench NAME=startup`. Programs and libraries are started in turns within one run, so that a busy machine slows
both; what counts is processor time, the least of all rounds.
"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

ROUNDS = 7
LIBRARIES = "import typer, typer.rich_utils, rich.console, rich.table, rich.markdown, pydantic"
PROGRAMS = {
    "vime": "vime_client.cli",
    "vime-buffer": "vime_buffer",
    "vime-router": "vime_router",
    "vime-rollout": "vime_rollout",
    "vime-trainer": "vime_trainer",
}


def seconds(*arguments: str) -> float:
    """Processor time of one Python process.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run() -> dict[str, object]:
    """All figures; `ratio` is the slowest program's."""
    commands = {"libraries": ["-c", LIBRARIES]} | {name: ["-m", module, "--help"] for name, module in PROGRAMS.items()}
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(ROUNDS):
        for name, command in commands.items():
            best[name] = min(best[name], seconds(*command))
    ratios = {name: best[name] / best["libraries"] for name in PROGRAMS}
    return {
        "ratio": round(max(ratios.values()), 2),
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
        "seconds": {name: round(value, 3) for name, value in best.items()},
        "python": platform.python_version(),
    }
