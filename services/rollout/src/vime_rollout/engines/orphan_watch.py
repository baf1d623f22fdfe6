"""End an engine's processes when the service is gone, however it died, and remove what it had staged.

The service may have been killed with SIGKILL: then nobody tells its children, and they would hold device memory.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading
import time
from pathlib import Path

SERVICE_PID = "VIME_ROLLOUT_SERVICE_PID"
STAGING_DIR = "VIME_ROLLOUT_STAGING_DIR"


def watch_service() -> None:
    """Watch the process named in the environment; do nothing in that process itself, or where none is named."""
    named = os.environ.get(SERVICE_PID, "")
    if not named.isdigit() or int(named) == os.getpid():
        return
    threading.Thread(
        target=_watch,
        args=(int(named), os.getppid(), os.environ.get(STAGING_DIR, "")),
        name="orphan-watch",
        daemon=True,
    ).start()


def _watch(service: int, parent: int, staging: str) -> None:
    try:
        fd = os.pidfd_open(service)
    except ProcessLookupError:  # it died before this process came to watch
        pass
    else:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()  # the whole life of the service
    if staging:
        shutil.rmtree(staging, ignore_errors=True)
    if parent not in (service, 1) and _child_of(parent):
        os.kill(parent, signal.SIGKILL)  # the engine core that started this worker
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def _child_of(pid: int) -> bool:
    return os.getppid() == pid and Path(f"/proc/{pid}").exists()
