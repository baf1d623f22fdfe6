"""The directory of checkpoints: whole or not at all, one pointer, and the last good one is never removed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vime_trainer.engine.errors import CheckpointError
from vime_trainer.engine.store import MANIFEST, POINTER, Store, read_manifest


def save(store: Store, step: int, content: str = "x") -> Path:
    work = store.begin(step, "1")
    (work / "weights").write_text(content * 1000)
    return store.commit(work, step, {"state": {"step": step}}).path


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_a_saved_checkpoint_is_the_latest_and_carries_its_state(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=2)
    assert store.latest() is None
    path = save(store, 3)
    assert store.latest() == path
    store.verify()
    assert read_manifest(path)["state"] == {"step": 3}
    assert names(tmp_path) == [POINTER, "step_000003"]


def test_k18_retention_keeps_the_newest_and_says_how_far_back_one_can_go(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=2)
    for step in range(1, 6):
        save(store, step)
    assert names(tmp_path) == [POINTER, "step_000004", "step_000005"]
    assert store.committed().oldest_kept_step == 4
    with pytest.raises(ValueError, match="keep_last = 0"):
        Store(tmp_path, keep_last=0)


def test_k18_what_a_torn_save_left_is_ignored_and_later_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=1)
    good = save(store, 1)
    (store.begin(2, "torn") / "weights").write_text("half")
    (tmp_path / "step_000003").mkdir()  # renamed, but the pointer was never moved
    (tmp_path / "step_000003" / MANIFEST).write_text("{}")
    assert store.latest() == good
    save(store, 2)
    assert names(tmp_path) == [POINTER, "step_000002"]


def test_the_same_step_can_be_saved_again_while_it_is_the_latest(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=1)
    save(store, 4, "a")
    second = save(store, 4, "b")
    assert store.latest() == second
    assert (second / "weights").read_text()[0] == "b"
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_file_is_named_before_anything_is_loaded(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path, keep_last=1)
    file = save(store, 1) / "weights"
    if damage == "missing":
        file.unlink()
    else:
        file.write_text(file.read_text()[:-1] + ("" if damage == "short" else "y"))
    with pytest.raises(CheckpointError, match="weights"):
        store.verify()


@pytest.mark.parametrize("content", ["step_000009\n", "../../etc\n", ""])
def test_a_pointer_that_leads_nowhere_is_an_error_and_not_another_checkpoint(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path, keep_last=2)
    save(store, 1)
    (tmp_path / POINTER).write_text(content)
    with pytest.raises(CheckpointError, match=POINTER):
        store.latest()


def test_a_save_that_fails_leaves_the_old_checkpoint_the_latest(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=1)
    good = save(store, 1)
    work = store.begin(2, "1")
    (work / "weights").write_text("half")
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.commit(work, 2, {"state": float("nan")})
    store.abandon(work)
    assert store.latest() == good
    store.verify()
    assert names(tmp_path) == [POINTER, "step_000001"]


SAVER = """
import itertools, sys
from pathlib import Path
from vime_trainer.engine.store import Store
store = Store(Path(sys.argv[1]), keep_last=1)
for step in itertools.count(int(sys.argv[2])):
    work = store.begin(step, "1")
    for i in range(4):
        (work / f"part{i}").write_text(str(step) * 50_000)
    store.commit(work, step, {"state": {"step": step}})
    print(step, flush=True)
"""


def test_k18_a_kill_at_any_moment_leaves_a_complete_checkpoint_no_older_than_the_last_reported(tmp_path: Path) -> None:
    generator = random.Random(0)
    reported = 0
    for _ in range(10):
        command = [sys.executable, "-c", SAVER, str(tmp_path), str(reported + 1)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": _path()})
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(generator.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait(timeout=10)
        reported = int((rest or [first])[-1])
        store = Store(tmp_path, keep_last=1)
        store.verify()
        latest = store.committed()
        assert latest.step >= reported
        assert {f.read_text() for f in latest.path.glob("part*")} == {str(latest.step) * 50_000}
        reported = latest.step


def _path() -> str:
    return os.pathsep.join(p for p in sys.path if p)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from vime_trainer.engine.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store = Store(Path(sys.argv[1]), keep_last=1)
work = store.begin(2, "1")
try:
    (work / "weights").write_text("x" * 5000)
    store.commit(work, 2, {})
except OSError as error:
    store.abandon(work)
    print("failed:", error.strerror)
"""


def test_k18_no_space_fails_the_save_and_leaves_the_old_one_usable(tmp_path: Path) -> None:
    good = save(Store(tmp_path, keep_last=1), 1)
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": _path()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert done.stdout.startswith("failed:")
    store = Store(tmp_path, keep_last=1)
    assert store.latest() == good
    store.verify()
    assert json.loads((good / MANIFEST).read_text())["step"] == 1
