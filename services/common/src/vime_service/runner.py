"""From the command line to an exit code: arguments, configuration, logs, telemetry, the service, the end.

def main() -> int:
    return service_cli("buffer", "vime-buffer", BufferConfig, run)

def run(config: BufferConfig) -> int:
    from vime_buffer.wiring import register      # heavy imports here: --help must answer at once
    return run_service("buffer", "vime-buffer", config, register)
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vime_client.config_loading import ConfigError, describe, load_config, to_toml

if TYPE_CHECKING:
    from vime_service.server import Register, Start
    from vime_service.server_config import ServiceConfig

ConfigT = TypeVar("ConfigT", bound="ServiceConfig")


@dataclass(frozen=True, slots=True)
class Checked:
    """What a dry run found beyond the settings, in sentences."""

    problems: Sequence[str] = ()
    """What keeps the service from working."""
    notes: Sequence[str] = ()
    """What is worth knowing."""


EXIT_FAILED = 1
EXIT_CONFIG = 2
"""Settings or data are wrong: starting again cannot help."""
_FINAL = ("INVALID_ARGUMENT", "ALREADY_EXISTS", "UNIMPLEMENTED", "DATA_LOSS")
"""Status codes of what no later start mends."""


def service_cli(
    name: str,
    dist: str,
    model: type[ConfigT],
    run: Callable[[ConfigT], int],
    argv: Sequence[str] | None = None,
    check: Callable[[ConfigT], Checked] | None = None,
) -> int:
    """Parse `--config --set --dry-run --version --help`, build the configuration, run the service.

    Args:
        name: the service.
        dist: its distribution.
        model: its configuration.
        run: runs it.
        argv: the command line, without the program; unset: this process's.
        check: what `--dry-run` looks at beyond the settings: the things that they name.

    Returns the exit code: what `run` returns, 1 if the service could not start, 2 for wrong settings or data.
    """
    arguments = _parser(name, dist, model).parse_args(argv)
    try:
        config = load_config(model, arguments.config, arguments.set, model.surroundings)
    except ConfigError as error:
        return _say(f"vime-{name}", *error.problems, code=EXIT_CONFIG)
    if arguments.dry_run:
        checked = check(config) if check else Checked()
        sys.stdout.write("".join([to_toml(config), *(f"# {note}\n" for note in checked.notes)]))
        return _say(f"vime-{name}", *checked.problems, code=EXIT_CONFIG if checked.problems else 0)
    try:
        return run(config)
    except KeyboardInterrupt:  # before the service took over the signals
        return 128 + signal.SIGINT


def run_service(name: str, dist: str, config: ServiceConfig, register: Register, start: Start | None = None) -> int:
    """Set up logs, telemetry and the parent watch, serve until stopped, leave in bounded time; the exit code.

    It is 2, as for a wrong configuration, where what the configuration names is wrong: a restart mends neither.
    """
    # Before gRPC is imported: its C++ core writes lines of its own to stderr beside each error that we report anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import asyncio

    from vime_client.logs import get_logger, setup_logging
    from vime_client.parent_watch import die_with_parent
    from vime_service.auth import StartupError
    from vime_service.errors import VimeError
    from vime_service.server import serve
    from vime_service.telemetry import setup_telemetry

    try:
        setup_logging(name, config.log)
        telemetry = setup_telemetry(name, dist, config.telemetry)
    except OSError as error:
        return _say(f"vime-{name}", f"cannot write logs or traces: {error}", code=EXIT_FAILED)
    if config.server.parent_pid is not None:
        stop_seconds = config.server.grace_seconds + config.server.cleanup_seconds + 2.0
        die_with_parent(config.server.parent_pid, kill_after_s=stop_seconds)
    limit = config.server.cleanup_seconds

    async def live() -> int:
        try:
            return await serve(name, dist, config.server, register, start, telemetry)
        finally:
            watchdogs.append(_end_in(limit))  # closing the loop waits for threads of its executor, however long

    watchdogs: list[threading.Timer] = []
    try:
        code = asyncio.run(live())
    except (StartupError, VimeError) as error:
        get_logger(__name__).debug("start-up refused", exc_info=error)
        final = isinstance(error, VimeError) and error.code in _FINAL
        code = _say(f"vime-{name}", str(error), code=EXIT_CONFIG if final else EXIT_FAILED)
    finally:
        for watchdog in watchdogs:
            watchdog.cancel()
        telemetry.shutdown()
        _end_in(limit, only_if_leaving=True)
    return code


def _parser(name: str, dist: str, model: type[ServiceConfig]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"vime-{name}",
        description=f"The {name} service of vime.",
        epilog="settings (TOML, or --set):\n  " + "\n  ".join(describe(model)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings; defaults without it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override one setting; may be repeated, last wins"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved settings as TOML and exit")
    parser.add_argument("--version", action=_Version, dist=dist, help="print the version and exit")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, dist: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)
        self._dist = dist

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version(self._dist)
        except PackageNotFoundError:
            found = "unknown (not installed)"
        sys.stdout.write(f"{self._dist} {found}\n")
        parser.exit(0)


def _say(program: str, *lines: str, code: int) -> int:
    for line in lines:
        sys.stderr.write(f"{program}: {line}\n")
    return code


def _end_in(seconds: float, *, only_if_leaving: bool = False) -> threading.Timer:
    """End the process in `seconds` if something still holds it up then, such as a thread stuck in a library.

    With `only_if_leaving` a main thread that goes on (a program that embeds the service) is left alone.
    """

    def end() -> None:
        if only_if_leaving and threading.main_thread().is_alive():
            return
        stuck = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        sys.stderr.write(f"still here {seconds:g} s after the service stopped, threads {stuck}: ending the process\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer
