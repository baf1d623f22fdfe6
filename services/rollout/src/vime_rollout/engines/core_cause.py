"""Of what vLLM's processes die. vLLM itself writes a stack trace to stderr, and tells the parent to look there.

The engine core, and the workers that it starts, are made to send the exception that ends them to the service.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

_LONGEST = 500
_Target = Callable[..., Any]
# As imported: a child that was forked finds the patched ones in the classes.
_CORE: _Target = EngineCoreProc.run_engine_core
_WORKER: _Target = WorkerProc.worker_main
_INIT: _Target = WorkerProc.__init__
_DEAD: _Target = EngineCoreProc._send_engine_dead


class CoreCause:
    """Hears of what the engine cores die that are started from now on in this process."""

    def __init__(self) -> None:
        self._reader, writer = multiprocessing.Pipe(duplex=False)
        self._writer = writer
        self._heard = ""
        EngineCoreProc.run_engine_core = staticmethod(partial(_core, writer))

    def heard(self) -> str:
        """The first cause, in one line; empty if none was told."""
        if not self._heard and self._reader.poll():
            # bounded by: there is something, and it was sent in one piece
            self._heard = self._reader.recv()
        return self._heard


def _core(writer: Connection, *args: Any, **kwargs: Any) -> None:
    """The engine core's process."""
    WorkerProc.worker_main = staticmethod(partial(_worker, writer))

    def dead(self: Any) -> None:  # the service hears of its end here, before the exception comes by below
        error = sys.exception()
        if isinstance(error, Exception):
            _tell(writer, error)
        _DEAD(self)

    EngineCoreProc._send_engine_dead = dead
    try:
        _CORE(*args, **kwargs)
    except Exception as error:
        _tell(writer, error)
        raise


def _worker(writer: Connection, *args: Any, **kwargs: Any) -> None:
    """A worker's process, where it is not the core's: of a failed start vLLM tells the core nothing but that it was."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _INIT(self, *args, **kwargs)
        except Exception as error:
            _tell(writer, error)
            raise

    WorkerProc.__init__ = init
    _WORKER(*args, **kwargs)


def _tell(writer: Connection, error: Exception) -> None:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    writer.send(said if len(said) <= _LONGEST else said[:_LONGEST] + " …")
