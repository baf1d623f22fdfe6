"""Daemon threads that run native code, and an exit that does not abort because of them.

A thread that comes back from C++ while the interpreter is being torn down is ended by unwinding its stack; C++ frames
that may not be unwound then abort the process, after everything was put away in order. So the exit waits a moment for
such threads. One that stays longer in native code does not come back before the process is gone.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

from vime_service.bulk.deadline import Deadline

EXIT_WAIT_S = 2.0
"""How long the exit waits for all of them together; what they wait for themselves has been aborted by then."""

_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_native_thread(name: str, target: Callable[[], object]) -> None:
    """Run `target` in a daemon thread called `name`."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    _running.add(thread)
    thread.start()


@atexit.register
def _wait_for_all() -> None:
    end = Deadline.after(EXIT_WAIT_S)
    for thread in list(_running):
        thread.join(end.remaining())
