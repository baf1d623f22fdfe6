"""`vime run`: from a recipe to an exit code."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vime_client.causes import last_lines
from vime_client.config_loading import ConfigError, to_toml
from vime_client.driver.checkpoints import last_step, rewind_to, trained_model
from vime_client.driver.display import make_display
from vime_client.driver.folder import FolderRefused, Mode, holds_run, open_folder, ports_of, read_run
from vime_client.driver.follow import LauncherDied, follow
from vime_client.driver.progress import Progress
from vime_client.driver.record import defaults_of, with_secrets, write_record
from vime_client.launcher.client import LauncherError, is_running, start_supervisor, stop_supervisor
from vime_client.launcher.cross_check import cross_problems
from vime_client.launcher.plan import RunPlan, load_plan, service_names, write_plan
from vime_client.launcher.ports import PortBusy, choose_ports
from vime_client.launcher.preflight import preflight
from vime_client.launcher.state import RunState, hold, read_state
from vime_client.recipe import Recipe, load_recipe
from vime_client.redaction import starred_keys
from vime_client.report.build import build_report
from vime_client.report.history import read_history
from vime_client.report.terminal import show

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INCOMPLETE = 3
_STOP_MARGIN_S = 10.0
_LOG_LINES = 15
_STRAY_BYTES = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes that are not UTF-8."""


@dataclass(frozen=True)
class RunOptions:
    """What the command line says beside the recipe."""

    overrides: tuple[str, ...] = ()
    """Each `a.b=c`."""
    name: str | None = None
    """Replaces `run.name`."""
    mode: Mode = "new"
    """Whether to begin or to continue."""
    join: bool = False
    """Only look at a run that goes on."""
    dry_run: bool = False
    """Only check everything and print the resolved recipe."""
    from_step: int | None = None
    """When continuing: go back to the checkpoint of this step."""


def run(recipe_path: Path, options: RunOptions, console: Console, errors: Console) -> int:
    """Run a recipe to its end; the exit code. Problems are sentences on `errors`."""
    try:
        recipe, base_dir, run_dir = load_run(recipe_path, options)
        if options.dry_run:
            asyncio.run(_dry_run(recipe, recipe_path, base_dir, console, errors, options.overrides))
            return 0
        if options.mode == "resume" and (end := _ended_before(recipe, run_dir, options.from_step)) is not None:
            console.out(_nothing_left(recipe, run_dir), highlight=False)
            return _exit_code(end, errors)
        if not options.join:
            _prepare(recipe, recipe_path, base_dir, run_dir, options.mode, console, errors, options.overrides)
            if options.from_step is not None:
                rewind_to(run_dir, options.from_step)
        elif not holds_run(run_dir):
            raise FolderRefused(f"there is no run in {run_dir} to join")
        return asyncio.run(_drive(run_dir, recipe, console, errors, start=not options.join))
    except ConfigError as error:
        _say(errors, *error.problems)
    except (FolderRefused, PortBusy) as error:
        _say(errors, str(error))
    except (LauncherError, LauncherDied) as error:
        _say(errors, str(error))
        return EXIT_FAILED
    return EXIT_REFUSED


def load_run(path: Path, options: RunOptions) -> tuple[Recipe, Path, Path]:
    """The recipe, the folder its modules are found in, and the run folder. A run folder stands for its own recipe.

    Raises:
        ConfigError: the recipe is wrong, or a run is to start from a config.toml alone, which lacks the secrets.
        FolderRefused: the folder holds no run.
    """
    if path.is_dir():
        if not (path / "config.toml").is_file():
            raise ConfigError([f"{path} is neither a recipe nor a run folder: it has no config.toml"])
        recipe = with_secrets(load_recipe(path / "config.toml", options.overrides), path)
    else:
        recipe = load_recipe(path, options.overrides, options.name)
    if not options.join and (lacking := _lacking_secrets(recipe)):  # a copy of a config.toml lacks them, too
        say = "{} of this run is a secret, which config.toml does not keep: continue with vime run RECIPE --resume"
        raise ConfigError([say.format(key) for key in lacking])
    if path.is_dir():
        base_dir, run_dir = Path(read_run(path).get("base_dir", path)), path.resolve()
    else:
        base_dir, run_dir = path.parent.absolute(), recipe.run_dir
    for what, place in (("recipe's folder", base_dir), ("run folder", run_dir)):
        if _STRAY_BYTES.search(str(place)):
            raise FolderRefused(f"the {what} {place} has a name that is not UTF-8, which no settings file can hold")
    return recipe, base_dir, run_dir


def _lacking_secrets(recipe: Recipe) -> list[str]:
    """Keys with stars instead of a value; what the user's environment sets goes before the recipe's anyway."""
    given = {f"launcher.env.{name}" for name in os.environ}
    return [key for key in starred_keys(recipe.model_dump(mode="json", by_alias=True)) if key not in given]


def _ended_before(recipe: Recipe, run_dir: Path, from_step: int | None) -> RunState | None:
    """How the run to resume ended, if its last step is done: then nothing is started for it."""
    step = last_step(run_dir) if from_step is None else from_step
    state = read_state(run_dir)
    done = step is not None and step >= recipe.run.steps and state is not None and not is_running(run_dir)
    return state if done and state is not None and state.phase in ("finished", "incomplete") else None


def _nothing_left(recipe: Recipe, run_dir: Path) -> str:
    more = "a larger run.steps would train on"
    return f"nothing is left to train: step {recipe.run.steps} of {recipe.run.steps} is done; {more}{_model(run_dir)}"


def _model(run_dir: Path) -> str:
    folder = trained_model(run_dir)
    return f"\ntrained model: {folder}" if folder else ""


def _prepare(
    recipe: Recipe,
    recipe_path: Path,
    base_dir: Path,
    run_dir: Path,
    mode: Mode,
    console: Console,
    errors: Console,
    overrides: Sequence[str] = (),
) -> None:
    """Write the run folder's configuration, and have every service check its own."""
    folder = open_folder(run_dir, mode, base_dir)
    try:
        if folder.aside is not None and mode == "new":
            console.out(f"{run_dir.name} trained nothing before; its folder is now {folder.aside}", highlight=False)
        if mode == "resume" and last_step(run_dir) is None:
            console.out(f"{run_dir} has no checkpoint: the run starts anew, from the starting model", highlight=False)
        with hold(run_dir, "driver"):  # another start under this name must not take the folder for one that failed
            ports = ports_of(run_dir, service_names(recipe), recipe.launcher.ports)
            plan = write_plan(recipe, base_dir, run_dir, folder.run_id, ports)
            answers = asyncio.run(
                preflight(plan, recipe_path, lambda line: _tell(errors, line), overrides, cross_problems(recipe))
            )
            changes = write_record(recipe, run_dir, defaults_of(plan, answers))
        if changes:
            console.out(changes, highlight=False)
    except BaseException:  # whatever it was, such as Ctrl-C: the corrected recipe must find no run in its way
        folder.undo()
        raise


async def _dry_run(
    recipe: Recipe, recipe_path: Path, base_dir: Path, console: Console, errors: Console, overrides: Sequence[str]
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary) / recipe.run.name
        ports = choose_ports(service_names(recipe), recipe.launcher.ports)
        plan = write_plan(recipe, base_dir, run_dir, "dry-run", ports)
        answers = await preflight(
            plan, recipe_path, lambda line: _tell(errors, line), overrides, cross_problems(recipe)
        )
        defaults = defaults_of(plan, answers)
    console.out(to_toml(recipe) + defaults, highlight=False, end="")
    _tell(errors, "nothing is wrong")


async def _drive(run_dir: Path, recipe: Recipe, console: Console, errors: Console, *, start: bool) -> int:
    stop = asyncio.Event()
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def interrupted(signum: int) -> None:
        again = bool(received)
        received.append(signum)
        stop.set()
        text = "still stopping, this is bounded" if again else "stopping: workers, trainer, engines, router, buffer"
        errors.print(f"\n{text} ...", highlight=False)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, interrupted, int(signum))
    with hold(run_dir, "driver"):
        plan = load_plan(run_dir)
        progress = Progress(recipe.run.name, recipe.run.steps)
        progress.seed(read_history(run_dir))
        if start:
            console.out(f"run {run_dir}: starting {', '.join(s.name for s in plan.services)}", highlight=False)
            await start_supervisor(run_dir)
        state = await _follow(run_dir, plan, progress, console, stop)
        await stop_supervisor(run_dir, plan.limits.stop_timeout_s + _STOP_MARGIN_S)
    return _conclude(run_dir, state, console, errors, received)


async def _follow(
    run_dir: Path, plan: RunPlan, progress: Progress, console: Console, stop: asyncio.Event
) -> RunState | None:
    if not is_running(run_dir):  # joined after the end
        return read_state(run_dir)
    with make_display(console, progress) as display:
        return await follow(run_dir, plan.trainer, progress, display, stop)


def _conclude(run_dir: Path, state: RunState | None, console: Console, errors: Console, received: list[int]) -> int:
    """Report, table, picture, and the reason if it did not end well."""
    try:
        history, summary = build_report(run_dir)
    except OSError as error:  # such as a full disk: why the run ended is still told
        _say(errors, f"the report cannot be written: {error.filename}: {error.strerror}")
    else:
        if history.steps:
            show(console, run_dir, history, summary)
    if model := _model(run_dir):
        console.out(model.strip(), highlight=False)
    if received:
        errors.out(f"stopped; continue with --resume ({run_dir})", highlight=False)
        return 128 + received[0]
    if state is not None and state.phase in ("finished", "incomplete"):
        return _exit_code(state, errors)
    if state is not None and state.phase == "failed":
        for line in last_lines(Path(state.log), _LOG_LINES) if state.log else []:
            errors.print(f"  {state.failed_service} | {line}", markup=False, highlight=False, soft_wrap=True)
        _say(errors, f"{state.reason}" + (f" (log: {state.log})" if state.log and "(log: " not in state.reason else ""))
    else:
        _say(errors, f"the run did not finish: {state.reason if state else 'nothing is known of its end'}")
    return EXIT_FAILED


def _exit_code(state: RunState, errors: Console) -> int:
    """Of a run that ended in good order, with what is to be said of it."""
    if state.phase == "finished":
        if state.reason:
            _say(errors, state.reason)
        return 0
    _say(errors, f"the run is incomplete: {state.reason}")
    return EXIT_INCOMPLETE


def _tell(errors: Console, line: str) -> None:
    errors.print(line, markup=False, highlight=False, soft_wrap=True)


def _say(errors: Console, *lines: str) -> None:
    for line in lines:
        errors.print(f"vime: {line}", markup=False, highlight=False, soft_wrap=True)
