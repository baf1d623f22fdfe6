"""Die with the parent: a service or an engine child must not outlive the process that started it, however that died.

Orphans hold ports and device memory, and the next start then fails with "out of memory".
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def die_with_parent(
    parent: int | None = None,
    *,
    stop_signal: signal.Signals = signal.SIGTERM,
    kill_after_s: float = 8.0,
    poll_s: float = 0.5,
) -> None:
    """Send this process `stop_signal` when its parent is gone, and SIGKILL if it is still there `kill_after_s` later.

    On Linux the kernel sends the signal (PR_SET_PDEATHSIG), which works while Python is stuck in a library. It fires
    when the parent's *thread* that forked ends: start such children from a thread that stays. A daemon thread watches
    the parent's id too, for the kill, and for the signal on other systems.

    Call it in the main thread, early, before anything slow. `parent` is the id that the parent told its child; with it
    a parent that died before this call is noticed too. A process started by init (id 1) has nobody to watch.
    """
    expected = os.getppid() if parent is None else parent
    armed = sys.platform == "linux"
    if armed:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(stop_signal), 0, 0, 0) != 0:
            errno = ctypes.get_errno()
            raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if os.getppid() != expected:  # it died before the kernel knew what to do
        os.kill(os.getpid(), stop_signal)
        armed = True
    elif expected == 1:
        return
    threading.Thread(
        target=_watch, args=(expected, None if armed else stop_signal, kill_after_s, poll_s), daemon=True
    ).start()


def _watch(parent: int, stop_signal: signal.Signals | None, kill_after_s: float, poll_s: float) -> None:
    # unbounded: it watches for as long as the parent lives, in a daemon thread
    while os.getppid() == parent:
        time.sleep(poll_s)  # a poll, because a pidfd cannot tell of a parent that died before it was opened
    if stop_signal is not None:
        os.kill(os.getpid(), stop_signal)
    time.sleep(kill_after_s)
    os.kill(os.getpid(), signal.SIGKILL)
