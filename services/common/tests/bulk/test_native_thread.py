"""A process that ends while threads are in native code ends in order."""

from __future__ import annotations

import subprocess
import sys
import time

PROGRAM = """
import time
from vime_service.bulk.native_thread import start_native_thread
start_native_thread("brief", lambda: (time.sleep(0.5), print("came back", flush=True)))
start_native_thread("endless", lambda: time.sleep(600))
"""


def test_the_exit_waits_for_a_thread_that_comes_back_and_not_for_one_that_does_not() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "came back\n", "")
    assert time.monotonic() - began < 60
