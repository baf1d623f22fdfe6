"""Keep the contracts of today: `python -m tests.contract.make_image 0.2.0` writes protos/released/0.2.0.binpb.

An image is a FileDescriptorSet of every .proto, without comments: `buf build protos --exclude-source-info -o FILE`.
Release candidates (`0.2.0-rc1`) do not gate `buf breaking`; all images are old clients in test_old_client.py.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from tests.contract.breaking import ROOT, buf_program

_VERSION = re.compile(r"\d+\.\d+\.\d+(-rc\d+)?")


def main() -> int:
    """Build the image; the exit code of buf."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("version", help="such as 0.2.0 or 0.2.0-rc1")
    version: str = parser.parse_args().version
    if not _VERSION.fullmatch(version):
        parser.error(f'"{version}" is not a version such as 0.2.0 or 0.2.0-rc1')
    image = ROOT / "protos" / "released" / f"{version}.binpb"
    if image.exists():
        parser.error(f"{image.relative_to(ROOT)} exists: what was released does not change")
    image.parent.mkdir(exist_ok=True)
    command = [buf_program(), "build", "protos", "--exclude-source-info", "-o", str(image)]
    code = subprocess.run(command, cwd=ROOT, check=False, timeout=120).returncode
    if code == 0:
        print(f"{image.relative_to(ROOT)}: {image.stat().st_size} bytes")
    return code


if __name__ == "__main__":
    sys.exit(main())
