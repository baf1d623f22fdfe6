"""Ask every service whether its settings can work, before any is started. Each problem is one sentence."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from vime_client.config_loading import ConfigError
from vime_client.launcher.plan import RunPlan, ServicePlan, service_env
from vime_client.launcher.process import REAP_S

_SECONDS = 120.0


async def preflight(plan: RunPlan, recipe: Path) -> dict[str, str]:
    """Run each service with `--dry-run`, all at once; the settings that each would use, as TOML, by service.

    Raises:
        ConfigError: what the services say, in the words of the recipe.
    """
    answers = await asyncio.gather(*(_dry_run(service, plan, recipe) for service in plan.services))
    problems = [problem for _, said in answers for problem in said]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return {service.name: settings for service, (settings, _) in zip(plan.services, answers, strict=True)}


async def _dry_run(service: ServicePlan, plan: RunPlan, recipe: Path) -> tuple[str, list[str]]:
    """The settings it would use, and what is wrong with them."""
    argv = service.argv[: service.argv.index("--set")] if "--set" in service.argv else service.argv
    process = await asyncio.create_subprocess_exec(
        *argv,
        "--dry-run",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=service_env(plan),
    )
    try:
        async with asyncio.timeout(_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=REAP_S)
        return "", [f'service "{service.name}" did not check its settings within {_SECONDS:.0f} s']
    if process.returncode == 0:
        return out.decode(errors="replace"), []
    return "", _sentences(service, err.decode(errors="replace"), recipe)


def _sentences(service: ServicePlan, err: str, recipe: Path) -> list[str]:
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


def _in_recipes_words(service: ServicePlan, line: str, recipe: Path) -> str:
    """The file that the user wrote instead of the one that was made from it."""
    kind = service.name.partition("-")[0]
    _, _, text = line.partition(": ")
    config = service.argv[service.argv.index("--config") + 1]
    if text.startswith(config):
        text = text.removeprefix(config)
        _, _, text = text.partition(": ")
    text = text.replace("buffer.tables.", "tables.")
    return f"{recipe}: [{kind}] {text}"
