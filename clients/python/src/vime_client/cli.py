"""The command line. What is heavy is imported by the command that needs it: `vime --help` answers at once."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="vime",
    help="RL post-training: Megatron trains, vLLM generates, a router and a durable buffer stand between.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _text(value: list[str] | str | None) -> list[str] | str | None:
    """Refuse bytes that are not UTF-8: no settings file could hold them."""
    for text in [value] if isinstance(value, str) else value or []:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter(f"{text} is not UTF-8, which every settings file is") from None
    return value


Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated.", callback=_text),
]


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, typer.Option("--version", help="Print the versions.", callback=_version, is_eager=True)] = False,
) -> None: ...


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="Recipe (TOML), or a run folder with --resume or --join.")],
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nothing changes it
    name: Annotated[str | None, typer.Option(help="Name of the run and its folder.", callback=_text)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the resolved recipe.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    from_step: Annotated[
        int | None, typer.Option(metavar="STEP", help="With --resume: go back to the kept checkpoint of this step.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew; an old folder is moved aside.")] = False,
    join: Annotated[bool, typer.Option("--join", help="Watch a run that goes on, after its driver died.")] = False,
) -> None:
    """Run a recipe: start the services, watch, end with a report."""
    if sum((resume, fresh, join)) > 1:
        _end("--resume, --fresh and --join exclude each other")
    if from_step is not None and not resume:
        _end("--from-step goes with --resume")
    _quiet_grpc()
    from rich.console import Console

    from vime_client.driver.run import RunOptions
    from vime_client.driver.run import run as drive

    options = RunOptions(
        overrides=tuple(overrides),
        name=name,
        mode="resume" if resume else "fresh" if fresh else "new",
        join=join,
        dry_run=dry_run,
        from_step=from_step,
    )
    raise typer.Exit(drive(recipe, options, Console(), Console(stderr=True)))


@app.command()
def worker(
    recipe: Annotated[Path, typer.Argument(help="Recipe (TOML).")],
    buffer: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the buffer.")],
    router: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the router.")],
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Run one more rollout worker, on any host, until SIGTERM."""
    _quiet_grpc()
    from vime_client.config_loading import ConfigError
    from vime_client.recipe import load_recipe
    from vime_client.worker.__main__ import run as work
    from vime_client.worker.config import WorkerConfig, worker_settings

    try:
        loaded = load_recipe(recipe, overrides)
    except ConfigError as error:
        _end(*error.problems)
    settings = worker_settings(loaded, recipe.parent.absolute(), buffer, router)
    raise typer.Exit(work(WorkerConfig(worker=settings)))


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Write report.html and summary.json again, and show them."""
    from rich.console import Console

    from vime_client.report.build import NoRun, build_report
    from vime_client.report.terminal import show

    try:
        history, summary = build_report(run_dir)
    except NoRun as error:
        _end(str(error))
    show(Console(), run_dir, history, summary)


@app.command()
def status(run_dir: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Say how a run stands, from its folder."""
    from rich.console import Console

    from vime_client.driver.status import NothingKnown, print_status

    try:
        print_status(run_dir, Console())
    except NothingKnown as error:
        _end(str(error))


@app.command()
def buffer(
    where: Annotated[str, typer.Argument(metavar="RUN|HOST:PORT", help="Run folder, or the address of a buffer.")],
    group: Annotated[
        str | None,
        typer.Option(metavar="GROUP#ATTEMPT", help="Print this quarantined group as JSON, for vime inspect."),
    ] = None,
) -> None:
    """Show a buffer's tables: counts, laws, what blocks them, and the groups that training could not use."""
    _quiet_grpc()
    from rich.console import Console

    from vime_client.driver.tables import NoBuffer, print_group, print_tables

    try:
        if group is None:
            print_tables(where, Console())
        else:
            print_group(where, group)
    except NoBuffer as error:
        _end(str(error))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def inspect(context: typer.Context) -> None:
    """Show what the algorithms make of a batch (advantages, masks, losses); see `vime inspect --help`."""
    import importlib.util

    if importlib.util.find_spec("vime_trainer") is None:
        _end(f"vime inspect needs the package vime-trainer, which {sys.executable} does not have")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "vime_trainer.inspect_cli", *context.args])


@app.command()
def version() -> None:
    """Print the versions of everything of vime that is installed here."""
    from importlib import metadata

    for dist in ("protos", "client", "service", "buffer", "router", "rollout", "trainer"):
        try:
            typer.echo(f"vime-{dist} {metadata.version(f'vime-{dist}')}")
        except metadata.PackageNotFoundError:
            typer.echo(f"vime-{dist} is not installed")


def main() -> None:
    """Entry point of `vime`. What the system refuses (a full disk, a path that is a file) is a sentence here."""
    for stream in (sys.stdout, sys.stderr):  # names of files are bytes, which need not be text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except BrokenPipeError:  # who reads us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = error.filename2 or error.filename
        _fail(f"{os.fsdecode(where)}: {error.strerror}" if where else str(error))


def _quiet_grpc() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported; failed calls are told by us


def _fail(line: str) -> None:
    sys.stderr.write(f"vime: {line}\n")
    sys.exit(1)


def _end(*lines: str) -> None:
    for line in lines:
        typer.echo(f"vime: {line}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    main()
