"""The library as a newcomer meets it: torch alone, ids, ranks, and a new estimator in a few lines."""

import subprocess
import sys
import threading

import pytest
import torch

from vime_trainer.algorithms import (
    ESTIMATORS,
    AdvantageConfig,
    AdvantageInputs,
    Estimate,
    Estimator,
    Index,
    compute_advantages,
    group_statistics,
    index_of,
)
from vime_trainer.algorithms.ranks import simulate
from vime_trainer.algorithms.tensors import last_unmasked


def test_the_library_imports_with_torch_alone():
    program = (
        "import sys, vime_trainer.algorithms, vime_trainer.algorithms.decisions, vime_trainer.algorithms.inspect\n"
        "import vime_trainer.algorithms.mismatch\n"
        "strangers = {'pydantic', 'grpc', 'megatron', 'vllm', 'transformers', 'vime', 'vime_service', 'vime_client'}\n"
        "print(sorted(strangers & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_new_estimator_is_one_function_and_one_line(monkeypatch):
    def best_of_group(inputs, config, reduce):
        group = group_statistics(inputs.rewards_B, inputs.groups, inputs.trajectories, reduce)
        return Estimate(inputs.per_token((group.centred_B > 0).double()))

    monkeypatch.setitem(ESTIMATORS, "best_of_group", Estimator(best_of_group))
    inputs = AdvantageInputs(torch.tensor([1.0, 0.0]), torch.ones(2, 2), index_of("gg"))
    assert compute_advantages(inputs, AdvantageConfig("best_of_group")).advantages_BT.tolist() == [[1, 1], [0, 0]]


def test_ids_are_dense_and_follow_the_universe():
    assert index_of(["b", "a", "b"]).ids_B.tolist() == [0, 1, 0]
    assert index_of(torch.tensor([70, 5, 70]), [5, 60, 70]) .ids_B.tolist() == [2, 0, 2]  # fmt: skip
    assert index_of([], ["a"]).size == 1
    with pytest.raises(ValueError, match="key 'c' is not among the 2 keys"):
        index_of(["c"], ["a", "b"])
    with pytest.raises(ValueError, match=r"ids_B spans \[0, 3\], outside \[0, 3\)"):
        Index(torch.tensor([0, 3]), 3)


def test_a_rank_that_fails_stops_the_others_and_is_named():
    def work(rank, reduce):
        if rank == 1:
            raise KeyError("rank one")
        return reduce.sum(torch.ones(1))

    with pytest.raises(KeyError, match="rank one"):
        simulate(3, work)


def test_a_rank_that_does_not_arrive_breaks_the_meeting_at_its_deadline():
    with pytest.raises(threading.BrokenBarrierError):
        simulate(2, lambda rank, reduce: reduce.sum(torch.ones(1)) if rank == 0 else torch.ones(1), timeout_s=0.2)


def test_ranks_meet_in_sums_and_maxima():
    results = simulate(3, lambda rank, reduce: (reduce.sum(torch.tensor([rank])), reduce.max(torch.tensor([rank]))))
    assert [(int(total), int(top)) for total, top in results] == [(3, 2)] * 3


def test_the_last_unmasked_token_is_found_whatever_the_holes():
    mask_BT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    last_B, any_B = last_unmasked(mask_BT)
    assert any_B.tolist() == [True, False, True, True]
    assert last_B[any_B].tolist() == [2, 3, 0]
