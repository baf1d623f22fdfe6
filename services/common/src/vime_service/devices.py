"""Which devices this machine has, without torch: a dry run must answer at once."""

from __future__ import annotations

import subprocess
import sys

_ASK = """
import ctypes
count = ctypes.c_int()
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0)
else:
    NO_DEVICE = 100
    error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    print("unknown" if error not in (0, NO_DEVICE) else count.value)
"""
_TIMEOUT_S = 60.0


def cuda_devices() -> int | None:
    """CUDA devices that this process may use, as its driver says; 0 without a driver; None if it does not say now.

    Asked in a process of its own: one that has initialised CUDA cannot fork any more. It takes no module from the
    current folder.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    said = done.stdout.strip()
    return int(said) if said.isdecimal() else None
