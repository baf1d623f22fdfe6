"""Users' functions in processes of their own: K10, K23 and K24 of the known faults, with time-outs scaled down."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from vime_client.rewards.functions import FunctionError, FunctionSpec
from vime_client.rewards.pool import PoolClosed, RewardPool
from vime_client.rewards.process import RewardProcess

REWARDS = """
import asyncio, ctypes, os, time

def hang_sleep_exit(sample_index):
    if sample_index == 3:
        ctypes.PyDLL(None).pause()         # in C, holding the GIL: no signal handler of Python ever runs
    if sample_index == 5:
        time.sleep(60)
    if sample_index == 6:
        os._exit(3)
    return sample_index

def own_modules():
    import colorsys, helper              # both lie beside this file; Python has a colorsys, too
    return helper.VALUE if hasattr(colorsys, "rgb_to_hsv") else 0

def big_power(sample_index):
    if sample_index == 1:
        return (7 ** (7 ** 9)) % 2       # minutes in C-level code
    return sample_index

def slow(sample_index):
    time.sleep((8 - sample_index) * 0.25)
    return sample_index

async def slow_async(sample_index):
    await asyncio.sleep((8 - sample_index) * 0.25)
    return sample_index

async def blocks_its_loop(sample_index):
    if sample_index == 2:
        time.sleep(60)
    await asyncio.sleep(0.01)
    return sample_index

async def forgets_to_end(sample_index):
    if sample_index == 2:
        await asyncio.sleep(60)
    return sample_index

def one_short(samples):
    return [s["sample_index"] for s in samples][:-1]

def batch(samples, record):
    return [s["sample_index"] + record["base"] for s in samples]

def raises(sample_index):
    if sample_index == 3:
        raise ConnectionError("grader is down")
    return sample_index

def label(text, answer):
    return text == str(answer)

def column(text, difficulty, prompt, metadata):
    return difficulty * 10

def wants_more(text, lable):
    return 0

def everything(**kwargs):
    return len(kwargs["token_ids"]) + (kwargs["record"]["x"] == 2**70 + 1)

def quits():
    raise SystemExit("enough")

def prints(text):
    print("to stdout", flush=True)
    return 1

def starts_a_child(text):
    import subprocess
    child = subprocess.Popen(["sleep", "300"])
    open(text, "w").write(str(child.pid))
    time.sleep(60)

def keep_odd(samples, record):
    return (record["n"] % 2 == 1, "even")

def forgets_return(samples):
    pass

def interrupts():
    raise KeyboardInterrupt("\\ud83d")

async def quits_async():
    raise SystemExit("enough")

class Own(BaseException):
    def __str__(self):
        raise self

def raises_silently():
    raise Own

class Unreadable(list):
    def __iter__(self):
        raise Own

    __repr__ = __bool__ = __iter__

def unreadable_list(samples):
    return Unreadable([1.0])

def unreadable_filter(samples):
    return Unreadable([1.0])

def surrogate_reason(samples):
    return False, "\\ud83d"
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def spec(path: Path, name: str) -> FunctionSpec:
    return FunctionSpec.parse(f"{path.name}:{name}", path.parent)


def samples(count: int = 8) -> list[dict[str, object]]:
    return [{"text": f"t{i}", "token_ids": [1, 2, 3], "sample_index": i} for i in range(count)]


def children_of_this_process() -> list[str]:
    out = subprocess.run(["ps", "-o", "pid=,stat=,comm=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [line for line in out.stdout.splitlines() if " ps" not in line]


ROUNDS = 6  # of two seconds each; the sheet has twenty, which the pool cannot tell from six


async def test_k23_hung_sleeping_and_exiting_samples_cost_neither_the_others_nor_the_pool(rewards: Path) -> None:
    foreign = len(children_of_this_process())  # of earlier tests, such as multiprocessing's resource tracker
    async with RewardPool(4, timeout_s=2.0) as pool:
        for _ in range(ROUNDS):
            start = time.monotonic()
            scores = await pool.score(spec(rewards, "hang_sleep_exit"), {}, "{}", samples())
            assert time.monotonic() - start < 30.0
            assert [s.reward for s in scores] == [0, 1, 2, None, 4, None, None, 7]
            assert [scores[i].unscored for i in (3, 5, 6)] == ["TIMEOUT", "TIMEOUT", "CRASHED"]
            assert "exit code 3" in scores[6].detail
        await wait_until(lambda: len(pool.pids) == 4)
        children = children_of_this_process()
        assert len(children) == foreign + 4
        assert not [line for line in children if " Z" in line]
    assert len(children_of_this_process()) == foreign


async def test_k23_a_loop_in_c_code_is_killed(rewards: Path) -> None:
    async with RewardPool(2, timeout_s=0.5) as pool:
        start = time.monotonic()
        scores = await pool.score(spec(rewards, "big_power"), {}, "{}", samples(3))
        assert time.monotonic() - start < 30.0
        assert [s.reward for s in scores] == [0, None, 2]
        assert scores[1].unscored == "TIMEOUT"


@pytest.mark.parametrize("name", ["slow", "slow_async"])
async def test_k24_rewards_run_side_by_side_off_the_event_loop_and_keep_their_sample(rewards: Path, name: str) -> None:
    longest_pause = 0.0

    async def heartbeat() -> None:
        nonlocal longest_pause
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.01)
            longest_pause = max(longest_pause, time.monotonic() - start)

    async with RewardPool(4, timeout_s=10) as pool:
        await pool.load(spec(rewards, name))
        beat = asyncio.create_task(heartbeat())
        start = time.monotonic()
        scores = await pool.score(spec(rewards, name), {}, "{}", samples())
        assert time.monotonic() - start < 8.0
        beat.cancel()
        assert [s.reward for s in scores] == list(range(8))
        assert longest_pause < 1.0


async def test_k24_a_batch_one_short_is_an_error_for_the_batch_and_never_a_shift(rewards: Path) -> None:
    async with RewardPool(1, timeout_s=5) as pool:
        scores = await pool.score(spec(rewards, "one_short"), {}, "{}", samples())
        assert [s.reward for s in scores] == [None] * 8
        assert {s.unscored for s in scores} == {"RAISED"}
        assert "7 rewards for 8 samples" in scores[0].detail
        scores = await pool.score(spec(rewards, "batch"), {}, '{"base": 100}', samples())
        assert [s.reward for s in scores] == [100 + i for i in range(8)]


async def test_k10_a_reward_that_raises_leaves_its_sample_unscored_with_class_and_line(rewards: Path) -> None:
    async with RewardPool(2, timeout_s=5) as pool:
        scores = await pool.score(spec(rewards, "raises"), {}, "{}", samples(4))
    assert [s.reward for s in scores] == [0, 1, 2, None]
    assert scores[3].unscored == "RAISED"
    assert "ConnectionError: grader is down (rewards.py:" in scores[3].detail


async def test_an_async_reward_that_blocks_its_loop_fails_alone(rewards: Path) -> None:
    async with RewardPool(2, timeout_s=0.5) as pool:
        scores = await pool.score(spec(rewards, "blocks_its_loop"), {}, "{}", samples(4))
    assert [s.reward for s in scores] == [0, 1, None, 3]
    assert scores[2].unscored == "TIMEOUT"


async def test_an_async_reward_that_is_late_is_cancelled_and_its_process_stays(rewards: Path) -> None:
    async with RewardPool(1, timeout_s=0.3) as pool:
        pids = pool.pids
        scores = await pool.score(spec(rewards, "forgets_to_end"), {}, "{}", samples(4))
        assert [s.reward for s in scores] == [0, 1, None, 3]
        assert pool.pids == pids


async def test_arguments_are_passed_by_name_and_integers_keep_all_their_digits(rewards: Path) -> None:
    async with RewardPool(1, timeout_s=5) as pool:
        big = 2**70 + 1
        scores = await pool.score(spec(rewards, "label"), {}, f'{{"answer": {big}}}', [{"text": str(big)}])
        assert scores[0].reward == 1.0
        scores = await pool.score(spec(rewards, "everything"), {}, f'{{"x": {big}}}', samples(1))
        assert scores[0].reward == 4.0
        common = {"prompt": "p", "metadata": {}}
        scores = await pool.score(spec(rewards, "column"), common, '{"difficulty": 7}', samples(1))
        assert scores[0].reward == 70.0
        scores = await pool.score(spec(rewards, "wants_more"), {}, '{"label": 7}', samples(1))
        assert scores[0].unscored == "RAISED"
        assert 'asks for "lable"' in scores[0].detail


async def test_modules_beside_a_reward_are_found_and_take_the_place_of_none_of_pythons(
    rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rewards.parent / "helper.py").write_text("VALUE = 7")
    called_from = rewards.parent / "called from here"
    called_from.mkdir()
    for folder in (rewards.parent, called_from):
        for name in ("colorsys.py", "random.py"):
            (folder / name).write_text("raise ImportError('this folder')")
    monkeypatch.chdir(called_from)
    for base in (None, rewards.parent):
        async with RewardPool(1, 5.0, base) as pool:
            scores = await pool.score(spec(rewards, "own_modules"), {}, "{}", samples(1))
            assert scores[0].reward == 7.0, scores[0].detail


async def test_exit_in_a_reward_and_prints_do_no_harm(rewards: Path) -> None:
    async with RewardPool(1, timeout_s=5) as pool:
        pids = pool.pids
        assert (await pool.score(spec(rewards, "quits"), {}, "{}", samples(1)))[0].unscored == "RAISED"
        assert (await pool.score(spec(rewards, "prints"), {}, "{}", samples(1)))[0].reward == 1.0
        assert pool.pids == pids


@pytest.mark.parametrize(
    ("name", "record", "says"),
    [
        ("interrupts", "{}", "KeyboardInterrupt: \\ud83d"),
        ("quits_async", "{}", "SystemExit: enough"),
        ("raises_silently", "{}", "Own (its message raises Own)"),
        ("unreadable_list", "{}", "cannot be read: Own (its message raises Own)"),
        ("label", "no JSON", "the prompt's record cannot be read: JSONDecodeError"),
        ("label", "[" * 100_000, "the prompt's record cannot be read: RecursionError"),
    ],
)
async def test_whatever_a_reward_does_it_is_told_in_valid_words_and_costs_no_process(
    rewards: Path, name: str, record: str, says: str
) -> None:
    async with RewardPool(1, timeout_s=5) as pool:
        pids = pool.pids
        (score,) = await pool.score(spec(rewards, name), {}, record, samples(1))
        assert pool.pids == pids
    assert score.unscored == "RAISED"
    assert says in score.detail


async def test_what_a_hung_reward_started_ends_with_it(rewards: Path, tmp_path: Path) -> None:
    async with RewardPool(1, timeout_s=1) as pool:
        file = tmp_path / "pid"
        await pool.score(spec(rewards, "starts_a_child"), {}, "{}", [{"text": str(file)}])
        await wait_until(lambda: not Path(f"/proc/{file.read_text()}").exists() or is_zombie(int(file.read_text())))


async def test_a_missing_file_or_function_is_named_with_the_nearest(rewards: Path) -> None:
    async with RewardPool(1, timeout_s=5) as pool:
        with pytest.raises(FunctionError, match=r"nothere\.py does not exist"):
            await pool.load(FunctionSpec.parse("nothere.py:score", rewards.parent))
        with pytest.raises(FunctionError, match=r'no function labl; did you mean "label"\?'):
            await pool.load(spec(rewards, "labl"))
        with pytest.raises(FunctionError, match=r"must have the form file\.py:function"):
            FunctionSpec.parse("reward.py")


async def test_a_cancelled_call_frees_its_process(rewards: Path) -> None:
    async with RewardPool(1, timeout_s=60) as pool:
        call = asyncio.create_task(pool.score(spec(rewards, "slow"), {}, "{}", [{"sample_index": -400}]))
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        scores = await pool.score(spec(rewards, "slow"), {}, "{}", [{"sample_index": 8}])
        assert scores[0].reward == 8


async def test_a_process_that_died_while_idle_is_replaced_before_it_is_used(rewards: Path) -> None:
    async with RewardPool(1, timeout_s=5) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert (await pool.score(spec(rewards, "label"), {}, '{"answer": 1}', [{"text": "1"}]))[0].reward == 1.0


async def test_a_closed_pool_refuses_and_wakes_who_waits(rewards: Path) -> None:
    pool = RewardPool(1, timeout_s=60)
    await pool.__aenter__()
    await pool.load(spec(rewards, "slow"))
    first = asyncio.create_task(pool.score(spec(rewards, "slow"), {}, "{}", [{"sample_index": -400}]))
    second = asyncio.create_task(pool.score(spec(rewards, "slow"), {}, "{}", [{"sample_index": -400}]))
    await asyncio.sleep(0.2)
    await pool.close()
    done = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 5)
    assert isinstance(done[1], PoolClosed)


async def _readers_that_are_left(start: Callable[[], Awaitable[object]]) -> list[object]:
    """Sockets that the event loop still listens to and did not before."""
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]  # private to asyncio's loop
    before = set(selector.get_map())
    await start()
    await asyncio.sleep(0.05)
    return [fd for fd in selector.get_map() if fd not in before]


@pytest.mark.parametrize("end", [OSError("no more processes"), None])
async def test_a_refused_child_leaves_no_reader_behind(
    rewards: Path, monkeypatch: pytest.MonkeyPatch, end: OSError | None
) -> None:
    asked = asyncio.Event()

    async def refuse(*_: object, **__: object) -> None:
        asked.set()
        if end is not None:
            raise end
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)

    async def start() -> None:
        child = asyncio.create_task(RewardProcess.start(rewards))
        await asked.wait()
        if end is None:
            child.cancel()
        with pytest.raises((OSError, asyncio.CancelledError)):
            await child

    assert await _readers_that_are_left(start) == []
    # A socket that gets the number of the one before is heard.
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.send(b"x")
    assert await asyncio.wait_for(reader.readexactly(1), 5) == b"x"
    writer.close()
    theirs.close()


async def test_children_die_with_a_killed_parent(rewards: Path) -> None:
    code = (
        "import asyncio\nfrom vime_client.rewards.pool import RewardPool\n"
        "async def main():\n    async with RewardPool(2, 5) as pool:\n"
        "        print(*pool.pids, flush=True)\n        await asyncio.sleep(60)\nasyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait(5)
    await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in pids))


async def test_a_filter_answers_for_a_group_and_its_faults_are_errors(rewards: Path) -> None:
    async with RewardPool(1, timeout_s=5) as pool:
        assert await pool.decide(spec(rewards, "keep_odd"), {}, '{"n": 2}', samples(2)) == (False, "even")
        assert (await pool.decide(spec(rewards, "keep_odd"), {}, '{"n": 3}', samples(2)))[0] is True
        with pytest.raises(FunctionError, match="must return True or False"):
            await pool.decide(spec(rewards, "forgets_return"), {}, "{}", samples(2))
        with pytest.raises(FunctionError, match="the answer of unreadable_filter cannot be read: Own"):
            await pool.decide(spec(rewards, "unreadable_filter"), {}, "{}", samples(2))
        with pytest.raises(FunctionError, match="record cannot be read: JSONDecodeError"):
            await pool.decide(spec(rewards, "keep_odd"), {}, "no JSON", samples(2))
        assert await pool.decide(spec(rewards, "surrogate_reason"), {}, "{}", samples(2)) == (False, "\\ud83d")


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return False


async def wait_until(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not reached in time"
        await asyncio.sleep(0.05)
