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


STEPS = """
config = EngineConfig(**json.loads(names["config"]))
engine = Engine.from_hf(names["model"], config)
state = engine.load_checkpoint(names["root"])
loss = PolicyLoss(PolicyLossConfig(reducer="token_mean"))
for step in range(engine.optimizer_steps, names["until"]):
    batch = [make_sample(4, n, seed=10 * step + n) for n in (2, 5, 3, 7, 4)]
    engine.train_step(batch[rank::world], loss)
if names["save"]:
    engine.save_checkpoint(names["root"], engine.optimizer_steps, {"position": 7, "note": "x"})
if names["out"] and rank == 0:
    from safetensors.torch import save_file
    save_file({n: t.detach().clone() for n, t in engine.export()}, names["out"])
result = {"state": state, "lr": engine.lr, "steps": engine.optimizer_steps}
"""


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_two_steps_a_save_a_new_process_and_two_steps_equal_four_steps_bit_for_bit(
    run_ranks: Ranks, moe_dir: Path, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    common = {"config": settings(dtype, distributed).model_dump_json(), "model": moe_dir}
    broken = common | {"root": tmp_path / "broken"}
    run_ranks(1, STEPS, until=2, save=True, out="", **broken)
    second = run_ranks(1, STEPS, until=4, save=False, out=tmp_path / "resumed", **broken)[0]
    assert second["state"] == {"position": 7, "note": "x"}
    whole = run_ranks(1, STEPS, until=4, save=False, out=tmp_path / "whole", root=tmp_path / "none", **common)[0]
    assert whole["state"] is None
    assert (whole["lr"], whole["steps"]) == (second["lr"], second["steps"])
    a, b = load_file(tmp_path / "resumed"), load_file(tmp_path / "whole")
    assert [name for name in b if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_is_read_by_another_number_of_ranks(
    run_ranks: Ranks, moe_dir: Path, tmp_path: Path, before: int, after: int
) -> None:
    common = {"config": settings().model_dump_json(), "model": moe_dir}
    broken = common | {"root": tmp_path / "broken"}
    run_ranks(before, STEPS, until=2, save=True, out="", **broken)
    run_ranks(after, STEPS, until=4, save=False, out=tmp_path / "resumed", **broken)
    run_ranks(1, STEPS, until=4, save=False, out=tmp_path / "whole", root=tmp_path / "none", **common)
    a, b = load_file(tmp_path / "resumed"), load_file(tmp_path / "whole")
    assert max(float((a[name] - b[name]).abs().max()) for name in b) < 1e-4
    moved = load_file(moe_dir / "model.safetensors")
    assert max(float((moved[name] - b[name]).abs().max()) for name in b) > 1e-2


def test_optimizer_state_that_is_lost_is_named_and_not_replaced_by_zeros(moe_dir: Path, tmp_path: Path) -> None:
    from vime_trainer.engine.optimizer_state import restore

    engine = Engine.from_hf(moe_dir, settings(dtype="bfloat16"))
    with pytest.raises(CheckpointError, match=r"word_embeddings\.weight: 0 of 1536 elements of 'main'"):
        restore(engine._updater.optimizer, engine._module, [])


def test_weights_that_are_not_finite_are_not_saved_over_healthy_ones(
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
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.weight has shape \(24, 32\), .* \(32, 32\)"):
        Engine.from_hf(wider, settings()).load_checkpoint(tmp_path / "saved")


class _Bomb:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("pattern", ["model.safetensors", "optimizer.*", "generators.*"])
def test_a_pickle_in_place_of_a_file_is_never_executed(moe_dir: Path, tmp_path: Path, pattern: str) -> None:
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
except CheckpointError as error:
    message = str(error)
result = {"message": message, "state": engine.load_checkpoint(names["root"]), "left": sorted(os.listdir(names["root"]))}
"""


def test_one_rank_without_space_fails_the_save_on_all_and_the_old_one_stays(
    run_ranks: Ranks, moe_dir: Path, tmp_path: Path
) -> None:
    first, second = run_ranks(2, FAILING, model=moe_dir, root=tmp_path / "saved")
    assert "another rank failed" in first["message"]
    assert "No space left" in second["message"]
    for result in (first, second):
        assert result["state"] == {"good": True}
        assert result["left"] == ["latest", "step_000001"]
