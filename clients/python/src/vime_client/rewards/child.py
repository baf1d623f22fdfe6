"""The process that runs users' functions: `python -m vime_client.rewards.child FD PARENT FOLDER`.

It reads jobs from a socket and answers every call with one frame. It never decides about time-outs that need force:
its parent kills it. Frames are a 4-byte big-endian length and one JSON object; no pickle crosses a process.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from vime_client.one_line import one_line, told
from vime_client.rewards.functions import (
    FunctionError,
    FunctionSpec,
    UserFunction,
    find_modules_in,
    load_function,
    place_of,
)
from vime_client.rewards.values import Score, as_score, unscored

_LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


class Child:
    """One job after the other; the samples of an async job side by side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._functions: dict[FunctionSpec, UserFunction] = {}
        self._loop = asyncio.new_event_loop()  # one loop for life: async clients of the user stay usable

    def serve(self) -> None:
        """Answer jobs until the parent closes the socket."""
        while (job := self._receive()) is not None:
            spec = FunctionSpec(job["place"], job["name"])
            if job["op"] == "load":
                self._send(self._load(spec))
            else:
                self._loop.run_until_complete(self._run(self._functions[spec], job))

    def _load(self, spec: FunctionSpec) -> dict[str, Any]:
        try:
            function = load_function(spec)
        except FunctionError as error:
            return {"error": str(error)}
        self._functions[spec] = function
        return {"names": function.names, "required": function.required, "is_async": function.is_async}

    async def _run(self, function: UserFunction, job: Mapping[str, Any]) -> None:
        try:
            record = json.loads(job["record_json"]) if job["record_json"] else {}
        except (ValueError, RecursionError) as error:
            wrong = f"the prompt's record cannot be read: {told(error)}"
            if job.get("raw"):
                self._send({"error": wrong})
            else:
                self._send_scores([unscored("RAISED", wrong)] * len(job["samples"]))
            return
        common = {**job["common"], "record": record}
        if isinstance(record, dict) and "answer" in record:
            common["answer"] = record["answer"]
        samples = job["samples"]
        if job.get("raw"):
            self._send(await _raw(function, common, record, samples))
        elif function.batch:
            self._send_scores(await _batch(function, common, record, samples, job["timeout_s"]))
        else:
            await asyncio.gather(*(self._one(function, common, record, i, samples, job) for i in range(len(samples))))

    async def _one(
        self,
        function: UserFunction,
        common: Mapping[str, Any],
        record: Any,
        index: int,
        samples: Sequence[Mapping[str, Any]],
        job: Mapping[str, Any],
    ) -> None:
        score = await _score(function, {**common, **samples[index]}, record, job["timeout_s"])
        self._send_scores([score], index)

    def _send_scores(self, scores: Sequence[Score], first: int = 0) -> None:
        for index, score in enumerate(scores, first):
            self._send({"index": index, **vars(score)})

    def _receive(self) -> dict[str, Any] | None:
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        body = self._read(_LENGTH.unpack(header)[0])
        return None if body is None else json.loads(body)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            # unbounded: an idle child waits for its next job; its parent's end closes the connection
            piece = self._connection.recv(size - len(data))
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _send(self, message: Mapping[str, Any]) -> None:
        body = json.dumps(message).encode()
        self._connection.sendall(_LENGTH.pack(len(body)) + body)


async def _score(function: UserFunction, known: Mapping[str, Any], record: Any, timeout_s: float) -> Score:
    value, failure, seconds = await _call(function, known, record, timeout_s)
    return failure if failure is not None else as_score(value, seconds)


async def _batch(
    function: UserFunction, common: Mapping[str, Any], record: Any, samples: Sequence[Any], timeout_s: float
) -> list[Score]:
    """One call for all samples. A list of another length fails them all: a shift would train on wrong rewards."""
    value, failure, seconds = await _call(function, {**common, "samples": samples}, record, timeout_s)
    if failure is not None:
        return [failure] * len(samples)
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        wrong = f"{function.spec.name} must return a list of {len(samples)} rewards, got {type(value).__name__}"
        return [unscored("RAISED", wrong, seconds)] * len(samples)
    try:
        values = list(value)
        wrong = f"{function.spec.name} returned {len(values)} rewards for {len(samples)} samples"
    except BaseException as error:  # noqa: BLE001 - a user's list raises anything
        values, wrong = [], f"the rewards of {function.spec.name} cannot be read: {told(error)}"
    if len(values) != len(samples):
        return [unscored("RAISED", wrong, seconds)] * len(samples)
    return [as_score(item, seconds / len(samples)) for item in values]


async def _raw(
    function: UserFunction, common: Mapping[str, Any], record: Any, samples: Sequence[Any]
) -> dict[str, Any]:
    """A filter's answer, unread: {"value": true | false | [true | false, "why"]} or {"error": "..."}."""
    value, failure, _ = await _call(function, {**common, "samples": samples}, record, None)
    if failure is not None:
        return {"error": failure.detail}
    try:
        keep, reason = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, "")
        # numpy's bool is no bool; anything that is not a truth value is a mistake, such as a forgotten return.
        if isinstance(keep, bool) or type(keep).__name__ in ("bool_", "bool"):
            return {"value": [bool(keep), one_line(str(reason))]}
        wrong = f"{function.spec.name} must return True or False, or (True or False, reason), got {value!r}"
    except BaseException as error:  # noqa: BLE001 - reading it runs the user's code, which raises anything
        wrong = f"the answer of {function.spec.name} cannot be read: {told(error)}"
    return {"error": one_line(wrong)}


async def _call(
    function: UserFunction, known: Mapping[str, Any], record: Any, timeout_s: float | None
) -> tuple[Any, Score | None, float]:
    start = time.monotonic()
    try:
        arguments = function.arguments(known, record if isinstance(record, Mapping) else {})
        value = function.call(**arguments)
        if inspect.isawaitable(value):
            task = asyncio.ensure_future(_caught(value))
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            if not done:
                task.cancel()
                seconds = time.monotonic() - start
                return None, unscored("TIMEOUT", f"no reward after {timeout_s} s", seconds), seconds
            value, raised = task.result()
            if raised is not None:
                seconds = time.monotonic() - start
                return None, unscored("RAISED", _where(raised, function), seconds), seconds
    except BaseException as error:  # noqa: BLE001 - a user's code raises anything
        seconds = time.monotonic() - start
        return None, unscored("RAISED", _where(error, function), seconds), seconds
    return value, None, time.monotonic() - start


async def _caught(value: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """What an async reward returns or raises: a task that ended in SystemExit would end the loop of all."""
    try:
        # bounded by: the time-out of whoever waits for this task
        return await value, None
    except BaseException as error:  # noqa: BLE001 - a user's code raises anything
        return None, error


def _where(error: BaseException, function: UserFunction) -> str:
    return told(error) + place_of(error, function.spec.place)


def main() -> None:
    """Serve the socket FD; die with the process PARENT; find the user's modules in FOLDER too."""
    descriptor, parent, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's business
    sys.set_int_max_str_digits(0)  # labels keep all their digits
    os.set_inheritable(descriptor, False)
    find_modules_in(folder)
    connection = socket.socket(fileno=descriptor)
    try:
        Child(connection).serve()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone; nobody waits for an orderly end
    os._exit(0)  # threads that a user's code left behind must not hold this process


if __name__ == "__main__":
    main()
