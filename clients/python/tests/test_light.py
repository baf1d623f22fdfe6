"""The client is light: what it imports, and which names it offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import vime_client

HEAVY = ("torch", "vllm", "transformers", "megatron", "numpy", "matplotlib", "scipy", "pandas")
COMMAND_LINE = {
    *("vime_client", "typer", "click", "shellingham", "rich", "pygments", "markdown_it", "mdurl", "attr"),
    *("pydantic", "pydantic_core", "annotated_types", "annotated_doc", "typing_extensions", "typing_inspection"),
}
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
def test_help_imports_the_command_line_libraries_and_nothing_else(arguments: list[str]) -> None:
    """What makes it answer at once; `make bench NAME=startup` measures how soon."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['vime', *{arguments!r}]\n"
        "try: runpy.run_module('vime_client.cli', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "top = {name.partition('.')[0] for name in sys.modules}\n"
        "sys.stderr.write(' '.join(sorted(top - sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout
    third_party = {name for name in done.stderr.split() if not name.startswith("_")}
    assert third_party <= COMMAND_LINE, third_party - COMMAND_LINE


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
