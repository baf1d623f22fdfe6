"""Kill, freeze and restart engines, and the router itself, under load: no request lost, no token doubled.

`make chaos NAME=router ROUNDS=n`. Workers ask for whole answers and streams all the time and compare every token with
what its seed must give. While engines fail, nobody may see an error; when the router itself is killed, the workers
repeat their calls, as a real worker does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.router_processes import ProcessFleet, fake_engine, process_fleet

from vime.common.v1.trajectory_pb2 import SamplingParams
from vime.rollout.v1.generation_service_pb2 import GenerateRequest, GenerateStreamRequest
from vime.rollout.v1.generation_service_pb2_grpc import GenerationServiceStub
from vime_client.errors import RpcError, rpc_errors
from vime_client.retry import whole_step

ENGINES, WORKERS, TOKENS = 3, 16, 48
PERIOD, SUSPECT, DEAD = 0.2, 3, 6
"""Heartbeats every 0.2 s; suspect after 0.6 s, dead after 1.2 s of silence."""
FAULTS = ("kill", "freeze", "blink", "router")


@dataclass
class Tally:
    """What became of the requests."""

    asked: int = 0
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    doubled: int = 0
    lost: list[str] = field(default_factory=list)
    router_down: bool = False
    repeated: int = 0
    finished: list[tuple[float, float]] = field(default_factory=list)


class Load:
    """Workers that ask until they are told to stop."""

    def __init__(self, fleet: ProcessFleet, tally: Tally) -> None:
        assert fleet.channel is not None
        self._stub: Any = GenerationServiceStub(fleet.channel)
        self._tally = tally
        self.stop = False

    async def work(self, worker: int) -> None:
        """Ask again and again, streams and whole answers in turns."""
        for number in range(10**9):
            if self.stop:
                return
            seed = worker * 10**6 + number
            self._tally.asked += 1
            begun = time.monotonic()
            try:
                await self._ask_until_answered(seed, streaming=number % 2 == 0)
            except RpcError as error:
                self._tally.lost.append(str(error))
            else:
                self._tally.answered += 1
                self._tally.finished.append((begun, time.monotonic()))

    async def _ask_until_answered(self, seed: int, *, streaming: bool) -> None:
        async for attempt in whole_step("request", attempts=40, seconds=30, max_wait_s=0.5, retry_if=self._may_repeat):
            with attempt:
                self._check(seed, await self._ask(seed, attempt.retry_state.attempt_number, streaming=streaming))

    def _may_repeat(self, error: BaseException) -> bool:
        """Only the router's own death may show; it is seen as a broken connection, by calls of that time."""
        repeat = isinstance(error, RpcError) and error.transient and not error.reason and self._tally.router_down
        self._tally.repeated += repeat
        return repeat

    async def _ask(self, seed: int, attempt: int, *, streaming: bool) -> list[int]:
        request = GenerateRequest(
            request_id=f"{seed}.{attempt}",
            prompt_token_ids=[1, 2, 3],
            seeds=[seed],
            sampling=SamplingParams(max_tokens=TOKENS),
        )
        with rpc_errors():
            if not streaming:
                response = await self._stub.Generate(request, timeout=60)
                return list(response.samples[0].response_token_ids)
            ids: list[int] = []
            ended = 0
            async for piece in self._stub.GenerateStream(GenerateStreamRequest(generate=request), timeout=60):
                if piece.response_token_ids and piece.first_token < len(ids):
                    self._tally.doubled += 1
                ids += piece.response_token_ids
                ended += piece.HasField("end")
            self._tally.doubled += ended > 1
            return ids

    def _check(self, seed: int, ids: list[int]) -> None:
        expected = fake_engine().tokens_of(seed, TOKENS)
        if ids != expected:
            self._tally.wrong.append(f"seed {seed}: {len(ids)} tokens of {TOKENS}")


async def one_round(fleet: ProcessFleet, tally: Tally, fault: str, engine_id: str) -> None:
    """One fault and its repair."""
    engine = fleet.engines[engine_id]
    if fault == "kill":
        await engine.kill()
        await asyncio.sleep(1.0)
        await fleet.start_engine(engine_id)
    elif fault in ("freeze", "blink"):
        engine.signal(signal.SIGSTOP)
        await asyncio.sleep(3.0 if fault == "freeze" else 0.3)
        engine.signal(signal.SIGCONT)
    else:
        tally.router_down = True
        await fleet.router.kill()
        await fleet.start_router()
    await fleet.wait_alive(*fleet.engines)
    await asyncio.sleep(0.5)
    tally.router_down = False


def slowest(tally: Tally, fault_at: float) -> float:
    """Seconds from a fault to the last answer of a request that it may have hit."""
    return max(
        (end - fault_at for begun, end in tally.finished if begun <= fault_at + 0.5 and end >= fault_at), default=0
    )


async def chaos(rounds: int, seed: int = 0) -> dict[str, object]:
    """All rounds under load."""
    logging.getLogger("vime_client.retry").setLevel(logging.ERROR)  # a line per repeated request hides the rounds
    chance = random.Random(seed)
    tally, recovered, faults = Tally(), list[tuple[float, str]](), Counter[str]()
    deck = list[str]()
    settings = (
        f"router.heartbeat_period_s={PERIOD}",
        f"router.suspect_after_periods={SUSPECT}",
        f"router.dead_after_periods={DEAD}",
        "router.queue_timeout_s=30",
        "router.breaker_pause_s=1",
    )
    async with process_fleet(ENGINES, ("--chunk", "4", "--chunk-seconds", "0.02"), settings) as fleet:
        load = Load(fleet, tally)
        workers = [asyncio.create_task(load.work(number)) for number in range(WORKERS)]
        await asyncio.sleep(1.0)
        for number in range(rounds):
            if number % len(FAULTS) == 0:
                deck = chance.sample(FAULTS, len(FAULTS))
            fault, engine_id = deck[number % len(FAULTS)], f"e{chance.randrange(ENGINES)}"
            faults[fault] += 1
            at = time.monotonic()
            await one_round(fleet, tally, fault, engine_id)
            await asyncio.sleep(1.0)
            recovered.append((slowest(tally, at), fault))
            sys.stderr.write(f"round {number + 1} of {rounds}: {fault} {engine_id}, {recovered[-1][0]:.2f} s\n")
        load.stop = True
        await asyncio.gather(*workers)
        left = sum(engine.in_flight for engine in (await fleet.listed()).values())
    worst: dict[str, float] = {}
    for seconds, fault in recovered:
        worst[fault] = round(max(seconds, worst.get(fault, 0.0)), 2)
    return {
        "name": "router",
        "rounds": rounds,
        "lost": tally.asked - tally.answered,
        "doubled": tally.doubled,
        "mixed": len(tally.wrong),
        "recovered_s_max": max(worst.values(), default=0.0),
        "recovered_s_by_fault": worst,
        "requests": tally.asked,
        "repeated_while_the_router_was_down": tally.repeated,
        "in_flight_left": left,
        "faults": dict(faults),
        "errors": (tally.lost + tally.wrong)[:3],
    }


def run(rounds: int) -> dict[str, object]:
    """`rounds` faults."""
    return asyncio.run(chaos(rounds))


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]) if len(sys.argv) > 1 else 5)))
