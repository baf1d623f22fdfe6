"""Tokens are in no log, no resolved configuration, no trace and no command line; and no source runs what it is sent."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tomli_w
from rich.console import Console
from tests.in_process import KINDS, settings_of

from vime.buffer.v1.table_service_pb2 import GetTableRequest
from vime.buffer.v1.table_service_pb2_grpc import TableServiceStub
from vime_client.channel import open_channel
from vime_client.channel_settings import Credentials

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("services/*/src/**/*.py"), *ROOT.glob("clients/python/src/**/*.py")])
IN_FILE, IN_ENVIRONMENT = "token-in-a-file-7f3a91c2", "token-in-the-environment-9e4b"
GUESSED = "a-token-that-was-guessed-55aa"


class BufferProgram:
    """A buffer process with a token from a file and one from the environment, talkative in log and traces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "worker.token").write_text(IN_FILE + "\n")
        (folder / "guessed.token").write_text(GUESSED)
        grants = [
            {"name": "worker", "token_file": str(folder / "worker.token")},
            {"name": "trainer", "token_env": "VIME_TRAINER_TOKEN", "methods": ["/vime.buffer.v1.BatchService/*"]},
        ]
        settings = {
            **settings_of("buffer", folder),
            "server": {"port_file": str(folder / "address"), "grants": grants, "grace_seconds": 0.2},
            "log": {"file": str(folder / "buffer.jsonl"), "level": "DEBUG"},
            "telemetry": {"traces_file": str(folder / "traces.jsonl"), "export_interval_s": 0.05},
        }
        self.config = folder / "buffer.toml"
        self.config.write_text(tomli_w.dumps(settings))
        self.environment = {**os.environ, "VIME_TRAINER_TOKEN": IN_ENVIRONMENT}

    def command(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "vime_buffer", "--config", str(self.config), *more]

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        end = time.monotonic() + 60
        while not (self.folder / "address").exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        return process

    @property
    def address(self) -> str:
        return (self.folder / "address").read_text().strip()

    def written(self) -> dict[str, str]:
        """All that the service wrote, by file; not what the test put there."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes().decode("latin-1")
            for path in self.folder.rglob("*")
            if path.is_file() and path.suffix != ".token"
        }


@pytest.fixture
def program(tmp_path: Path) -> BufferProgram:
    return BufferProgram(tmp_path)


async def _get_table(address: str, credentials: Credentials) -> grpc.StatusCode:
    async with open_channel(address, credentials.once()) as channel:
        try:
            await TableServiceStub(channel).GetTable(GetTableRequest(name="train"), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_running_service_shows_its_tokens_to_nobody(
    program: BufferProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = program.start()
    try:
        monkeypatch.setenv("VIME_TRAINER_TOKEN", IN_ENVIRONMENT)
        asked = {
            "token_file": (Credentials(token_file=program.folder / "worker.token"), grpc.StatusCode.OK),
            "token_env": (Credentials(token_env="VIME_TRAINER_TOKEN"), grpc.StatusCode.PERMISSION_DENIED),
            "guessed": (Credentials(token_file=program.folder / "guessed.token"), grpc.StatusCode.UNAUTHENTICATED),
        }
        for name, (credentials, expected) in asked.items():
            assert await _get_table(program.address, credentials) is expected, name
        command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        assert "vime_buffer" in command_line
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    written = program.written()
    assert "listening" in written["buffer.jsonl"]
    assert "TableService/GetTable" in written["traces.jsonl"]
    for name, text in {**written, "stdout": out, "stderr": err, "command line": command_line}.items():
        for secret in (IN_FILE, IN_ENVIRONMENT, GUESSED):
            assert secret not in text, name


def test_a_resolved_configuration_names_where_tokens_are_and_not_what_they_are(program: BufferProgram) -> None:
    done = subprocess.run(
        program.command("--dry-run"), env=program.environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert 'token_env = "VIME_TRAINER_TOKEN"' in done.stdout
    assert str(program.folder / "worker.token") in done.stdout
    assert IN_FILE not in done.stdout + done.stderr
    assert IN_ENVIRONMENT not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_of_any_service_takes_a_token_itself(kind: str) -> None:
    from tests.in_process import model_of

    from vime_client.config_loading import describe

    secret = ("token", "password", "secret", "api_key")
    asking = [line.split(" ")[0] for line in describe(model_of(kind)) if line.split(" ")[0].endswith(secret)]
    assert asking == []


RECIPE = """
run = { name = "r", steps = 1 }
model.path = "model"
rewards.default = "reward.py:score"
rollout.vllm = { hf_token = "ENGINES", env = { WANDB_API_KEY = "WEIGHTS" } }
telemetry.otlp_endpoint = "http://user:COLLECTOR@127.0.0.1:9"

[launcher.env]
HF_TOKEN = "HUGGING"
AWS_SECRET_ACCESS_KEY = "AMAZON"
OMP_NUM_THREADS = "2"
OTEL_EXPORTER_OTLP_HEADERS = "authorization=TOP"
DB_PASS = "DATABASE"
OPENAI_KEY = "OPENED"
APP_CREDENTIALS = "APPLICATION"
SESSION_COOKIE = "BISCUIT"

[tables.train]
source.path = "train.jsonl"
sampling = { max_tokens = 8 }
"""
SECRETS = (
    *("HUGGING", "AMAZON", "ENGINES", "WEIGHTS"),
    *("COLLECTOR", "=TOP", "DATABASE", "OPENED", "APPLICATION", "BISCUIT"),
)


@pytest.fixture
def recipe_with_secrets(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "reward.py").write_text("def score(text):\n    return 1\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def test_environment_secrets_of_a_recipe_are_in_no_report(
    recipe_with_secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vime_client.config_loading import to_toml
    from vime_client.driver import run as driver
    from vime_client.recipe import load_recipe
    from vime_client.report.build import build_report

    async def no_preflight(*_: object) -> dict[str, str]:
        return {"rollout-0": 'rollout = { vllm = { env = { WANDB_API_KEY = "[redacted]" } } }'}

    monkeypatch.setattr(driver, "preflight", no_preflight)
    run_dir = tmp_path / "runs" / "r"
    recipe = load_recipe(recipe_with_secrets)
    for mode in ("new", "resume"):  # files of an earlier start are written anew, not only opened
        driver._prepare(recipe, recipe_with_secrets, tmp_path, run_dir, mode, Console(), Console())
        build_report(run_dir)
        for path in (run_dir / "services").iterdir():
            path.chmod(0o644) if mode == "new" else None
    holding = {
        str(path.relative_to(run_dir)): path.stat().st_mode & 0o777
        for path in run_dir.rglob("*")
        if path.is_file() and any(secret in path.read_text() for secret in SECRETS)
    }
    assert set(holding) >= {"services/plan.json", "services/rollout-0.toml", "services/recipe.toml"}
    assert {path for path in holding if not path.startswith("services/")} == set()
    assert set(holding.values()) == {0o600}
    shown = to_toml(recipe)  # what --dry-run prints
    assert not any(secret in shown for secret in SECRETS)
    assert "OMP_NUM_THREADS = " in shown  # names, and no value: nobody can tell which is harmless
    (run_dir / "config.toml").write_text(RECIPE)  # of a run that an earlier version wrote
    build_report(run_dir)
    assert not any(secret in (run_dir / "report.html").read_text() for secret in SECRETS)
    assert "OMP_NUM_THREADS" in (run_dir / "report.html").read_text()


def test_a_run_folder_that_holds_no_secrets_says_what_to_resume_with(
    recipe_with_secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vime_client.config_loading import ConfigError, to_toml
    from vime_client.driver.folder import open_folder
    from vime_client.driver.run import RunOptions, load_run
    from vime_client.recipe import load_recipe

    run_dir = tmp_path / "runs" / "r"
    open_folder(run_dir, "new", tmp_path)
    (run_dir / "config.toml").write_text(to_toml(load_recipe(recipe_with_secrets)))
    monkeypatch.setenv("HF_TOKEN", "from the environment, which goes before the recipe's")
    with pytest.raises(ConfigError) as caught:
        load_run(run_dir, RunOptions(mode="resume"))
    lacking = [problem.split(" of ")[0] for problem in caught.value.problems]
    assert "launcher.env.HF_TOKEN" not in lacking
    assert set(lacking) > {"rollout.vllm.hf_token", "rollout.vllm.env.WANDB_API_KEY", "telemetry.otlp_endpoint"}
    assert "vime run RECIPE --resume" in caught.value.problems[0]
    load_run(run_dir, RunOptions(join=True))  # who only looks on needs none


def test_what_the_ranks_read_is_for_the_owner_alone_and_whole(tmp_path: Path) -> None:
    from tests.in_process import NoRanks

    from vime_client.config_loading import load_config
    from vime_trainer.config import TrainerConfig
    from vime_trainer.wiring import Wiring

    collector = {"telemetry": {"otlp_endpoint": "http://user:COLLECTOR@127.0.0.1:9"}}
    config = TrainerConfig.model_validate({**settings_of("trainer", tmp_path, buffer="h:1", router="h:2"), **collector})
    resolved = Path(config.trainer.run_dir) / "services" / "trainer.resolved.toml"
    resolved.parent.mkdir(parents=True)
    resolved.write_text("of an earlier start")
    Wiring(config, NoRanks())  # type: ignore[arg-type]
    assert resolved.stat().st_mode & 0o777 == 0o600
    assert load_config(TrainerConfig, resolved) == config


def test_a_value_that_is_refused_is_not_quoted_where_it_is_a_secret(recipe_with_secrets: Path) -> None:
    from vime_client.config_loading import ConfigError
    from vime_client.recipe import load_recipe

    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_with_secrets, ["launcher.env.DB_PASS=271828", "telemetry.traces='http://u:PASS@h'"])
    assert "271828" not in str(caught.value)
    assert "PASS@" not in str(caught.value)
    assert "DB_PASS" in str(caught.value)


# ------------------------------------------------------------------ sources

_PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
_RUNS = {"eval", "exec", "compile", "os.system", "os.popen", "builtins.eval", "builtins.exec"}
_OBJECTS = ("object_list", "gather_object")  # torch.distributed's collectives that pickle


def dangers(source: str) -> Iterator[str]:
    """What in a module could run what somebody sent."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] in _PICKLES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _PICKLES:
            yield f"from {node.module} import"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in _RUNS or name.endswith(_OBJECTS):
                yield name
            elif name.endswith("torch.load") and given.get("weights_only") != "True":
                yield "torch.load without weights_only=True"
            elif name.endswith(("np.load", "numpy.load")) and given.get("allow_pickle", "False") != "False":
                yield "np.load with allow_pickle"
            elif name.endswith(("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load")):
                yield name
            elif given.get("shell") == "True":
                yield f"{name} with shell=True"
            elif given.get("trust_remote_code") == "True":
                yield f"{name} with trust_remote_code=True"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch, cloudpickle as p",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "yaml.load(text)",
        "subprocess.run(text, shell=True, timeout=1)",
        "dist.broadcast_object_list(things)",
        "dist.all_gather_object(things, mine)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_what_could_run_what_was_sent_is_found(source: str) -> None:
    assert len(list(dangers(source))) == 1


def test_what_could_not_is_left_alone() -> None:
    harmless = (
        "model.eval(); torch.load(p, weights_only=True); np.load(p); yaml.safe_load(t); re.compile(p); json.loads(t)"
    )
    assert list(dangers(harmless)) == []


def test_no_source_unpickles_evaluates_or_runs_what_it_is_sent() -> None:
    assert len(SOURCES) > 200
    found: dict[str, Any] = {
        str(path.relative_to(ROOT)): what
        for path in SOURCES
        if (what := list(dangers(path.read_text(encoding="utf-8"))))
    }
    assert found == {}
