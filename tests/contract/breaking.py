"""`buf breaking` against the newest released image in protos/released/; nothing to compare before the first release."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def newest_image() -> Path | None:
    """The image with the highest version, release candidates below their release; None before any."""
    images = [p for p in (ROOT / "protos" / "released").glob("*.binpb") if "-rc" not in p.stem]
    return max(images, key=lambda p: tuple(int(part) for part in p.stem.split(".")), default=None)


def buf_program() -> str:
    """The `buf` of this environment, else the one on PATH."""
    buf = Path(sys.executable).with_name("buf")
    return str(buf) if buf.exists() else shutil.which("buf") or "buf"


def main() -> int:
    image = newest_image()
    if image is None:
        print("contracts: not released yet, so nothing can break")
        return 0
    command = [buf_program(), "breaking", "--against", str(image)]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=120).returncode


if __name__ == "__main__":
    sys.exit(main())
