"""The order of the loop: ledger before training, fleet before completion, pointer before the ledger forgets."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from vime_client.errors import RpcError
from vime_service.errors import FailedPrecondition
from vime_trainer.config import CheckpointConfig, FaultConfig, TrainerSettings
from vime_trainer.loop.checkpoints import Resume
from vime_trainer.loop.events import EvalEvent, EventLog, State, StepEvent
from vime_trainer.loop.loop import LoopFailed, TrainingLoop
from vime_trainer.loop.ports import Batch, Harvest, RankDied, Unusable
from vime_trainer.loop.publisher import PublishConfig, Publisher
from vime_trainer.loop.versions import Version
from vime_trainer.run_files import RunFiles


@pytest.fixture
def build(tmp_path: Path, model_path: Path, make_engine, make_fleet, ranks):
    """A loop over fakes; its parts are attributes for the test to look at."""

    def make(ledger, steps=4, resume=None, **settings):
        config = TrainerSettings(
            run_id="run",
            run_dir=tmp_path / "run",
            model_path=model_path,
            buffer_address="127.0.0.1:1",
            router_address="127.0.0.1:2",
            steps=steps,
            **settings,
        )
        events = EventLog()
        fleet = make_fleet(make_engine("a"))
        publisher = Publisher(config.publish, fleet, ranks)
        files = RunFiles(config.run_dir)
        loop = TrainingLoop(config, ledger, ranks, publisher, files, events, lambda: resume or Resume(), "recipe")
        loop.test_events, loop.test_fleet, loop.test_run_dir = events, fleet, config.run_dir
        loop.test_ledger = ledger
        return loop

    return make


def records(loop) -> list[dict]:
    return [json.loads(line) for line in (loop.test_run_dir / "metrics.jsonl").read_text().splitlines()]


async def collected(loop) -> list:
    await loop.test_events.close()
    return [event async for _, event in loop.test_events.watch(0)]


async def test_all_steps_are_trained_published_and_completed_in_order(build, make_ledger, ranks):
    ledger = make_ledger()
    loop = build(ledger)
    await loop.run()
    assert ranks.trained == [1, 2, 3, 4]
    assert ledger.announced == [Version("run", 1, 0)]
    assert [(step, trained, v.step, final) for _, step, trained, v, final in ledger.completed] == [
        (1, True, 1, False),
        (2, True, 2, False),
        (3, True, 3, False),
        (4, True, 4, True),
    ]
    assert loop.status.state is State.FINISHED
    steps = [e for e in await collected(loop) if isinstance(e, StepEvent)]
    assert [e.train_step for e in steps] == [1, 2, 3, 4]
    assert {"perf/step_time", "staleness/max", "buffer/groups_stored"} <= set(steps[0].metrics)


async def test_a_skipped_step_publishes_nothing_and_the_version_stays(build, make_ledger, ranks):
    ledger = make_ledger()
    ranks.skip = {2}
    loop = build(ledger)
    await loop.run()
    assert [v.step if v else None for _, _, _, v, _ in ledger.completed] == [1, None, 3, 4]
    assert loop.status.skipped_steps == 1


async def test_k29_too_many_skips_in_a_row_end_the_run_with_the_number(build, make_ledger, ranks):
    ranks.skip = {2, 3}
    loop = build(make_ledger(), faults=FaultConfig(max_skipped_in_a_row=2))
    with pytest.raises(LoopFailed, match=r"2 steps in a row .* step 3"):
        await loop.run()


async def test_a_publish_interval_publishes_only_when_due_and_at_the_end(build, make_ledger):
    ledger = make_ledger()
    await build(ledger, steps=5, publish=PublishConfig(interval=2)).run()
    assert [v.step if v else None for _, _, _, v, _ in ledger.completed] == [None, 2, None, 4, 5]


async def test_a_publish_that_was_due_at_a_skipped_step_is_due_at_the_next(build, make_ledger, ranks):
    ledger = make_ledger()
    ranks.skip = {2}
    await build(ledger, steps=6, publish=PublishConfig(interval=2)).run()
    assert [v.step if v else None for _, _, _, v, _ in ledger.completed] == [None, None, 3, None, 5, 6]


async def test_a_full_budget_of_consumed_groups_brings_a_checkpoint_ahead_of_its_time(build, make_ledger, ranks):
    ledger = make_ledger()
    ledger.retained_at = 3
    await build(ledger).run()
    assert ranks.saved == [2, 4]


async def test_checkpoints_follow_the_interval_and_the_ledger_hears_of_the_oldest_kept(build, make_ledger, ranks):
    ledger = make_ledger()
    await build(ledger, steps=5, checkpoint=CheckpointConfig(interval=2)).run()
    assert ranks.saved == [2, 4, 5]
    assert ledger.committed == [(2, 2), (4, 2), (5, 4)]


async def test_resuming_goes_on_after_the_checkpoint_in_a_higher_incarnation(build, make_ledger, ranks):
    ledger = make_ledger()
    await build(ledger, resume=Resume("/checkpoints/2", 2, 6)).run()
    assert ranks.loaded == ["/checkpoints/2"]
    assert ranks.trained == [3, 4]
    assert ledger.announced == [Version("run", 7, 2)]


async def test_a_dead_rank_ends_the_incarnation_before_the_step_is_completed(build, make_ledger, ranks):
    ledger = make_ledger()
    ranks.die_at = 3
    with pytest.raises(RankDied):
        await build(ledger).run()
    assert [step for _, step, *_ in ledger.completed] == [1, 2]


async def test_while_it_waits_for_a_batch_it_says_why(build, make_ledger):
    ledger = make_ledger()
    ledger.empty_answers = 2
    loop = build(ledger, steps=1)
    await loop.run()
    said = [getattr(e, "activity", "") for e in await collected(loop)]
    assert "step 1 waits: generating (open 3)" in said


async def test_the_end_of_the_data_ends_the_loop(build, make_ledger, ranks):
    loop = build(make_ledger(ends_after=2))
    await loop.run()
    assert ranks.trained == [1, 2]
    assert loop.status.state is State.FINISHED
    assert (loop.status.stopped, loop.status.detail) == (False, "the data ended after step 2 of 4")
    assert [(step, final) for _, step, _, _, final in loop.test_ledger.completed] == [(1, False), (2, False), (2, True)]
    assert ranks.saved == [2]


async def test_weights_that_were_not_due_are_published_when_the_data_ends(build, make_ledger, ranks):
    loop = build(make_ledger(ends_after=2), publish=PublishConfig(interval=3))
    await loop.run()
    last = Version("run", 1, 2)
    assert [(step, published, final) for _, step, _, published, final in loop.test_ledger.completed] == [
        (1, None, False),
        (2, None, False),
        (2, last, True),
    ]
    assert loop.status.published == last
    assert ranks.state["version_step"] == 2


async def test_a_skipped_last_step_still_publishes_what_was_trained_before_it(build, make_ledger, ranks):
    ranks.skip = {4}
    loop = build(make_ledger(), publish=PublishConfig(interval=10))
    await loop.run()
    last = Version("run", 1, 3)
    assert loop.test_ledger.completed[-1] == (1, 4, False, last, True)
    assert loop.status.published == last
    assert ranks.state["version_step"] == 3


async def test_a_round_that_ran_before_the_last_publish_is_reported_again(build, make_ledger):
    loop = build(make_ledger(ends_after=2, evals={2: ["eval/x"]}), publish=PublishConfig(interval=3))
    await loop.run()
    assert [r["table"] for r in records(loop) if r.get("eval_step") == 2] == ["eval/x", "eval/x", "eval/final"]


async def test_a_ledger_that_stays_full_after_a_checkpoint_ends_the_run_with_both_numbers(build, make_ledger, ranks):
    ledger = make_ledger()
    ledger.always_full = True
    with pytest.raises(LoopFailed, match=r"step 3 can have no batch.*consumed_bytes 9, retained_bytes 8"):
        await build(ledger, resume=Resume("/checkpoints/2", 2, 1)).run()
    assert ranks.saved == []


async def test_a_resumed_checkpoint_is_told_to_the_ledger_again_before_it_is_asked_for_a_batch(build, make_ledger):
    ledger = make_ledger()
    ledger.retained_at = 3  # no batch until the ledger has heard of a checkpoint of step 2
    await build(ledger, resume=Resume("/checkpoints/2", 2, 1, 1)).run()
    assert ledger.committed[0] == (2, 1)
    assert [step for _, step, *_ in ledger.completed] == [3, 4]


async def test_a_stop_saves_what_was_trained_since_the_last_checkpoint(build, make_ledger, ranks):
    ledger = make_ledger()
    loop = build(ledger)
    train = ranks.train

    async def stop_at_two(step, *arguments, **options):
        if step == 2:
            loop.stop()
        return await train(step, *arguments, **options)

    ranks.train = stop_at_two
    await loop.run()
    assert [step for _, step, *_ in ledger.completed] == [1, 2]
    assert ranks.saved == [2]
    assert (loop.status.state, loop.status.stopped) == (State.FINISHED, True)


async def test_a_stop_waits_for_no_eval_round(build, make_ledger, ranks):
    ledger = make_ledger(evals={0: ["eval/x"]})
    ledger.evals_end = False
    loop = build(ledger)
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0.05)
    loop.stop()
    await asyncio.wait_for(running, 2.0)
    assert ranks.trained == []
    assert loop.status.state is State.FINISHED


async def test_a_round_that_holds_nothing_up_is_trained_past_and_reported_when_it_is_done(build, make_ledger, ranks):
    ledger = make_ledger(evals={0: ["eval/x"]})
    ledger.evals_end = ledger.evals_hold = False
    loop = build(ledger)
    train = ranks.train

    async def end_at_three(step, *arguments, **options):
        ledger.evals_end = step == 3
        return await train(step, *arguments, **options)

    ranks.train = end_at_three
    await asyncio.wait_for(loop.run(), 2.0)
    assert ranks.trained == [1, 2, 3, 4]
    order = [(r.get("step"), r.get("eval_step")) for r in records(loop) if "step" in r or "eval_step" in r]
    assert order == [(1, None), (2, None), (3, None), (None, 0), (4, None)]


async def test_a_run_resumed_at_the_end_of_its_data_completes_its_last_step_as_the_final_one(build, make_ledger, ranks):
    ranks.state = {"trained": False, "skipped_steps": 3}
    loop = build(make_ledger(ends_after=2), resume=Resume("/checkpoints/2", 2, 1))
    await loop.run()
    assert loop.test_ledger.completed == [(2, 2, False, None, True)]
    assert ranks.saved == [2]
    assert loop.status.skipped_steps == 3


async def test_rounds_that_a_repeated_completion_names_again_are_reported_once(build, make_ledger):
    loop = build(make_ledger(ends_after=2, evals={2: ["eval/x"]}))
    await loop.run()
    assert [(r["table"], r["eval_step"]) for r in records(loop) if "eval_step" in r] == [
        ("eval/x", 2),
        ("eval/final", 2),
    ]


async def test_eval_rounds_are_reported_at_their_step(build, make_ledger):
    loop = build(make_ledger(evals={0: ["eval/x"], 2: ["eval/x"], 4: ["eval/x"]}))
    await loop.run()
    assert [(e.table, e.step) for e in await collected(loop) if isinstance(e, EvalEvent)] == [
        ("eval/x", 0),
        ("eval/x", 2),
        ("eval/x", 4),
    ]
    assert [r["eval_step"] for r in records(loop) if "eval_step" in r] == [0, 2, 4]


async def test_metrics_hold_one_json_object_per_step_even_after_a_torn_line(build, make_ledger):
    loop = build(make_ledger())
    with (loop.test_run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "torn')
    RunFiles(loop.test_run_dir)  # as a restart does
    await loop.run()
    lines = (loop.test_run_dir / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"step": 0, "torn'
    assert [json.loads(line)["step"] for line in lines[1:] if '"step":' in line] == [1, 2, 3, 4]


async def test_groups_that_the_ranks_cannot_use_leave_the_batch_with_their_reason_and_the_step_is_trained(
    build, make_ledger, ranks
):
    ledger = make_ledger()
    ranks.unusable = [{"g1-1": "expert 9 at row 0"}, {"g1-0": "token ids 0..99", "g1-1": "by handle"}]
    loop = build(ledger, steps=2)
    await loop.run()
    assert ledger.quarantined == [
        (1, Unusable("g1-1", 0, "expert 9 at row 0")),
        (1, Unusable("g1-0", 1, "token ids 0..99")),
        (1, Unusable("g1-1", 1, "by handle")),
    ]
    assert ranks.trained == [1, 2]
    assert [step for _, step, *_ in ledger.completed] == [1, 2]
    assert loop.status.skipped_steps == 0
    assert [r["rollout/unusable_groups"] for r in records(loop) if "step" in r] == [3, 0]


async def test_a_ledger_that_has_had_enough_unusable_groups_ends_the_run_with_its_reason(build, make_ledger, ranks):
    ranks.unusable = [{"g1-0": "expert 9"}] * 9
    with pytest.raises(RpcError, match="5 groups in a row"):
        await build(make_ledger()).run()
    assert ranks.trained == []


GIVEN_UP = {"invalid": 14, "timeout": 2}


@pytest.mark.parametrize(
    ("harvest", "said"),
    [
        (
            Harvest(0, GIVEN_UP, 0, 2),
            r"step 0 of 4; 16 of 16 prompts .* \(invalid 14, timeout 2\), .* = 0\.1 ",
        ),
        (Harvest(3, {"failed": 5}, 0, 4), r"5 of 8 prompts were given up"),
        (Harvest(96, {"failed": 4}, 0, 2), r"4 of 100 prompts .*, with which 2 more steps would have been trained"),
        (Harvest(97, {"failed": 2}, 1, 3), r"2 of 99 prompts .*, with which 1 more steps would have been trained"),
    ],
)
async def test_a_run_that_ended_early_because_prompts_were_given_up_is_incomplete(build, make_ledger, harvest, said):
    ledger = make_ledger(ends_after=0)
    ledger.harvested = harvest
    loop = build(ledger)
    await loop.run()
    assert loop.status.state is State.INCOMPLETE
    assert re.search(said, loop.status.detail), loop.status.detail


@pytest.mark.parametrize(
    ("steps", "harvest"),
    [
        (4, Harvest(100, {}, 0, 2)),  # all there was
        (4, Harvest(100, {"failed": 1}, 0, 2)),  # one prompt is no step
        (2, Harvest(95, {"failed": 5}, 9, 2)),  # every step was trained, and the share is borne
    ],
)
async def test_a_run_that_trained_all_that_its_data_allowed_is_finished(build, make_ledger, steps, harvest):
    ledger = make_ledger(ends_after=2)
    ledger.harvested = harvest
    loop = build(ledger, steps=steps)
    await loop.run()
    assert loop.status.state is State.FINISHED


async def test_all_steps_with_more_given_up_than_is_borne_are_incomplete_unless_the_setting_bears_it(
    build, make_ledger
):
    ledger = make_ledger()
    ledger.harvested = Harvest(80, {"failed": 20}, 0, 2)
    states = []
    for share in (0.1, 0.2):
        loop = build(ledger, steps=2, faults=FaultConfig(max_given_up_share=share))
        await loop.run()
        states.append(loop.status.state)
    assert states == [State.INCOMPLETE, State.FINISHED]


async def test_a_run_whose_last_step_is_done_says_that_nothing_is_left(build, make_ledger, ranks):
    loop = build(make_ledger(), resume=Resume("/checkpoints/4", 4, 1))
    await loop.run()
    assert ranks.trained == []
    assert (loop.status.state, loop.status.detail) == (
        State.FINISHED,
        "nothing is left to train: step 4 of 4 is done",
    )


async def test_the_end_names_the_folder_of_the_trained_model(build, make_ledger):
    loop = build(make_ledger())
    await loop.run()
    assert loop.status.model_path == "/hf/step_000004"


async def test_the_batch_is_scored_without_replay_at_the_first_step_and_every_tenth(build, make_ledger, ranks):
    await build(make_ledger(), steps=21).run()
    assert ranks.unreplayed == [1, 10, 20]


async def test_a_checkpoint_that_is_asked_for_is_written_after_the_step_in_hand(build, make_ledger, ranks):
    loop = build(make_ledger())
    asked = asyncio.create_task(loop.save_soon())
    await asyncio.sleep(0)
    await loop.run()
    assert await asked == (1, "/checkpoints/1")
    assert ranks.saved == [1, 4]


async def test_a_checkpoint_that_is_asked_for_while_the_loop_waits_for_a_batch_is_that_of_the_last_step(
    build, make_ledger, ranks
):
    ledger = make_ledger()
    loop = build(ledger, steps=2)
    asked = []

    async def answer(incarnation, step, wait_s, lease=ledger.lease_batch):
        if step == 2 and not asked:
            asked.append(asyncio.create_task(loop.save_soon()))
            await asyncio.sleep(0)
            return Batch(blocked_by="generating")
        return await lease(incarnation, step, wait_s)

    ledger.lease_batch = answer
    await loop.run()
    assert await asked[0] == (1, "/checkpoints/1")
    assert ranks.saved == [1, 2]


async def test_a_checkpoint_that_no_step_will_write_is_refused(build, make_ledger):
    loop = build(make_ledger(ends_after=0))
    asked = asyncio.create_task(loop.save_soon())
    await asyncio.sleep(0)
    await loop.run()
    with pytest.raises(FailedPrecondition, match="the loop ended before it could save"):
        await asked


async def test_the_answers_of_an_eval_round_are_written_for_people(build, make_ledger):
    loop = build(make_ledger(evals={0: ["eval/x"], 2: ["eval/x"]}), steps=2, metrics={"sample_texts": 2})
    await loop.run()
    lines = [json.loads(line) for line in (loop.test_run_dir / "eval_samples.jsonl").read_text().splitlines()]
    assert [(r["table"], r["step"], r["prompt"]) for r in lines] == [
        ("eval/x", step, prompt) for step in (0, 2) for prompt in ("0+1=", "1+1=")
    ]
    assert {"response", "reward", "time"} <= set(lines[0])
