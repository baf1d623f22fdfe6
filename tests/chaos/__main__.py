"""`python -m tests.chaos NAME --rounds N`: run a program that breaks things; without NAME list them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests import programs


def main() -> int:
    """Parse the command line and run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("name", nargs="?", help="what to break")
    parser.add_argument("--rounds", type=int, default=20, help="number of faults (default 20)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    how = "make chaos NAME=… ROUNDS=n"
    folder = Path(__file__).parent
    return programs.run(folder, "tests.chaos", arguments.name, lambda module: module.run(arguments.rounds), how)


if __name__ == "__main__":
    sys.exit(main())
