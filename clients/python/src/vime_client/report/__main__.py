"""`python -m vime_client.report RUN_DIR`: write report.html and summary.json."""

from __future__ import annotations

import sys
from pathlib import Path

from vime_client.report.build import NoRun, build_report


def main() -> int:
    """The exit code."""
    try:
        build_report(Path(sys.argv[1]))
    except NoRun as error:
        sys.stderr.write(f"vime-report: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
