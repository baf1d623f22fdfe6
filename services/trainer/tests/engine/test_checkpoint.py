"""Training goes on from a checkpoint as if nothing had happened, in a new process and on another number of ranks."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vime_trainer.algorithms.losses import PolicyLossConfig
from vime_trainer.engine.config import EngineConfig, OptimizerConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import CheckpointError
from vime_trainer.engine.objective import PolicyLoss
from vime_trainer.engine.sample import Sample
from vime_trainer.engine.store import MANIFEST

pytestmark = pytest.mark.engine
Ranks = Callable[..., list[Any]]
Maker = Callable[..., Sample]
LOSS = PolicyLoss(PolicyLossConfig(reducer="token_mean"))


def settings(dtype: str = "float32", distributed: bool = True) -> EngineConfig:
    schedule: dict[str, Any] = {"warmup_steps": 2, "schedule": "cosine", "decay_steps": 9}
    return EngineConfig(dtype=dtype, optimizer=OptimizerConfig(lr=1e-2, distributed=distributed, **schedule))


Weights = dict[str, torch.Tensor]


def train(engine: Engine, until: int, make: Maker) -> Weights:
    """The same batches for the same steps as STEPS below."""
    for step in range(engine.optimizer_steps, until):
        engine.train_step([make(4, n, seed=10 * step + n) for n in (2, 5, 3, 7, 4)], LOSS)
    return {name: tensor.clone() for name, tensor in engine.export()}


STEPS = """
from safetensors.torch import save_file
result = {}
for case in names["cases"]:
    engine = Engine.from_hf(names["model"], EngineConfig(**json.loads(case["config"])))
    state = engine.load_checkpoint(case["root"])
    loss = PolicyLoss(PolicyLossConfig(reducer="token_mean"))
    for step in range(engine.optimizer_steps, case["until"]):
        batch = [make_sample(4, n, seed=10 * step + n) for n in (2, 5, 3, 7, 4)]
        engine.train_step(batch[rank::world], loss)
    if case["until"] == 2:
        engine.save_checkpoint(case["root"], 2, {})
    elif rank == 0:
        save_file({n: t.detach().clone() for n, t in engine.export()}, case["out"])
    result[case["name"]] = {"state": state, "lr": engine.lr, "steps": engine.optimizer_steps}
"""


def job(name: str, root: Path, config: EngineConfig, until: int = 4) -> dict[str, Any]:
    out = root.parent / f"{root.name}.out"
    return {"name": name, "config": config.model_dump_json(), "root": root, "out": out, "until": until}


def test_two_steps_a_save_a_new_process_and_two_steps_equal_four_steps_bit_for_bit(
    run_ranks: Ranks, moe_dir: Path, tmp_path: Path, sample_maker: Maker
) -> None:
    kinds = {"fp32": settings(), "unsharded": settings(distributed=False), "bf16": settings("bfloat16")}
    whole, rates = {}, {}
    for name, config in kinds.items():
        engine = Engine.from_hf(moe_dir, config)
        assert engine.load_checkpoint(tmp_path / name) is None
        train(engine, 2, sample_maker)
        engine.save_checkpoint(tmp_path / name, 2, {"position": 7, "note": "x"})
        whole[name], rates[name] = train(engine, 4, sample_maker), engine.lr
    cases = [job(name, tmp_path / name, config) for name, config in kinds.items()]
    (resumed,) = run_ranks(1, STEPS, model=moe_dir, cases=cases)
    for name in kinds:
        assert resumed[name] == {"state": {"position": 7, "note": "x"}, "lr": rates[name], "steps": 4}
        weights = load_file(tmp_path / f"{name}.out")
        assert [key for key in weights if not torch.equal(weights[key], whole[name][key])] == []


def test_a_checkpoint_is_read_by_another_number_of_ranks(
    run_ranks: Ranks, moe_dir: Path, tmp_path: Path, sample_maker: Maker
) -> None:
    one = Engine.from_hf(moe_dir, settings())
    train(one, 2, sample_maker)
    one.save_checkpoint(tmp_path / "one", 2, {})
    whole = train(one, 4, sample_maker)
    two_saves = job("save", tmp_path / "two", settings(), until=2)
    resumed = [job("from one", tmp_path / "one", settings()), job("from two", tmp_path / "two", settings())]
    run_ranks(2, STEPS, model=moe_dir, cases=[two_saves, *resumed])
    again = Engine.from_hf(moe_dir, settings())
    again.load_checkpoint(tmp_path / "two")
    results = [train(again, 4, sample_maker), load_file(tmp_path / "one.out"), load_file(tmp_path / "two.out")]
    for weights in results:
        assert max(float((weights[key] - whole[key]).abs().max()) for key in whole) < 1e-4
    start = load_file(moe_dir / "model.safetensors")
    assert max(float((start[key] - whole[key]).abs().max()) for key in whole) > 1e-2


def test_optimizer_state_that_is_lost_is_named_and_not_replaced_by_zeros(moe_dir: Path, tmp_path: Path) -> None:
    from vime_trainer.engine.optimizer_state import restore

    engine = Engine.from_hf(moe_dir, settings(dtype="bfloat16"))
    with pytest.raises(CheckpointError, match=r"output_layer\.weight: 0 of 1536 elements of 'main'"):
        restore(engine._updater.optimizer, engine._module, [])


def test_k18_weights_that_are_not_finite_are_not_saved_over_healthy_ones(
    moe_dir: Path, tmp_path: Path, sample_maker: Maker
) -> None:
    engine = Engine.from_hf(moe_dir, settings())
    good = engine.save_checkpoint(tmp_path, 1, {}, keep_last=1)
    with torch.no_grad():
        engine._module.decoder.layers[2].mlp.router.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.gate\.weight .* not finite"):
        engine.save_checkpoint(tmp_path, 2, {}, keep_last=1)
    assert [p.name for p in tmp_path.glob("step_*")] == [good.path.name]
    again = Engine.from_hf(moe_dir, settings())
    assert again.load_checkpoint(tmp_path) == {}
    assert not again.train_step([sample_maker()], LOSS).skipped


def test_a_checkpoint_of_another_model_is_refused(
    moe_dir: Path,
    dense_dir: Path,
    tmp_path: Path,
    moe_config: dict[str, Any],
    model_writer: Callable[..., Path],
) -> None:
    Engine.from_hf(moe_dir, settings()).save_checkpoint(tmp_path / "saved", 1, {})
    with pytest.raises(CheckpointError, match="Qwen3MoeForCausalLM, the model is a Qwen3ForCausalLM"):
        Engine.from_hf(dense_dir, settings()).load_checkpoint(tmp_path / "saved")
    wider = model_writer(tmp_path / "wider", moe_config | {"moe_intermediate_size": 32})
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight has shape \(24, 32\), .* \(32, 32\)"):
        Engine.from_hf(wider, settings()).load_checkpoint(tmp_path / "saved")


class _Bomb:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("pattern", ["model.safetensors", "optimizer.*", "generators.*"])
def test_k40_a_pickle_in_place_of_a_file_is_never_executed(moe_dir: Path, tmp_path: Path, pattern: str) -> None:
    marker = tmp_path / "executed"
    pickle.loads(pickle.dumps(_Bomb(marker)))
    assert marker.exists()
    marker.unlink()
    path = Engine.from_hf(moe_dir, settings()).save_checkpoint(tmp_path / "saved", 1, {}).path
    file = next(path.glob(pattern))
    file.write_bytes(pickle.dumps(_Bomb(marker)))
    engine = Engine.from_hf(moe_dir, settings())
    with pytest.raises(CheckpointError, match=file.name):
        engine.load_checkpoint(tmp_path / "saved")
    # Whoever can replace a file can replace its digest too.
    import hashlib

    manifest = json.loads((path / MANIFEST).read_text())
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "blake2b": digest}
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="could not read"):
        engine.load_checkpoint(tmp_path / "saved")
    assert not marker.exists()


FAILING = """
engine = Engine.from_hf(names["model"], EngineConfig())
engine.save_checkpoint(names["root"], 1, {"good": True})
if rank == 1:
    from vime_trainer.engine import optimizer_state
    def full(*_):
        raise OSError(28, "No space left on device")
    optimizer_state.dump = full
try:
    engine.save_checkpoint(names["root"], 2, {"good": False})
    message = ""
except EngineError as error:
    message = f"{type(error).__name__}: {error}"
result = {"message": message, "state": engine.load_checkpoint(names["root"]), "left": sorted(os.listdir(names["root"]))}
"""


def test_one_rank_without_space_fails_the_save_on_all_and_the_old_one_stays(
    run_ranks: Ranks, moe_dir: Path, tmp_path: Path
) -> None:
    first, second = run_ranks(2, FAILING, model=moe_dir, root=tmp_path / "saved")
    assert first["message"].startswith("PeerFailed: ")  # so that the other's is the one that is told
    assert "CheckpointError" in second["message"]
    assert "No space left" in second["message"]
    for result in (first, second):
        assert result["state"] == {"good": True}
        assert result["left"] == ["latest", "step_000001"]
