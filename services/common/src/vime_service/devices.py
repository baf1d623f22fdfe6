"""Which devices this machine has, without torch: a dry run must answer at once."""

from __future__ import annotations

import subprocess
import sys

_ASK = """
import ctypes
count = ctypes.c_int()
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count))
print(count.value)
"""
_TIMEOUT_S = 60.0


def cuda_devices() -> int:
    """CUDA devices that this process may use, as its driver says; 0 without a driver.

    Asked in a process of its own: one that has initialised CUDA cannot fork any more. It takes no module from the
    current folder.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 0
    return int(done.stdout) if done.returncode == 0 else 0
