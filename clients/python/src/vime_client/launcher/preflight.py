"""Ask every service whether its settings can work, before any is started. Each problem is one sentence."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vime_client.clock import MonotonicClock
from vime_client.config_loading import ConfigError, Key, Written, dotted, parse_override
from vime_client.launcher.patience import Patience, waits_for
from vime_client.launcher.plan import RunPlan, ServicePlan, service_env
from vime_client.launcher.process import REAP_S

_SAY_S = 5.0


async def preflight(
    plan: RunPlan,
    recipe: Path,
    say: Callable[[str], None],
    overrides: Sequence[str] = (),
    found: Iterable[tuple[Key, str]] = (),
) -> dict[str, str]:
    """Run each service with `--dry-run`, all at once; the settings that each would use, as TOML, by service.

    A service that does something is waited for (`launcher.ready_timeout_s`).

    Args:
        plan: the run.
        recipe: file or run folder that the plan was made from.
        say: gets a line every few seconds: what is waited for.
        overrides: what the command line said beside the recipe, each `a.b=c`.
        found: what is wrong with the recipe as a whole, told with what the services say.

    Raises:
        ConfigError: all that is wrong, in the words of the recipe.
    """
    written = written_in(recipe, overrides)
    left = [service.name for service in plan.services]
    saying = asyncio.create_task(_say_what_is_left(left, say))
    try:
        answers = await asyncio.gather(*(_dry_run(service, plan, written, left) for service in plan.services))
    finally:
        saying.cancel()
    problems = [problem for _, said in answers for problem in said]
    problems += [written.placed(key, sentence) for key, sentence in found]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return {service.name: settings for service, (settings, _) in zip(plan.services, answers, strict=True)}


async def _say_what_is_left(left: Sequence[str], say: Callable[[str], None]) -> None:
    start = time.monotonic()
    while True:
        await asyncio.sleep(_SAY_S)
        say(f"checking the settings: waits for {', '.join(left)} ({time.monotonic() - start:.0f} s)")


async def _dry_run(service: ServicePlan, plan: RunPlan, recipe: Written, left: list[str]) -> tuple[str, list[str]]:
    """The settings it would use, and what is wrong with them; it is taken from those that are `left`."""
    argv = service.argv[: service.argv.index("--set")] if "--set" in service.argv else service.argv
    process = await asyncio.create_subprocess_exec(
        *argv,
        "--dry-run",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=service_env(plan),
    )
    patience = Patience(plan.limits.ready_timeout_s, MonotonicClock())
    # bounded by: the patience above
    talk = asyncio.ensure_future(process.communicate())
    if not await waits_for(talk, process.pid, patience):
        process.kill()
        talk.cancel()
        await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=REAP_S)
        why = f"{patience.why()} (launcher.ready_timeout_s = {patience.idle_s:g})"
        return "", [f'service "{service.name}" did not check its settings: {why}']
    out, err = talk.result()
    left.remove(service.name)
    if process.returncode == 0:
        return out.decode(errors="replace"), []
    return "", _sentences(service, err.decode(errors="replace"), recipe)


def _sentences(service: ServicePlan, err: str, recipe: Written) -> list[str]:
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    if any(f"No module named {module}" in line for line in lines for module in _modules(service.package)):
        dist = service.package.split(".")[0].replace("_", "-")
        return [
            f'service "{service.name}" needs the Python package {service.package}, which {sys.executable} does not '
            f"have; install it with: pip install {dist}"
        ]
    said = [line for line in lines if line.startswith("vime-")]
    return [_in_recipes_words(service, line, recipe) for line in said] or [
        f'service "{service.name}" refuses its settings: {lines[-1] if lines else "it says nothing"}'
    ]


def _modules(package: str) -> tuple[str, str]:
    """`python -m a.b` says `No module named a.b` or, without `__main__`, `a.b.__main__`."""
    return package, f"'{package}'"


def _in_recipes_words(service: ServicePlan, line: str, recipe: Written) -> str:
    """The file, line and key that the user wrote instead of those that were made from them."""
    kind = service.name.partition("-")[0]
    config = Path(service.argv[service.argv.index("--config") + 1])
    _, _, text = line.partition(": ")
    found = re.fullmatch(rf"{re.escape(str(config))}(?::(\d+))?: (.*)", text, re.DOTALL)
    if found is None:
        return f"{recipe.path}: [{kind}] {text}"
    number, sentence = int(found[1] or 0), found[2].replace("buffer.tables.", "tables.")
    key = written_in(config).key_at(number)
    own = recipes_key(key)
    if own != key:
        sentence = sentence.replace(dotted(key), dotted(own))
    place = recipe.where(own) if own else str(recipe.path)
    # Where the recipe has no line for it, the section says whose setting it is.
    return f"{place}: {sentence}" if place != str(recipe.path) else f"{place}: [{kind}] {sentence}"


def written_in(path: Path, overrides: Sequence[str] = ()) -> Written:
    """Where the settings of a recipe, a run folder or a service's file stand."""
    file = path / "config.toml" if path.is_dir() else path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return Written(file, text, [parse_override(override)[0] for override in overrides])


def recipes_key(key: Key) -> Key:
    """The key of the recipe that a service's setting was made from."""
    for own, recipes in _MADE_FROM.items():
        if key[: len(own)] == own:
            return (*recipes, *key[len(own) :])
    return key


_MADE_FROM: dict[Key, Key] = {
    ("buffer", "tables"): ("tables",),
    ("buffer", "seed"): ("run", "seed"),
    ("trainer", "model_path"): ("model", "path"),
    ("trainer", "teacher_path"): ("model", "teacher"),
    ("trainer", "steps"): ("run", "steps"),
    ("trainer", "seed"): ("run", "seed"),
    ("rollout", "vllm", "model"): ("model", "path"),
    ("rollout", "vllm", "seed"): ("run", "seed"),
    ("worker", "rewards"): ("rewards",),
    ("worker", "reward_timeout_s"): ("rewards", "timeout_s"),
    ("worker", "reward_processes"): ("rewards", "processes"),
    ("worker", "tables"): ("tables",),
}
"""A service's setting -> the recipe's, where they are not called alike (`launcher.plan`)."""
