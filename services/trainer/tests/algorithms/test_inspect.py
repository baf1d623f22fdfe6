"""The looking glass: it shows the step's own numbers, whatever the split, and refuses nonsense by name."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from vime_trainer.algorithms import (
    AdvantageConfig,
    AdvantageInputs,
    PolicyBatch,
    PolicyLossConfig,
    batch_denominators,
    compute_advantages,
    icepop,
    index_of,
    pad_rows,
    policy_loss,
    values,
)
from vime_trainer.algorithms.inspect import inspect_advantages, inspect_loss
from vime_trainer.inspect_cli import main

EXAMPLES = Path(__file__).parents[4] / "docs/examples/inspect"


def example(name):
    return json.loads((EXAMPLES / f"{name}.json").read_text())


def test_the_token_mean_example_gives_the_value_of_k01_and_its_shares_add_up():
    report = inspect_loss(example("token_mean"))["loss"]
    assert report["loss"] == pytest.approx(0.2, rel=1e-12)
    assert report["denominators"]["tokens"] == 10
    assert report["denominators"]["sequences"] == 2
    assert [micro["loss"] for micro in report["micro_batches"]] == pytest.approx([-0.2, 0.4, 0.0])
    assert report["trajectories"][0]["d_loss_d_logprob"] == pytest.approx([-0.1, -0.1])
    assert report["trajectories"][2]["d_loss_d_logprob"] == pytest.approx([0.05] * 8)


def test_the_ppo_example_keeps_the_reward_from_the_tool():
    report = inspect_loss(example("ppo_tools"))
    (row,) = report["advantages"]["trajectories"]
    assert row["advantages"] == pytest.approx([0.0625, 0, 0.75, 0])
    assert row["returns"] == pytest.approx([0.5625, 0, 1.0, 0])
    assert report["value_loss"]["loss"] == pytest.approx((0.0375**2 + 0.65**2) / 2)
    assert report["value_loss"]["trajectories"][0]["d_loss_d_value"] == pytest.approx([0.0375, 0, -0.65, 0])


def test_it_shows_what_the_library_gives_for_the_same_tensors():
    """The off-policy example, built by hand as the trainer would build it, in one piece."""
    rows = example("off_policy")["trajectories"]
    columns = pad_rows(
        loss_mask_BT=[row.get("loss_mask", [1] * len(row["response_token_ids"])) for row in rows],
        **{f"{name}_BT": [torch.tensor(row[name], dtype=torch.float64) for row in rows] for name in
           ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")},
    )  # fmt: skip
    mask_BT = columns.pop("loss_mask_BT")
    rewards_B = torch.tensor([float("nan") if row["reward"] is None else row["reward"] for row in rows])
    inputs = AdvantageInputs(rewards_B, mask_BT, index_of([row["group_id"] for row in rows]),
                             old_logprobs_BT=columns["old_logprobs_BT"])  # fmt: skip
    advantages = compute_advantages(inputs, AdvantageConfig())
    leaf_BT = columns.pop("logprobs_BT").requires_grad_()
    batch = PolicyBatch(leaf_BT, advantages.advantages_BT, advantages.loss_mask_BT, **columns)
    config = PolicyLossConfig(eps_clip_high=0.28, correction=icepop(), kl_loss_coef=0.01, kl_loss_type="k3")
    output = policy_loss(batch, config, batch_denominators(batch, config))
    output.loss.backward()

    report = inspect_loss(example("off_policy"))
    assert report["loss"]["loss"] == pytest.approx(output.loss.item(), rel=1e-12)
    expected = {name: pytest.approx(value, rel=1e-12) for name, value in values(output.metrics).items()}
    assert report["loss"]["metrics"] == expected
    for b, row in enumerate(report["loss"]["trajectories"]):
        length = len(rows[b]["response_token_ids"])
        assert row["d_loss_d_logprob"] == pytest.approx(leaf_BT.grad[b, :length].tolist())
        assert report["advantages"]["trajectories"][b]["advantages"] == pytest.approx(
            advantages.advantages_BT[b, :length].tolist()
        )
    assert report["loss"]["gradient_norm"] == pytest.approx(leaf_BT.grad.norm().item())


@pytest.mark.parametrize("name", ["token_mean", "off_policy", "ppo_tools"])
@pytest.mark.parametrize("shape", ["one", "each alone", "each its rank", "a rank without samples"])
def test_the_split_changes_no_number(name, shape):
    data = example(name)
    whole = inspect_loss({key: value for key, value in data.items() if key != "split"})
    ids = [row["id"] for row in data["trajectories"]]
    data["split"] = {
        "one": [[ids]],
        "each alone": [[[each] for each in reversed(ids)]],
        "each its rank": [[[each]] for each in ids],
        "a rank without samples": [[], [ids]],
    }[shape]
    split = inspect_loss(data)
    assert split["advantages"]["trajectories"] == whole["advantages"]["trajectories"]
    assert split["loss"]["loss"] == pytest.approx(whole["loss"]["loss"], rel=1e-12)
    for a, b in zip(split["loss"]["trajectories"], whole["loss"]["trajectories"], strict=True):
        assert a["d_loss_d_logprob"] == pytest.approx(b["d_loss_d_logprob"], rel=1e-12)


def test_a_logprob_step_moves_the_loss_by_the_gradient_it_shows():
    data = example("off_policy")
    row = data["trajectories"][0]
    shown = inspect_loss(data)["loss"]
    nudged = copy.deepcopy(data)
    nudged["trajectories"][0]["logprobs"] = [row["logprobs"][0], row["logprobs"][1] + 1e-6, row["logprobs"][2]]
    step = inspect_loss(nudged)["loss"]["loss"] - shown["loss"]
    assert step / 1e-6 == pytest.approx(shown["trajectories"][0]["d_loss_d_logprob"][1], rel=1e-3)


def test_truncation_shaping_and_unscored_samples_are_shown():
    data = example("off_policy")
    data["settings"] |= {"drop_truncated": True, "soft_overlong": {"max_length": 4, "cache": 2}}
    report = inspect_loss(data)
    rows = {row["id"]: row for row in report["advantages"]["trajectories"]}
    assert rows["g1-0"]["raw_reward"] == 1
    assert rows["g1-0"]["reward"] == 0.5  # three of four tokens, one into the cache of two
    assert rows["g1-3"]["loss_mask"] == [0, 0]
    assert rows["g1-2"]["unscored_reason"] == "missing"
    assert report["loss"]["denominators"]["tokens"] == 8


def test_a_head_makes_score_centering_visible():
    head = {"rollout_logprobs": [[-0.5, -1.5], [-0.2]], "logprobs": [[-0.6, -1.4], [-0.3]]}
    data = {
        "settings": {"loss": {"objective": "score_centering"}, "advantage": {"estimator": "dr_grpo"}},
        "trajectories": [
            {"id": "a", "group_id": 1, "reward": 1, "response_token_ids": [1, 2], "logprobs": [-0.6, -0.3],
             "head": head},
            {"id": "b", "group_id": 1, "reward": 0, "response_token_ids": [3], "logprobs": [-1.0],
             "head": {"rollout_logprobs": [[-1.0]], "logprobs": [[-1.0]]}},
        ],
    }  # fmt: skip
    assert inspect_loss(data)["loss"]["metrics"]["sc_correction"] is not None
    head["logprobs"][0].pop()
    with pytest.raises(ValueError, match=r"trajectory 'a': head\[0\] has 2 rollout and 1 logprobs"):
        inspect_loss(data)


def broken(change):
    data = example("off_policy")
    change(data)
    return data


def first(data, **entries):
    data["trajectories"][0] |= entries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: first(d, old_logprobs=[-1.0, -1.0]),
         "trajectory 'g1-0': old_logprobs has 2 entries, response_token_ids has 3"),
        (lambda d: first(d, old_logprobs=[-1.0, "x", -1.0]), r"old_logprobs\[1\]='x' is not a number"),
        (lambda d: first(d, logprobs=[-1.0, 0.5, -1.0]), r"logprobs\[1\]=0.5 is above 0, no log probability"),
        (lambda d: first(d, logprobs=[-1.0, float("nan"), -1.0]), r"logprobs\[1\]=nan at an unmasked token"),
        (lambda d: d["trajectories"][0].pop("ref_logprobs"), "'g1-0' has no ref_logprobs, but trajectory 'g2-0' has"),
        (lambda d: d["trajectories"][0].pop("group_id"), "trajectory 'g1-0' has no group_id"),
        (lambda d: first(d, logprob=[]), "trajectory number 0 has unknown key 'logprob'; known: comment, entropy"),
        (lambda d: first(d, id="g1-1"), "trajectory 'g1-1': the id occurs 2 times"),
        (lambda d: d["split"][0].pop(), "split holds trajectory 'g1-2' 0 times"),
        (lambda d: d["split"][0].append(["zz"]), "split names trajectory 'zz', which is not in the file"),
        (lambda d: d.update(trajectories=[]), "non-empty list `trajectories`"),
        (lambda d: d.update(setting={}), "the file has unknown key 'setting'"),
        (lambda d: d["settings"]["loss"].update(epsclip=1), "settings.loss has unknown key 'epsclip'; known: c"),
        (lambda d: d["settings"]["loss"].update(eps_clip=-1), "PolicyLossConfig.eps_clip=-1: must be > 0"),
        (lambda d: d["settings"]["loss"].update(eps_clip="a"), "settings.loss: "),
        (lambda d: d["settings"]["loss"]["correction"].update(preset="tiss"), "preset='tiss': known: tis, icepop, mis"),
        (lambda d: d["settings"].update(dtype="fp8"), "settings.dtype='fp8': known: float32, float64"),
        (lambda d: [row.pop("logprobs") for row in d["trajectories"]], "no trajectory has logprobs"),
        (lambda d: [d["trajectories"][b].update(trajectory_id="t") for b in (0, 2)],
         "'g1-1' and 'g1-0' forked from trajectory 't' but have reward 0 and 1"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_the_name_and_the_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        inspect_loss(broken(change))


def test_advantages_need_no_logprobs():
    data = broken(lambda d: [row.pop("logprobs") for row in d["trajectories"]])
    assert len(inspect_advantages(data)["trajectories"]) == 6


@pytest.mark.parametrize("what", ["advantages", "loss"])
@pytest.mark.parametrize("name", ["token_mean", "off_policy", "ppo_tools"])
def test_the_command_line_prints_tables_or_one_json_object(what, name, capsys):
    path = str(EXAMPLES / f"{name}.json")
    assert main([what, path]) == 0
    assert "advantages" in capsys.readouterr().out
    assert main([what, path, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == (inspect_advantages if what == "advantages" else inspect_loss)(example(name))


def test_a_narrow_terminal_cuts_no_exponent_off(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["loss", str(EXAMPLES / "off_policy.json")]) == 0
    printed = capsys.readouterr().out
    assert "9.51626e-05" in printed
    assert "…" not in printed


def test_the_command_line_says_in_one_line_what_is_wrong(tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text('{"trajectories": [')
    assert main(["loss", str(bad)]) == 2
    assert capsys.readouterr().err.startswith(f"vime inspect: {bad}: Expecting value: line 1 column 19")
    assert main(["loss", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_documented_file_is_accepted():
    page = (EXAMPLES.parents[1] / "inspect.md").read_text()
    block = page.split("```json\n")[1].split("```")[0]
    assert inspect_loss(json.loads(block))["loss"]["denominators"]["tokens"] == 3


def rows(*trajectories):
    """Two tokens each, on policy; what a row leaves out is usual."""
    usual = {"group_id": "g", "reward": 0.0, "response_token_ids": [7, 8], "logprobs": [-0.5, -1.2]}
    return [usual | {"id": str(b)} | row for b, row in enumerate(trajectories)]


def test_trajectory_ids_are_the_groups_own_as_in_the_trainer():
    """The sequence mean over two groups that both use t0 and t1: four trajectories, each A = R - mean, -mean(A) = 0.
    Taken for two trajectories the long samples would weigh more and the loss be -0.0833."""
    data = {
        "settings": {"advantage": {"estimator": "dr_grpo"}, "loss": {"reducer": "sequence_mean"}},
        "trajectories": rows(
            {"trajectory_id": "t0"},
            {"trajectory_id": "t1", "reward": 1.0, "response_token_ids": [1] * 4, "logprobs": [-1.0] * 4},
            {"trajectory_id": "t0", "group_id": "h"},
            {"trajectory_id": "t1", "group_id": "h", "reward": 1.0},
        ),
    }
    report = inspect_loss(data)["loss"]
    assert report["denominators"]["sequences"] == 4
    assert report["loss"] == pytest.approx(0)
    data["split"] = [[["0"], ["3"]], [["2", "1"]]]
    assert inspect_loss(data)["loss"]["loss"] == pytest.approx(0)


def test_a_sample_without_an_id_is_no_fork_of_one_that_is_called_like_it():
    data = {
        "settings": {"advantage": {"estimator": "dr_grpo"}},
        "trajectories": rows({"trajectory_id": "1", "reward": 1.0}, {"reward": 1.0, "trajectory_id": ""}, {}),
    }
    found = [row["advantages"][0] for row in inspect_advantages(data)["trajectories"]]
    assert found == pytest.approx([1 / 3, 1 / 3, -2 / 3])


def test_the_penalty_of_a_fork_is_that_of_the_longest():
    data = {
        "settings": {"soft_overlong": {"max_length": 4, "cache": 4}},
        "trajectories": rows(
            {"trajectory_id": "t"},
            {"trajectory_id": "t", "response_token_ids": [1] * 3, "logprobs": [-1.0] * 3},
            {"response_token_ids": [1], "logprobs": [-1.0]},
        ),
    }
    assert [row["reward"] for row in inspect_advantages(data)["trajectories"]] == [-0.75, -0.75, -0.25]


def test_whitening_is_over_what_is_trained():
    data = {
        "settings": {"advantage": {"whiten": True}, "drop_truncated": True},
        "trajectories": rows({"reward": 1.0}, {"reward": 0.5}, {"reward": -1.0, "finish_reason": "length"}),
    }
    trained = [row["advantages"] for row in inspect_advantages(data)["trajectories"]]
    assert trained[2] == [0, 0]
    assert sum(trained[0] + trained[1]) == pytest.approx(0)
    assert sum(a * a for a in trained[0] + trained[1]) / 3 == pytest.approx(1)


@pytest.mark.parametrize("fork", [{}, {"trajectory_id": "t"}])
def test_a_reward_that_is_no_number_leaves_its_samples_unscored(fork):
    data = {"trajectories": rows({"reward": math.nan, **fork}, {"reward": math.nan, **fork}, {"reward": 1.0})}
    scored = [row["scored"] for row in inspect_loss(data)["advantages"]["trajectories"]]
    assert scored == [False, False, True]


@pytest.mark.parametrize("key", ["group_id", "trajectory_id"])
@pytest.mark.parametrize("name", [[1], math.nan])
def test_a_name_that_names_nothing_is_refused(key, name):
    with pytest.raises(ValueError, match=f"trajectory '0': {key} must be a string or a number"):
        inspect_loss({"trajectories": rows({key: name})})


def test_the_old_logprobs_are_the_current_ones_where_none_are_given():
    data = example("off_policy")
    data["settings"]["loss"]["correction"] = {"preset": "icepop", "low": 0.9, "high": 1.1, "renormalize": True}
    for row in data["trajectories"]:
        row["old_logprobs"] = row["logprobs"]
    given = inspect_loss(data)["loss"]
    for row in data["trajectories"]:
        del row["old_logprobs"]
    assert inspect_loss(data)["loss"] == given
    assert given["metrics"]["mis_rejected_fraction"] > 0
