"""summary.json, report.html and the picture, from the files of a run that was recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from vime_client.driver.progress import step_line
from vime_client.launcher.state import RunState, write_state
from vime_client.report.build import NoRun, build_report
from vime_client.report.history import read_history
from vime_client.report.page import law_lines
from vime_client.report.summary import summarize, tenth
from vime_client.report.terminal import show

KEYS = {
    "steps", "seconds", "reward_first", "reward_last", "eval_before", "eval_after", "eval_n", "logprob_abs_diff_replay",
    "logprob_abs_diff_no_replay", "mismatch_kl", "weight_updates", "weight_update_seconds", "weight_bytes",
    "step_time_split", "groups", "prompts", "versions",
}  # fmt: skip


def step_row(step: int, reward: float, **more: object) -> dict[str, object]:
    return {
        "step": step,
        "skipped": False,
        "rollout/raw_reward": reward,
        "rollout/response_len/mean": 20.0,
        "rollout/truncated_ratio": 0.0,
        "train/train_rollout_logprob_abs_diff": 9.0,
        "train/train_rollout_logprob_abs_diff_on_policy": 2e-7,
        "train/train_rollout_logprob_abs_diff_on_policy_no_replay": 3e-4,
        "train/mismatch_kl": 1e-9,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "perf/step_time": 3.0,
        "perf/train_wait_time": 1.0,
        "perf/log_probs_time": 0.5,
        "perf/actor_train_time": 1.0,
        "perf/update_weights_time": 0.25,
        "perf/other_time": 0.25,
        "perf/tokens_per_s": 1000.0,
        "perf/update_weights_wire_bytes": 2_000_000.0,
        **more,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "recorded"
    (run_dir / "services").mkdir(parents=True)
    rows: list[dict[str, object]] = [{"event": "incarnation", "incarnation": 1}]
    rows += [{"eval_step": 0, "table": "eval/heldout", "eval/heldout": 0.47, "eval/heldout/n": 512.0}]
    rows += [step_row(step, step / 100) for step in range(1, 41)]
    rows += [{"event": "incarnation", "incarnation": 2}]
    rows += [step_row(40, 0.9)]  # trained again after a resume: counts once, as it was last
    rows += [{"eval_step": 40, "table": "eval/heldout", "eval/heldout": 0.88, "eval/heldout/n": 512.0}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(text + '{"step": 41, "rollout/ra')  # killed in mid-write
    samples = [
        {"step": step, "prompt": "1<2&3=", "response": f"s{step}", "reward": float(step > 20)} for step in range(1, 41)
    ]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    counts = {
        "groups_inserted": 640, "groups_stored": 3, "groups_leased": 0, "groups_consumed": 320, "groups_retired": 310,
        "groups_dropped": {"zero_std": 5}, "groups_evicted": {"LOST_LINEAGE": 2}, "prompts_drawn": 700,
        "prompts_open": 4, "prompts_inserted": 640, "prompts_requeued": 50, "prompts_given_up": {"REWARD": 6},
    }  # fmt: skip
    info = {"versions": {"vime-trainer": "0.1.0", "vllm": "0.30.0"}, "tables": {"train": counts}}
    (run_dir / "services" / "info.json").write_text(json.dumps(info))
    (run_dir / "services" / "run.json").write_text(json.dumps({"run_id": "r", "seconds_before": 50.0}))
    write_state(run_dir, RunState(pid=1, phase="finished", started=1000.0, ended=1100.0))
    (run_dir / "config.toml").write_text("[run]\nsteps = 40\n")
    return run_dir


def test_the_summary_holds_what_programs_read(run_dir: Path) -> None:
    build_report(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert set(summary) >= KEYS
    assert summary["steps"] == 40
    assert summary["seconds"] == 150.0
    assert summary["reward_first"] == pytest.approx(0.025)  # steps 1 to 4
    assert summary["reward_last"] == pytest.approx((0.37 + 0.38 + 0.39 + 0.9) / 4)
    assert (summary["eval_before"], summary["eval_after"], summary["eval_n"]) == (0.47, 0.88, 512)
    assert summary["logprob_abs_diff_replay"] == pytest.approx(2e-7)
    assert summary["logprob_abs_diff_no_replay"] == pytest.approx(3e-4)
    assert summary["weight_updates"] == 40
    assert summary["weight_bytes"] == 2_000_000
    assert summary["weight_update_seconds"] == pytest.approx(0.25)
    split = {"wait": 1.0, "logprobs": 0.5, "train": 1.0, "publish": 0.25, "other": 0.25}
    assert summary["step_time_split"] == pytest.approx(split)
    assert summary["groups"] == {
        "inserted": 640, "stored": 3, "leased": 0, "consumed": 320, "retired": 310, "dropped": 5, "evicted": 2
    }  # fmt: skip
    assert summary["prompts"] == {"drawn": 700, "open": 4, "inserted": 640, "requeued": 50, "given_up": 6}
    assert summary["versions"]["vllm"] == "0.30.0"


def test_torn_lines_are_counted_and_steps_trained_again_count_once(run_dir: Path) -> None:
    history = read_history(run_dir)
    assert history.broken_lines == 1
    assert len(history.openings) == 2
    assert [row["step"] for row in history.steps] == list(range(1, 41))
    assert history.series("rollout/raw_reward").values[-1] == 0.9


def test_a_broken_law_is_said(run_dir: Path) -> None:
    history, summary = build_report(run_dir)
    assert [holds for _, holds in law_lines(summary)] == [True, True]
    summary["groups"]["stored"] = 4
    summary["prompts"]["open"] = None
    assert [holds for _, holds in law_lines(summary)] == [False, None]
    assert history.steps


def test_the_page_is_small_self_contained_and_escapes_what_models_write(run_dir: Path) -> None:
    build_report(run_dir)
    page = (run_dir / "report.html").read_text()
    assert len(page) < 400_000
    assert page.count("<svg") == page.count("<figcaption>") == 7
    assert not re.search(r'(src|href)="https?://', page)
    assert "1&lt;2&amp;3=" in page
    assert "s1<" in page
    assert "s40<" in page
    assert "[run]" in page


def write_run(run_dir: Path, rows: list[dict[str, object]]) -> str:
    """The page of a run with these metrics."""
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_report(run_dir)
    return (run_dir / "report.html").read_text()


def shown_on_terminal(run_dir: Path) -> str:
    history = read_history(run_dir)
    summary = summarize(run_dir, history)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, run_dir, history, summary)
    return console.export_text()


def test_the_page_fits_a_telephone_and_the_dark_and_every_curve_has_its_name(run_dir: Path) -> None:
    build_report(run_dir)
    page = (run_dir / "report.html").read_text()
    assert "width=device-width" in page
    assert "minmax(min(420px,100%),1fr)" in page
    assert "prefers-color-scheme:dark" in page
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert plots
    for plot in plots:
        assert "currentColor" in plot
        assert "legend_1" in plot
        assert not re.search(r"#010203|#fff(fff)?\b|#000000", plot)


def test_the_head_says_what_was_trained_on_what_and_how(run_dir: Path) -> None:
    (run_dir / "config.toml").write_text(
        '[model]\npath = "/m/tiny"\n[tables.train]\nmax_staleness = 2\nsource = { path = "/d/train.jsonl" }\n'
        '[trainer.algorithm]\nestimator = "grpo"\nobjective = "clip"\n[trainer.engine.optimizer]\nlr = 2e-4\n'
    )
    run = {"run_id": "r", "created": 1.7e9, "base_dir": "/recipes/mine"}
    (run_dir / "services" / "run.json").write_text(json.dumps(run))
    _, summary = build_report(run_dir)
    page = (run_dir / "report.html").read_text()
    for text in ("/recipes/mine", "/m/tiny", "/d/train.jsonl", "estimator grpo, objective clip", "2023-11-14 22:13"):
        assert f"<td>{text}" in page
    assert summary["head"]["staleness"] == 2


def test_a_dense_synchronous_run_has_neither_replay_nor_staleness_to_show(run_dir: Path) -> None:
    rows = [step_row(step, 0.5) for step in range(1, 5)]
    for row in rows:
        del row["train/train_rollout_logprob_abs_diff_on_policy_no_replay"]
        row |= {"staleness/mean": 0.0, "staleness/max": 0.0}
    page = write_run(run_dir, rows)
    assert "replay" not in page
    assert "<td>|logprob difference|</td>" in page
    assert "Staleness of" not in page


def test_a_number_of_some_steps_says_of_how_many(run_dir: Path) -> None:
    rows = [step_row(step, 0.5) for step in range(1, 21)]
    for row in rows[1:]:
        del row["train/train_rollout_logprob_abs_diff_on_policy_no_replay"]
    write_run(run_dir, rows)
    assert "|logprob difference|, replay off (1 of 20 steps)" in shown_on_terminal(run_dir)


def test_samples_without_a_reward_are_in_page_table_and_summary(run_dir: Path) -> None:
    """A reward that hangs for one of eight samples."""
    page = write_run(
        run_dir, [step_row(s, 0.5, **{"rollout/samples": 8.0, "rollout/unscored": 1.0}) for s in range(1, 11)]
    )
    assert "10 of 80 (12.5 %)" in page
    assert "Samples without a reward</figcaption>" in page
    assert "10 of 80 (12.5 %)" in shown_on_terminal(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["unscored"], summary["samples"]) == (10, 80)


def test_parts_of_the_reward_and_what_tells_how_training_goes_are_shown(run_dir: Path) -> None:
    learning = {
        "train/loss": 0.25,
        "train/pg_loss": 0.5,
        "train/entropy_loss": 0.75,
        "train/grad_norm": 1.5,
        "train/ppo_kl": 0.125,
        "train/pg_clipfrac": 0.0625,
    }
    rows = [step_row(s, 0.5, **learning, **{"rollout/reward/format": s / 8}) for s in (1, 2, 3, 4)]
    page = write_run(run_dir, rows)
    assert "<td>  of it format</td><td>0.125 → 0.5</td>" in page
    for title in ("Parts of the reward", "Loss", "Entropy", "Gradient norm", "KL", "Share of tokens clipped"):
        assert f"<figcaption>{title}</figcaption>" in page
    text = shown_on_terminal(run_dir)
    for label, value in (("entropy", 0.75), ("gradient norm", 1.5), ("KL to the old policy", 0.125), ("loss", 0.25)):
        assert re.search(rf"{label}, first → last tenth\s+{value} → {value}", text)


def test_demonstrations_show_their_loss_and_no_reward(run_dir: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "step": s,
            "rollout/raw_reward": 1.0,
            "train/loss": 3.0 / s,
            "train/grad_norm": 1.0,
            "rollout/reward/short": 1.0,
        }
        for s in (1, 2, 3)
    ]
    page = write_run(run_dir, rows)
    assert "reward, first" not in page
    assert "Reward of the samples" not in page
    assert "of it short" not in page
    assert "Parts of the reward" not in page
    assert "<td>loss, first → last tenth</td><td>3 → 1</td>" in page
    assert "loss, mean of 10 steps" in shown_on_terminal(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["reward_first"], summary["supervised"]) == (None, True)
    assert summary["learning"]["train/loss"] == {"first": 3.0, "last": 1.0}


def test_held_out_answers_are_shown_before_and_after_of_the_same_prompts(run_dir: Path) -> None:
    def row(step: int, prompt: str, response: str, reward: float | None) -> dict[str, object]:
        known = {"table": "eval/heldout", "step": step, "prompt_id": prompt, "prompt": f"<{prompt}>"}
        return {**known, "response": response, "reward": reward, "parts": {"format": 0.5}}

    rows = [
        row(0, "a", "guess a", 0.0),
        row(0, "gone", "guess gone", 0.0),
        row(0, "b", "guess b", None),
        row(20, "a", "middle a", 0.0),
        row(40, "b", "works b", 1.0),
        row(40, "new", "works new", 1.0),
        row(40, "a", "works a", 1.0),
    ]
    (run_dir / "eval_samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    build_report(run_dir)
    text = re.sub(r"<[^>]*>", "|", (run_dir / "report.html").read_text())
    assert re.search(r"&lt;a&gt;[^a-z]*step 0\W*guess a[^a-z]*reward 0 \(format 0.5\)[^a-z]*step 40\W*works a", text)
    assert re.search(r"&lt;b&gt;[^a-z]*step 0\W*guess b[^a-z]*unscored[^a-z]*step 40\W*works b", text)
    assert not re.search("guess gone|works new|middle a", text)


def test_the_terminal_shows_picture_table_and_laws(run_dir: Path) -> None:
    text = shown_on_terminal(run_dir)
    assert "0.47 → 0.88" in text
    assert "reward, mean of 10 steps" in text
    assert text.count("holds") == 2


def test_a_run_that_trained_nothing_has_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    _, summary = build_report(tmp_path)
    assert summary["steps"] == 0
    assert summary["reward_first"] is None
    assert (tmp_path / "report.html").exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="does not exist"):
        build_report(tmp_path / "nothere")
    with pytest.raises(NoRun, match="holds no run"):
        build_report(tmp_path)


def test_first_and_last_tenth_hold_at_least_one_step() -> None:
    assert tenth([1.0, 2.0, 3.0], last=False) == 1.0
    assert tenth([1.0, 2.0, 3.0], last=True) == 3.0
    assert tenth([float(i) for i in range(60)], last=True) == 56.5
    assert tenth([], last=True) is None


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"rollout/raw_reward": 0.5, "rollout/samples": 8.0, "rollout/unscored": 0.0}, "reward 0.500"),
        (
            {"rollout/raw_reward": 0.5, "rollout/samples": 8.0, "rollout/unscored": 1.0},
            "reward 0.500  unscored 1 of 8",
        ),
        (
            {"rollout/raw_reward": 0.5, "rollout/reward/format": 0.25, "rollout/reward/answer": 0.25},
            "reward 0.500 (format 0.250, answer 0.250)",
        ),
        ({"rollout/raw_reward": 1.0, "train/loss": 2.5, "train/grad_norm": 1.0}, "loss 2.5000"),
        ({"rollout/raw_reward": 0.5, "train/loss": 0.1, "train/pg_loss": 0.1}, "reward 0.500"),
    ],
)
def test_the_line_of_a_step_says_what_is_learnt_and_what_has_no_reward(metrics: dict[str, float], line: str) -> None:
    assert step_line(metrics) == line
