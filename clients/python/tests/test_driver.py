"""`vime run` from outside: what it prints, what it leaves, and that a run outlives its driver."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vime.trainer.v1 import trainer_service_pb2 as pb
from vime_client.cli import main
from vime_client.config_loading import ConfigError, to_toml
from vime_client.driver.display import Lines, Panel, sparkline
from vime_client.driver.failures import Failures
from vime_client.driver.folder import FolderRefused, open_folder, ports_of, read_run
from vime_client.driver.progress import Progress
from vime_client.driver.record import write_record
from vime_client.driver.run import RunOptions, _conclude
from vime_client.driver.run import run as drive
from vime_client.driver.status import NothingKnown, print_status
from vime_client.launcher import patience
from vime_client.launcher.client import is_running, start_supervisor, stop_supervisor
from vime_client.launcher.plan import RunPlan, ServicePlan, load_plan, service_names, write_plan
from vime_client.launcher.ports import choose_ports
from vime_client.launcher.preflight import preflight
from vime_client.launcher.state import RunState, ServiceState, hold, read_state, write_state
from vime_client.recipe import LauncherSection, load_recipe
from vime_client.redaction import STARS
from vime_client.report.build import build_report
from vime_client.report.summary import run_seconds
from vime_client.report.terminal import show

from .conftest import FLEET, alive, make_plan, processes_of, wait_until


@pytest.fixture
def run_dir(tmp_path: Path, recipe: Path) -> Path:
    """The folder of a run that is prepared, not started: the four services are one program with fakes."""
    run_dir = tmp_path / "runs" / "r"
    folder = open_folder(run_dir, "new", recipe.parent)
    (run_dir / "config.toml").write_text(to_toml(load_recipe(recipe)))
    fleet(run_dir, steps=5)
    assert folder.made
    return run_dir


def fleet(run_dir: Path, steps: int, end: str = "finishes") -> None:
    (port,) = choose_ports(["trainer"], {}).values()
    script = run_dir / "fleet.py"
    script.write_text(FLEET)
    service = ServicePlan(
        name="trainer",
        package="fleet",
        argv=[sys.executable, str(script), str(steps), str(port), end],
        log=run_dir / "logs" / "trainer.log",
        address=f"127.0.0.1:{port}",
    )
    make_plan(run_dir, [service], f"127.0.0.1:{port}")


async def vime(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vime_client.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "120"},
    )


async def printed(process: asyncio.subprocess.Process, text: str) -> None:
    """Wait until it prints `text`."""
    assert process.stdout is not None
    assert process.stderr is not None
    while line := await asyncio.wait_for(process.stdout.readline(), 20):
        if text in line.decode():
            return
    raise AssertionError(f"it ended before it said {text!r}: {(await process.stderr.read()).decode()}")


async def ended(process: asyncio.subprocess.Process, seconds: float = 40) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), seconds)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_driver_follows_a_run_to_its_end_and_reports_it(run_dir: Path) -> None:
    fleet(run_dir, steps=60)
    await start_supervisor(run_dir)
    code, out, err = await ended(await vime("run", str(run_dir), "--join"))
    assert code == 0, err
    told = [int(number) for number in re.findall(r"step (\d+)/60  reward", out)]
    assert told == list(range(told[0], 61))  # from where it joined, each once
    assert "r: finished" in out
    assert json.loads((run_dir / "summary.json").read_text())["phase"] == "finished"
    await wait_until(lambda: not processes_of(run_dir))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_to_the_driver_stops_everything_in_order(
    run_dir: Path, signum: signal.Signals, code: int
) -> None:
    fleet(run_dir, steps=500)
    await start_supervisor(run_dir)
    driver = await vime("run", str(run_dir), "--join")
    await printed(driver, "step ")
    driver.send_signal(signum)
    returned, _, err = await ended(driver)
    assert returned == code
    assert "continue with --resume" in err
    state = read_state(run_dir)
    assert state is not None
    assert state.phase == "stopped"
    await wait_until(lambda: not processes_of(run_dir))


async def test_a_run_goes_on_without_its_driver_and_another_may_join(run_dir: Path) -> None:
    fleet(run_dir, steps=60)
    await start_supervisor(run_dir)
    first = await vime("run", str(run_dir), "--join")
    await printed(first, "step ")
    first.kill()
    await first.wait()
    assert is_running(run_dir)
    code, out, err = await ended(await vime("run", str(run_dir), "--join"))
    assert code == 0, err
    assert "r: finished" in out
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 60


async def test_a_failed_run_ends_with_the_reason_and_the_log_of_who_failed(run_dir: Path) -> None:
    fleet(run_dir, steps=2, end="fails")
    await start_supervisor(run_dir)
    code, _, err = await ended(await vime("run", str(run_dir), "--join"))
    assert code == 1
    assert "vime: training failed after step 2: loss is not a number 5 times in a row (log: " in err


async def test_a_run_that_did_not_do_its_work_ends_with_the_reason_and_a_code_of_its_own(run_dir: Path) -> None:
    fleet(run_dir, steps=2, end="incomplete")
    await start_supervisor(run_dir)
    code, out, err = await ended(await vime("run", str(run_dir), "--join"))
    assert code == 3
    assert "vime: the run is incomplete: 16 of 48 prompts were given up" in err
    assert "r: incomplete" in out
    assert json.loads((run_dir / "summary.json").read_text())["reason"] == "16 of 48 prompts were given up"
    code, out, _ = await ended(await vime("status", str(run_dir)))
    assert out.startswith("r: incomplete  16 of 48 prompts were given up")


async def test_a_killed_launcher_is_started_again_by_the_driver(run_dir: Path) -> None:
    fleet(run_dir, steps=60)
    await start_supervisor(run_dir)
    driver = await vime("run", str(run_dir), "--join")
    await printed(driver, "step ")
    state = read_state(run_dir)
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    code, out, err = await ended(driver)
    assert code == 0, err
    assert "the launcher died and its services with it; it is started again" in out
    assert not alive(state.pid)


async def test_joining_where_nothing_runs_says_so(tmp_path: Path, recipe: Path) -> None:
    code, _, err = await ended(await vime("run", str(recipe), "--join", "--set", f'run.dir="{tmp_path}/none"'))
    assert code == 2
    assert "there is no run in" in err
    code, _, err = await ended(await vime("run", str(recipe), "--join", "--resume"))
    assert "exclude each other" in err


async def test_a_wrong_recipe_is_one_sentence_and_no_traceback(recipe: Path) -> None:
    code, _, err = await ended(await vime("run", str(recipe), "--set", "run.stepz=3"))
    assert code == 2
    assert err.strip() == 'vime: --set: unknown key "run.stepz"; did you mean "run.steps"?'


async def test_status_tells_phase_services_and_a_dead_launcher(run_dir: Path) -> None:
    services = {"buffer": ServiceState(state="running", pid=5, ready=True, deaths=2, last_end="signal SIGKILL")}
    write_state(run_dir, RunState(pid=1, phase="running", services=services))
    code, out, _ = await ended(await vime("status", str(run_dir)))
    assert code == 0
    assert "its launcher is dead" in out
    assert "signal SIGKILL" in out
    code, _, err = await ended(await vime("status", str(run_dir.parent)))
    assert code == 2
    assert "holds no run" in err


def test_status_tells_how_far_a_run_is_and_that_one_never_came_up(run_dir: Path) -> None:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  the console keeps it
    with pytest.raises(NothingKnown, match="never came up"):
        print_status(run_dir, console)
    services = {"a": ServiceState(state="gave_up", deaths=1, last_end="exit code 1", cause="ValueError: x")}
    write_state(run_dir, RunState(pid=1, phase="running", services=services))
    times = {1: 100.0, 2: 102.0, 3: 200.0, 4: 202.0}  # a restart before step 3
    rows = [{"step": step, "time": time, "rollout/raw_reward": 0.5} for step, time in times.items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_status(run_dir, console)
    text = console.export_text()
    assert "step 4 of 5, reward 0.5, about 2 s left" in text
    assert "exit code 1: ValueError: x" in text


def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """The command in this process: its exit code and all that it says."""
    monkeypatch.setattr(sys, "argv", ["vime", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    return caught.value.code, out + err


def test_a_path_that_cannot_be_is_a_sentence(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bytes_name = os.fsdecode(b"b\xff")
    (recipe.parent / bytes_name).mkdir()
    (recipe.parent / bytes_name / "r.toml").write_bytes(recipe.read_bytes())
    inside = f"run.dir={recipe.parent}"
    cases = {
        ("run", str(recipe), "--set", f"run.dir={recipe}"): "recipe.toml/r/services: Not a directory",
        ("run", str(recipe), "--set", inside, "--name", "x" * 300): "File name too long",
        ("run", str(recipe), "--set", inside, "--set", f"model.path={bytes_name}"): "is not UTF-8",
        ("run", str(recipe.parent / bytes_name), "--resume"): "b\\udcff is neither a recipe nor a run folder",
        ("status", str(recipe)): "Not a directory",
        ("status", bytes_name): "b\\udcff holds no run",
        ("report", bytes_name): "run folder b\\udcff does not exist",
    }
    for arguments, sentence in cases.items():
        code, said = called(monkeypatch, capsys, *arguments)
        assert code in (1, 2), arguments
        assert sentence in said, arguments
    monkeypatch.chdir(recipe.parent / bytes_name)
    (recipe.parent / "model").rename(Path("model"))
    for name in ("reward.py", "train.jsonl"):
        (recipe.parent / name).rename(name)
    code, said = called(monkeypatch, capsys, "run", "r.toml", "--dry-run")
    assert (code, "which no settings file can hold" in said) == (2, True)


def test_a_dry_run_that_finds_nothing_says_so_beside_the_recipe(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def accepted(*_: object) -> dict[str, str]:
        return {}

    monkeypatch.setattr("vime_client.driver.run.preflight", accepted)
    monkeypatch.setattr(sys, "argv", ["vime", "run", str(recipe), "--dry-run"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    said = capsys.readouterr()
    assert said.err == "nothing is wrong\n"
    assert tomllib.loads(said.out)["run"]["name"] == "r"


def test_the_nearest_command_is_named_and_versions_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = called(monkeypatch, capsys, "--version")
    assert (code, said.startswith("vime-protos ")) == (0, True)
    assert "Did you mean 'status'?" in called(monkeypatch, capsys, "statu", "x")[1]
    assert "--dry-run" in called(monkeypatch, capsys, "run", "--dryrun")[1]


ODD = "[/data/x] is full [bold]"


def test_what_looks_like_markup_is_printed_letter_by_letter(tmp_path: Path) -> None:
    run_dir = tmp_path / "[red]r"
    services = {"[/a]": ServiceState(state="running", pid=5, last_end=ODD)}
    write = Console(width=200, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115  the console keeps it
    (run_dir / "services").mkdir(parents=True)
    write_state(run_dir, RunState(pid=1, phase="failed", reason=ODD, services=services, activity=ODD))
    rows = [{"step": step, "rollout/raw_reward": 0.5} for step in (1, 2)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "evals.jsonl").write_text(json.dumps({"step": 1, "table": "eval/[/x]", "eval/[/x]": 0.5}) + "\n")
    print_status(run_dir, write)
    text = write.export_text()
    assert text.count(ODD) == 2
    assert "[red]r: failed" in text
    assert "[/a]" in text
    history, summary = build_report(run_dir)
    show(write, run_dir, history, {**summary, "evals": {"eval/[/x]": {"before": 0.1, "after": 0.2, "n": 3}}})
    text = write.export_text()
    assert "[red]r: failed" in text
    assert "eval/[/x], before" in text
    assert f"report: {run_dir}/report.html" in text
    progress = Progress("[/r]", 10, evals={"eval/[/x]": {1: 0.5}})
    progress.activity, progress.state = ODD, read_state(run_dir)
    panel = Panel(write, progress)
    write.print(panel._draw())
    panel.event(ODD)
    text = write.export_text()
    for part in ("[/r]", "eval/[/x]", "[/a]", ODD):
        assert part in text


def test_a_report_that_cannot_be_written_does_not_hide_why_the_run_failed(run_dir: Path) -> None:
    (run_dir / "summary.json.new").mkdir()
    text = io.StringIO()
    console = Console(file=text, width=1000)
    state = RunState(pid=1, phase="failed", reason="no more memory", log=str(run_dir / "logs" / "trainer.log"))
    assert _conclude(run_dir, state, console, console, []) == 1
    assert f"the report cannot be written: {run_dir}/summary.json.new: Is a directory" in text.getvalue()
    assert f"vime: no more memory (log: {run_dir}/logs/trainer.log)" in text.getvalue()


def train_to(run_dir: Path, step: int) -> None:
    """What a run leaves that trained so far, with a checkpoint and its model."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints" / "latest").write_text(f"step_{step:06d}\n")
    (run_dir / "hf" / f"step_{step:06d}").mkdir(parents=True, exist_ok=True)


def quiet_drive(
    monkeypatch: pytest.MonkeyPatch, place: Path, mode: Any, *overrides: str, from_step: int | None = None
) -> tuple[int | None, str]:
    """`vime run` up to where services would start: the exit code, None if they would; and all that it says."""

    async def answers(plan: RunPlan, *_: object) -> dict[str, str]:
        return {"trainer": 'trainer = { steps = 5, faults = { max_restarts = 5 } }\nserver = { host = "127.0.0.1" }\n'}

    async def would_start(*_: object, **__: object) -> int:
        raise NotImplementedError

    monkeypatch.setattr("vime_client.driver.run.preflight", answers)
    monkeypatch.setattr("vime_client.driver.run._drive", would_start)
    text = io.StringIO()
    console = Console(file=text, width=1000)
    try:
        return drive(place, RunOptions(overrides, mode=mode, from_step=from_step), console, console), text.getvalue()
    except NotImplementedError:
        return None, text.getvalue()


def test_a_run_whose_last_step_is_done_says_so_and_starts_nothing(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, place = tmp_path / "r", f'run.dir="{tmp_path}"'
    assert quiet_drive(monkeypatch, recipe, "new", place) == (None, "")
    train_to(folder, 5)
    write_state(folder, RunState(pid=1, phase="finished"))
    code, said = quiet_drive(monkeypatch, recipe, "resume", place)
    assert code == 0
    assert said.startswith("nothing is left to train: step 5 of 5 is done")
    assert f"trained model: {folder}/hf/step_000005" in said
    assert quiet_drive(monkeypatch, folder, "resume", from_step=5)[0] == 0
    assert quiet_drive(monkeypatch, recipe, "resume", place, "run.steps=6")[0] is None
    write_state(folder, RunState(pid=1, phase="incomplete", reason="16 of 48 prompts were given up"))
    assert quiet_drive(monkeypatch, recipe, "resume", place)[0] == 3
    write_state(folder, RunState(pid=1, phase="failed"))  # such as in the last evaluation, after the last checkpoint
    assert quiet_drive(monkeypatch, recipe, "resume", place)[0] is None


def test_a_run_that_trained_nothing_keeps_its_name_from_nobody(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f'run.dir="{tmp_path}"'
    quiet_drive(monkeypatch, recipe, "new", place)
    write_state(tmp_path / "r", RunState(pid=1, phase="failed", reason="no tokenizer"))
    with hold(tmp_path / "r", "driver"):  # it is only being started
        assert quiet_drive(monkeypatch, recipe, "new", place)[0] == 2
    code, said = quiet_drive(monkeypatch, recipe, "new", place)
    assert code is None
    assert said == f"r trained nothing before; its folder is now {tmp_path}/r.1\n"
    said = quiet_drive(monkeypatch, recipe, "resume", place)[1]
    assert "has no checkpoint: the run starts anew, from the starting model" in said


def test_a_resume_with_other_settings_keeps_the_record_of_those_before(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = f'run.dir="{tmp_path}"', tmp_path / "r"
    quiet_drive(monkeypatch, recipe, "new", place)
    train_to(folder, 2)
    assert quiet_drive(monkeypatch, recipe, "resume", place) == (None, "")
    said = quiet_drive(monkeypatch, recipe, "resume", place, "trainer.engine.optimizer.lr=2e-4")[1]
    change = "trainer.engine.optimizer.lr 1e-05 → 0.0002"
    assert said == f"changed since the last start: {change} (before: config.1.toml)\n"
    lrs = [load_recipe(folder / name).trainer["engine"]["optimizer"]["lr"] for name in ("config.toml", "config.1.toml")]
    assert lrs == [2e-4, 1e-5]

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    record = (folder / "config.toml").read_text()
    before = load_recipe(folder / "config.1.toml")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_record(before, folder, "")
    assert (folder / "config.toml").read_text() == record  # the run can still be resumed from its folder
    assert "# trainer: trainer.faults.max_restarts = 5\n" in record  # a default of the service, which nobody wrote
    assert "# trainer: trainer.steps" not in record


def test_a_run_is_never_begun_over_another(tmp_path: Path) -> None:
    path = tmp_path / "r"
    first = open_folder(path, "new", tmp_path)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(FolderRefused, match=r"--resume.*--fresh.*--name"):
        open_folder(path, "new", tmp_path)
    assert open_folder(path, "resume", tmp_path).run_id == first.run_id
    fresh = open_folder(path, "fresh", tmp_path)
    assert fresh.run_id != first.run_id
    assert (tmp_path / "r.1" / "services" / "run.json").exists()
    with pytest.raises(FolderRefused, match="no run in"):
        open_folder(tmp_path / "other", "resume", tmp_path)


def test_a_resumed_run_adds_up_its_time_and_keeps_its_ports(tmp_path: Path) -> None:
    path = tmp_path / "r"
    open_folder(path, "new", tmp_path)
    ports = ports_of(path, ["buffer", "router"], {})
    write_state(path, RunState(pid=1, phase="stopped", started=100.0, ended=130.0))
    for _ in range(2):  # the first time a preflight refused the recipe, and nothing started
        open_folder(path, "resume", tmp_path)
        assert run_seconds(path) == 30.0
    write_state(path, RunState(pid=1, phase="finished", started=200.0, ended=205.0))
    assert run_seconds(path) == 35.0
    open_folder(path, "resume", tmp_path)
    assert run_seconds(path) == 35.0
    assert ports_of(path, ["buffer", "router"], {}) == ports
    assert ports_of(path, ["buffer", "router"], {"buffer": 31999})["buffer"] == 31999


def test_a_fresh_start_that_is_refused_leaves_the_old_run_where_it_was(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> None:
        raise ConfigError(["no such option"])

    monkeypatch.setattr("vime_client.driver.run.preflight", refused)
    runs = tmp_path / "runs"
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115  the console keeps it
    overrides = (f'run.dir="{runs}"',)
    assert drive(recipe, RunOptions(overrides), console, console) == 2
    assert list(runs.iterdir()) == []
    old = open_folder(runs / "r", "new", recipe.parent)
    assert drive(recipe, RunOptions(overrides, mode="fresh"), console, console) == 2
    assert [path.name for path in runs.iterdir()] == ["r"]
    assert read_run(runs / "r")["run_id"] == old.run_id


@pytest.mark.parametrize("cause", [ConfigError(["no such option"]), KeyboardInterrupt()])
def test_a_refused_start_leaves_a_strangers_files(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, cause: BaseException
) -> None:
    async def refused(*_: object) -> None:
        raise cause

    monkeypatch.setattr("vime_client.driver.run.preflight", refused)
    folder = tmp_path / "runs" / "r"
    (folder / "services").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "services" / "mine.toml").write_text("mine")
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115  the console keeps it
    with contextlib.suppress(KeyboardInterrupt):
        drive(recipe, RunOptions((f'run.dir="{folder.parent}"',)), console, console)
    assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "services"]


def test_a_folder_that_cannot_be_put_back_does_not_hide_why_the_run_was_refused(tmp_path: Path) -> None:
    path = tmp_path / "r"
    open_folder(path, "new", tmp_path)
    fresh = open_folder(path, "fresh", tmp_path)
    shutil.rmtree(tmp_path / "r.1")  # somebody was faster
    fresh.undo()


def test_a_start_that_is_interrupted_while_the_folder_is_made_leaves_the_old_run_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r"
    old = open_folder(path, "new", tmp_path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vime_client.driver.folder._write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_folder(path, "fresh", tmp_path)
    assert read_run(path)["run_id"] == old.run_id


def test_no_star_is_ever_a_value(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def accepted(*_: object) -> dict[str, str]:
        return {}

    async def ended(*_: object, **__: object) -> int:
        return 0

    monkeypatch.setattr("vime_client.driver.run.preflight", accepted)
    monkeypatch.setattr("vime_client.driver.run._drive", ended)
    errors = io.StringIO()
    console = Console(file=errors)
    with recipe.open("a") as file:
        file.write('\n[launcher.env]\nHF_TOKEN = "HUGGING"\nPLAIN = "1"\n\n[rollout.vllm.args]\napi_key = ["KEY"]\n')
    base = RunOptions((f'run.dir="{tmp_path / "runs"}"',))
    assert drive(recipe, base, console, console) == 0
    folder = tmp_path / "runs" / "r"
    assert STARS in (folder / "config.toml").read_text()
    assert drive(folder, RunOptions(base.overrides, mode="resume"), console, console) == 0  # its private file has them
    env = load_plan(folder).env
    assert (env["HF_TOKEN"], env["PLAIN"]) == ("HUGGING", "1")
    assert 'api_key = [\n    "KEY",\n]' in (folder / "services" / "rollout-0.toml").read_text()
    (folder / "services" / "recipe.toml").unlink()  # as a copy of the folder's config.toml, or one of an older version
    for place in (folder, folder / "config.toml"):  # nothing in the environment: refused, lists of secrets too
        options = RunOptions(base.overrides, mode="resume")
        assert drive(place, options, console, console) == 2
        assert "launcher.env.HF_TOKEN of this run is a secret" in " ".join(errors.getvalue().split())
        assert "rollout.vllm.args.api_key" in errors.getvalue()
        errors.truncate(0)
    monkeypatch.setenv("HF_TOKEN", "in this shell only")
    monkeypatch.setenv("PLAIN", "1")
    options = RunOptions((*base.overrides, 'rollout.vllm.args.api_key=["KEY"]'), mode="resume")
    for place in (folder, folder / "config.toml"):
        assert drive(place, options, console, console) == 0
        assert "HF_TOKEN" not in load_plan(folder).env  # a launcher that is started from another shell goes by this
        told = [path for path in (folder / "services").iterdir() if path.name != "recipe.toml"]  # of services
        assert not [path for path in told if STARS in path.read_text()]
    monkeypatch.delenv("HF_TOKEN")
    (folder / "services" / "recipe.toml").unlink()
    assert drive(folder, options, console, console) == 2  # it is still known that there was one


def service(tmp_path: Path, name: str, code: str) -> ServicePlan:
    script = tmp_path / f"{name}.py"
    script.write_text(code)
    config = tmp_path / f"{name}.toml"
    argv = [sys.executable, str(script), "--config", str(config), "--set", "server.parent_pid={supervisor_pid}"]
    return ServicePlan(name=name, package=f"vime_{name}", argv=argv, log=tmp_path / "log")


async def test_every_services_complaint_is_told_in_the_recipes_words(tmp_path: Path) -> None:
    said = f"vime-buffer: {tmp_path}/buffer.toml:7: unknown key 'buffer.tables.train.x'; did you mean y?"
    buffer = service(tmp_path, "buffer", f"import sys\nsys.stderr.write({said!r})\nsys.exit(2)\n")
    router = service(tmp_path, "router", "import sys\nassert sys.argv[-1] == '--dry-run' and '--set' not in sys.argv")
    rollout = service(tmp_path, "rollout-0", "raise RuntimeError('no such device')")
    missing = ServicePlan(
        name="trainer",
        package="vime_nothere",
        argv=[sys.executable, "-m", "vime_nothere", "--config", "x"],
        log=tmp_path / "log",
    )
    plan = RunPlan(run_id="r", services=[buffer, router, rollout, missing])
    with pytest.raises(ConfigError) as caught:
        await preflight(plan, Path("my.toml"), print)
    assert caught.value.problems[0] == "my.toml: [buffer] unknown key 'tables.train.x'; did you mean y?"
    assert 'service "rollout-0" refuses its settings: RuntimeError: no such device' in caught.value.problems[1]
    assert "needs the Python package vime_nothere" in caught.value.problems[2]
    assert "pip install vime-nothere" in caught.value.problems[2]
    assert len(caught.value.problems) == 3


async def test_no_process_takes_modules_from_the_folder_where_it_is_called(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "called from here"
    folder.mkdir()
    (folder / "random.py").write_text("raise ImportError('the folder where it is called')\n")
    monkeypatch.chdir(folder)
    run_dir = tmp_path / "runs" / "r"
    loaded = load_recipe(recipe, ['rewards.strict="reward.py:score"', "tables.eval/heldout.sampling={max_tokens=8}"])
    plan = write_plan(loaded, recipe.parent, run_dir, "r", choose_ports(service_names(loaded), {}))
    light = [s for s in plan.services if s.name in ("buffer", "router", "worker-0")]
    answers = await preflight(plan.model_copy(update={"services": light}), recipe, print)
    assert "queue_timeout_s" in answers["router"]
    # Also what services start: programs of their own with `-m`, as vLLM and torchrun do.
    script = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'this'], check=True); import random, time"
    (tmp_path / "starter.py").write_text(script + "\nprint('up', random, flush=True)\ntime.sleep(60)\n")
    argv = [sys.executable, str(tmp_path / "starter.py")]
    make_plan(run_dir, [ServicePlan(name="a", package="a", argv=argv, log=run_dir / "logs" / "a.log")])
    (folder / "this.py").write_text("raise ImportError('the folder where it is called')\n")
    await start_supervisor(run_dir)
    await wait_until(lambda: "up" in (run_dir / "logs" / "a.log").read_text(), 30)
    await stop_supervisor(run_dir, 10)
    assert "folder where" not in (run_dir / "logs" / "a.log").read_text()


async def test_a_check_that_goes_on_is_waited_for_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime_client.launcher.preflight._SAY_S", 0.3)
    slow = service(tmp_path, "trainer", "import time\ntime.sleep(1.5)\n")
    plan = RunPlan(run_id="r", services=[slow], limits=LauncherSection(ready_timeout_s=0.5))
    done = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(patience, "_effort", lambda _: float(next(done)))  # it computes all the time
        patch.setattr(patience, "_LONGEST", 1000)
        said: list[str] = []
        await preflight(plan, Path("my.toml"), said.append)
    assert said[0].startswith("checking the settings: waits for trainer (")
    idle = service(tmp_path, "trainer", "import time\ntime.sleep(60)\n")
    monkeypatch.setattr(patience, "_effort", lambda _: 0.0)
    with pytest.raises(ConfigError, match=r"nothing was done for 0.5 s \(launcher.ready_timeout_s = 0.5\)"):
        await preflight(plan.model_copy(update={"services": [idle]}), Path("my.toml"), said.append)


async def test_a_services_complaint_names_the_recipes_line(tmp_path: Path) -> None:
    recipe = tmp_path / "my.toml"
    algorithm = "[trainer.algorithm]\nestimator = 'ppo'\n"
    recipe.write_text(f"{algorithm}[tables.'eval/a']\nmax_tokens = 3\n[model]\npath = 'm'\n")
    (tmp_path / "trainer.toml").write_text(f"[trainer]\nmodel_path = '/m'\n{algorithm}lam = 2\n")
    (tmp_path / "buffer.toml").write_text("[buffer.tables.'eval/a']\nmax_tokens = 3\n")
    said = [
        f"vime-trainer: {tmp_path}/trainer.toml:4: trainer.algorithm.estimator: wrong",
        f"vime-trainer: {tmp_path}/trainer.toml:2: trainer.model_path: gone",
        f"vime-trainer: {tmp_path}/trainer.toml:5: trainer.algorithm.lam: too large",
        f"vime-trainer: {tmp_path}/trainer.toml: no place",
    ]
    trainer = service(tmp_path, "trainer", f"import sys\nsys.stderr.write({chr(10).join(said)!r})\nsys.exit(2)\n")
    line = f"vime-buffer: {tmp_path}/buffer.toml:2: buffer.tables.eval/a.max_tokens: too few"
    buffer = service(tmp_path, "buffer", f"import sys\nsys.stderr.write({line!r})\nsys.exit(2)\n")
    with pytest.raises(ConfigError) as caught:
        await preflight(RunPlan(run_id="r", services=[trainer, buffer]), recipe, print, ["trainer.algorithm.lam=2"])
    assert caught.value.problems == (
        f"{recipe}:2: trainer.algorithm.estimator: wrong",
        f"{recipe}:6: model.path: gone",
        "--set: trainer.algorithm.lam: too large",
        f"{recipe}: [trainer] no place",
        f"{recipe}:4: tables.eval/a.max_tokens: too few",
    )


def step(number: int, reward: float) -> pb.WatchResponse:
    metrics = {"rollout/raw_reward": reward, "perf/step_time": 2.0, "perf/train_wait_time": 0.5}
    return pb.WatchResponse(sequence=number, step=pb.StepReport(train_step=number, metrics=metrics))


def test_events_that_come_again_are_told_once() -> None:
    progress = Progress("r", 10)
    assert progress.take(step(1, 0.5)).startswith("step 1/10  reward 0.500")
    assert progress.take(step(1, 0.5)) == ""
    evaluation = pb.EvalReport(table="eval/a", step=0, metrics={"eval/a": 0.25, "eval/a/n": 512})
    assert progress.take(pb.WatchResponse(eval=evaluation)) == "eval/a at step 0: 0.250 (n = 512)"
    assert progress.take(pb.WatchResponse(eval=evaluation)) == ""
    progress.take(step(2, 1.0))
    assert progress.mean_reward() == 0.75


def test_the_panel_shows_numbers_services_and_what_is_waited_for() -> None:
    progress = Progress("r", 10)
    for number in range(1, 6):
        progress.take(step(number, number / 10))
    progress.take(pb.WatchResponse(status=pb.TrainerStatus(activity="step 6 waits: GENERATING", num_steps=10)))
    services = {"buffer": ServiceState(state="running", ready=True), "trainer": ServiceState(state="waiting", deaths=1)}
    progress.state = RunState(pid=1, phase="running", services=services)
    console = Console(width=120, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115  the console keeps it
    console.print(Panel(console, progress)._draw())
    text = console.export_text()
    for part in ("step 5/10", "0.500", "▁▂▄▆█", "buffer", "trainer (1 restarts)", "step 6 waits: GENERATING"):
        assert part in text


def test_time_left_is_judged_by_the_steps_that_this_display_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("vime_client.driver.display.time.monotonic", lambda: now[0])
    progress = Progress("r", 100, step=90)
    console = Console(width=160, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115  the console keeps it
    panel = Panel(console, progress)

    def drawn() -> str:
        console.print(panel._draw())
        return console.export_text()

    now[0] += 20
    assert "left" not in drawn()
    progress.take(step(91, 0.5))
    progress.take(step(92, 0.5))
    assert "about 80 s left" in drawn()  # 10 s a step, 8 to go


def test_lines_say_what_is_waited_for_only_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("vime_client.driver.display.time.monotonic", lambda: now[0])
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  the console keeps it
    progress = Progress("r", 10)
    lines = Lines(console, progress)
    progress.activity = "waits for engines"
    lines.refresh()
    now[0] += 6
    lines.refresh()
    lines.refresh()
    assert console.export_text(clear=False).count("waits for engines") == 1
    for _ in range(12):  # a minute later: said again, less and less often
        now[0] += 5
        lines.refresh()
    assert console.export_text().count("waits for engines") == 4


def test_what_fails_while_a_step_waits_is_told_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "worker-0.jsonl"
    log.parent.mkdir()

    def write(detail: str, **fields: object) -> None:
        with log.open("a") as file:
            file.write(json.dumps({"msg": f"prompt given up: {detail}", "fields": fields}) + "\n")

    write("of an earlier start", failure="generation")
    failures = Failures(tmp_path)
    assert failures.look() == ""
    write("prompt_token_ids is empty", failure="invalid")
    assert failures.look() == f"a prompt failed: prompt given up: prompt_token_ids is empty (log: {log})"
    write("a lease was lost", group_id="g1")
    write("no tokenizer at http://u:PASS@h", failure="generation")
    with log.open("a") as file:
        file.write('{"msg": "half of a li')
    progress = Progress("r", 10, activity="step 1 waits: generating", trouble=failures.look())
    told = f"2 prompts failed, the last: prompt given up: no tokenizer at http://{STARS}@h (log: {log})"
    assert progress.waits_for() == f"step 1 waits: generating; {told}"
    failures.forget()
    assert failures.look() == ""
    log.write_text("")
    write("anew", failure="generation")
    assert failures.look().startswith("a prompt failed: prompt given up: anew")


def test_a_sparkline_spans_least_to_greatest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([]) == ""
