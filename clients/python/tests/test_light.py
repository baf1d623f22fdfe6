"""The client is light: what it imports, how soon it answers, and which names it offers."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import vime_client

HEAVY = ("torch", "vllm", "transformers", "megatron", "numpy", "matplotlib", "scipy", "pandas")
MODULES = (
    "vime_client",
    "vime_client.cli",
    "vime_client.driver.run",
    "vime_client.launcher.supervisor",
    "vime_client.worker.__main__",
    "vime_client.worker.worker",
    "vime_client.rewards.child",
    "vime_client.testing",
    "vime_client.report.build",
)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}: importlib.import_module(name)\n"
        "import vime_client\n"
        "for name in vime_client.__all__: getattr(vime_client, name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_reward_process_imports_no_grpc_and_no_pydantic() -> None:
    code = (
        "import vime_client.rewards.child, sys; print([n for n in ('grpc', 'pydantic', 'google') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["worker", "--help"], ["version"]])
def test_help_answers_within_a_second(arguments: list[str]) -> None:
    # Processor time, not the clock: other programs may keep this machine busy.
    code = (
        "import resource, runpy, sys\n"
        f"sys.argv = ['vime', *{arguments!r}]\n"
        "try: runpy.run_module('vime_client.cli', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "sys.stderr.write(str(used.ru_utime + used.ru_stime))"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout
    assert float(done.stderr) < 1.0, f"{time.monotonic() - start:.1f} s by the clock"


def test_the_public_names_are_these() -> None:
    assert vime_client.__all__ == [
        "BufferClient",
        "ChannelSettings",
        "ConfigError",
        "ConfigModel",
        "FenceNotMet",
        "GenerationClient",
        "LeaseLost",
        "LeasedPrompt",
        "Recipe",
        "RewardPool",
        "RpcError",
        "Score",
        "StaleIncarnation",
        "TlsClientConfig",
        "TrainerClient",
        "load_config",
        "load_recipe",
        "open_channel",
    ]
    for name in vime_client.__all__:
        assert getattr(vime_client, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = vime_client.Nothing
