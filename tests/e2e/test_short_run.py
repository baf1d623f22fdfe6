"""What every run must show, shown by a short one."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

FP32 = 1e-5
NUMBERS = (
    "seconds",
    "reward_first",
    "reward_last",
    "eval_before",
    "eval_after",
    "logprob_abs_diff_replay",
    "logprob_abs_diff_no_replay",
    "mismatch_kl",
    "weight_updates",
    "weight_update_seconds",
    "weight_bytes",
    "versions",
)


def laws(record: dict) -> tuple[float, float]:
    """How far both conservation laws are from holding; 0 and 0 when they do."""
    b = {name.removeprefix("buffer/"): value for name, value in record.items() if name.startswith("buffer/")}
    groups = b["groups_inserted"] - sum(
        b[f"groups_{state}"] for state in ("stored", "leased", "consumed", "retired", "dropped", "evicted")
    )
    prompts = b["prompts_drawn"] - sum(b[f"prompts_{state}"] for state in ("open", "inserted", "requeued", "given_up"))
    return groups, prompts


def test_the_run_folder_holds_all_that_others_read(short_run):
    for name in ("config.toml", "metrics.jsonl", "samples.jsonl", "traces.jsonl", "report.html", "summary.json"):
        assert (short_run.folder / name).stat().st_size > 0, name
    assert (short_run.folder / "logs").is_dir()
    assert (short_run.folder / "checkpoints" / "latest").is_file()


def test_the_summary_has_every_number(short_run):
    summary = short_run.summary
    assert summary["steps"] == 3
    assert summary["eval_n"] == 16
    for key in NUMBERS:
        assert key in summary, key
    assert set(summary["step_time_split"]) == {"wait", "logprobs", "train", "publish", "other"}
    assert set(summary["groups"]) >= {"inserted", "stored", "leased", "consumed", "retired", "dropped", "evicted"}
    assert set(summary["prompts"]) >= {"drawn", "open", "inserted", "requeued", "given_up"}
    assert summary["weight_updates"] == 4  # the starting model and one after each step
    assert summary["weight_bytes"] > 1_000_000


def test_trainer_and_engine_agree_to_the_last_bits_of_fp32_at_every_step(short_run):
    for record in short_run.steps:
        assert record["train/train_rollout_logprob_abs_diff_on_policy"] <= FP32, record["step"]
        assert record["train/canary_logprob_abs_diff"] <= 1e-4


def test_at_k_0_every_sample_is_of_the_policy_it_trains(short_run):
    assert [record["staleness/max"] for record in short_run.steps] == [0, 0, 0]
    assert [record["version"] for record in short_run.steps] == ["1.1", "1.2", "1.3"]


def test_both_conservation_laws_hold_at_every_step(short_run, swapped_run):
    for record in short_run.steps + swapped_run.steps:
        assert laws(record) == (0, 0)


def test_replay_holds_when_the_trainers_own_routing_is_disturbed_and_no_replay_does_not(swapped_run):
    on_policy = [r for r in swapped_run.steps if r.get("train/train_rollout_logprob_abs_diff_on_policy") is not None]
    assert on_policy
    for record in on_policy:
        replayed = record["train/train_rollout_logprob_abs_diff_on_policy"]
        unreplayed = record["train/train_rollout_logprob_abs_diff_on_policy_no_replay"]
        assert replayed <= FP32
        assert unreplayed > 100 * FP32


def test_k_1_trains_batches_at_most_one_step_old(swapped_run):
    staleness = [record["staleness/max"] for record in swapped_run.steps]
    assert max(staleness) == 1


def test_one_trace_leads_from_the_worker_through_the_router_into_the_engine(short_run):
    spans = short_run.lines("traces.jsonl")
    by_id = {span["span_id"]: span for span in spans}
    served = [s for s in spans if s["service"] == "rollout" and s["name"].endswith("GenerationService/Generate")]
    assert served
    chain = []
    span = served[0]
    while span is not None:
        chain.append(span["service"])
        span = by_id.get(span.get("parent_span_id") or "")
    assert [name for i, name in enumerate(chain) if i == 0 or name != chain[i - 1]] == ["rollout", "router", "worker"]


def test_one_trace_leads_from_a_training_step_to_the_rank_the_ledger_and_the_engine(short_run):
    spans = short_run.lines("traces.jsonl")
    step = next(s for s in spans if s["name"] == "trainer.step")
    services = {s["service"] for s in spans if s["trace_id"] == step["trace_id"]}
    assert {"trainer", "trainer-rank-0", "buffer", "router", "rollout"} <= services


def test_samples_can_be_read(short_run):
    samples = short_run.lines("samples.jsonl")
    assert {"prompt", "response", "reward", "advantage", "step"} <= set(samples[0])
    assert "=" in samples[0]["prompt"]
