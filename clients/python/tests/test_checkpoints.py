"""Going back to an older checkpoint moves the pointer and nothing else."""

from __future__ import annotations

import pytest

from vime_client.driver.checkpoints import kept_checkpoints, last_step, rewind_to, trained_model
from vime_client.driver.folder import FolderRefused


@pytest.fixture
def run_dir(tmp_path):
    for name, whole in (
        ("step_000004", True),
        ("step_000008", True),
        ("step_000010", False),
        ("step_000012.tmp-7", True),
    ):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        if whole:
            (folder / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "latest").write_text("step_000008\n")
    return tmp_path


def test_only_complete_checkpoints_can_be_gone_back_to(run_dir):
    assert kept_checkpoints(run_dir) == {4: "step_000004", 8: "step_000008"}


def test_the_pointer_names_the_older_one_and_nothing_is_deleted(run_dir):
    rewind_to(run_dir, 4)
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000004\n"
    assert sorted(kept_checkpoints(run_dir)) == [4, 8]


@pytest.mark.parametrize("step", [10, 5])
def test_a_step_that_is_not_kept_is_refused_with_those_that_are(run_dir, step):
    with pytest.raises(FolderRefused, match=f"step {step}; it keeps: 4, 8"):
        rewind_to(run_dir, step)
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000008\n"


def test_how_far_training_came_and_where_its_model_is(run_dir, tmp_path_factory):
    for name in ("step_000004", "step_000008", "step_000012.tmp"):
        (run_dir / "hf" / name).mkdir(parents=True)
    assert last_step(run_dir) == 8
    assert trained_model(run_dir) == run_dir / "hf" / "step_000008"
    empty = tmp_path_factory.mktemp("empty")
    assert (last_step(empty), trained_model(empty)) == (None, None)


def test_a_run_without_checkpoints_says_so(tmp_path):
    with pytest.raises(FolderRefused, match="it keeps: none"):
        rewind_to(tmp_path, 4)
