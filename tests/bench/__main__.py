"""`python -m tests.bench NAME`: run a measurement; without NAME list them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests import programs


def main() -> int:
    """Parse the command line and run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("name", nargs="?", help="what to measure")
    arguments = parser.parse_args()
    folder = Path(__file__).parent
    return programs.run(folder, "tests.bench", arguments.name, lambda module: module.run(), "make bench NAME=…")


if __name__ == "__main__":
    sys.exit(main())
