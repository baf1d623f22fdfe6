"""Demonstrations as groups of table `sft`: exactly the record's answer, or a sentence that says why not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from vime.buffer.v1 import prompt_service_pb2 as buffer_pb
from vime.common.v1 import trajectory_pb2 as pb
from vime_client.testing import FakeBuffer, FakeEngine, serving
from vime_client.worker.config import WorkerSettings
from vime_client.worker.demonstrations import (
    BadDemonstration,
    DemonstrationSection,
    answered,
    build_demonstration,
    demonstration_of,
)
from vime_client.worker.worker import run_worker

SECTION = DemonstrationSection(end="$")


def prompt(**record: object) -> pb.Prompt:
    return pb.Prompt(prompt_id="p:0:0", text="1+1=", record_json=json.dumps(record))


def lease(max_tokens: int = 8) -> buffer_pb.PromptLease:
    return buffer_pb.PromptLease(
        group_id="g", table="sft", num_samples=1, prompt=prompt(), sampling=pb.SamplingParams(max_tokens=max_tokens)
    )


@pytest.mark.parametrize("record", [{}, {"response": ""}, {"response": 2}, {"response": None}])
def test_a_record_without_a_text_to_learn_is_refused_by_its_name(record: dict[str, object]) -> None:
    with pytest.raises(BadDemonstration, match=r'record p:0:0 has .* under "response"'):
        demonstration_of(prompt(**record), SECTION)


def test_a_key_that_the_record_lacks_is_told_with_the_nearest() -> None:
    with pytest.raises(BadDemonstration, match=r'record p:0:0 has no key "respons" .*; did you mean "response"\?'):
        demonstration_of(prompt(response="2", prompt="1+1="), DemonstrationSection(response_key="respons"))


def test_a_number_of_any_length_beside_the_answer_is_no_fault() -> None:
    long = pb.Prompt(prompt_id="p:0:0", record_json='{"response": "2", "label": ' + "9" * 5000 + "}")
    assert demonstration_of(long, SECTION) == "2"


@pytest.mark.parametrize(
    "text", ["no JSON", "[1]", "[" * 100_000, '{"response": "\\ud83d"}'], ids=["text", "list", "deep", "surrogate"]
)
def test_a_record_that_cannot_be_learnt_is_refused_by_its_name_whatever_it_is(text: str) -> None:
    with pytest.raises(BadDemonstration, match="record p:0:0"):
        demonstration_of(pb.Prompt(prompt_id="p:0:0", record_json=text), SECTION)


def test_the_answer_and_the_end_token_stand_behind_the_prompt() -> None:
    assert answered(prompt(), "2", "$").text == "1+1=2$"


def test_a_chat_is_rendered_with_the_answer_and_without_another_generation_prompt() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="1+1?")], template_kwargs_json='{"style": "short"}')
    made = answered(pb.Prompt(chat=chat), "2", "").chat
    assert [(m.role, m.content) for m in made.messages] == [("user", "1+1?"), ("assistant", "2")]
    assert json.loads(made.template_kwargs_json) == {"style": "short", "add_generation_prompt": False}
    assert len(chat.messages) == 1


def test_a_prompt_of_token_ids_has_no_demonstration() -> None:
    with pytest.raises(BadDemonstration, match=r"is token_ids: only text and chats"):
        answered(pb.Prompt(prompt_id="p", token_ids=pb.TokenIds(ids=[1])), "2", "")


def test_a_tokenizer_that_joins_prompt_and_answer_is_noticed() -> None:
    with pytest.raises(BadDemonstration, match="token 2 of 3 of the prompt is another one"):
        build_demonstration(lease(), [1, 2, 3], [1, 2, 9, 4], "x")
    with pytest.raises(BadDemonstration, match="token 2 of 3"):
        build_demonstration(lease(), [1, 2, 3], [1, 2], "x")


@pytest.mark.parametrize("response", [[], [4, 5, 6]])
def test_a_demonstration_outside_of_the_budget_is_refused_with_both_numbers(response: list[int]) -> None:
    with pytest.raises(BadDemonstration, match=f"has {len(response)} tokens, max_tokens is 2"):
        build_demonstration(lease(max_tokens=2), [1], [1, *response], "x")


def test_a_sample_says_that_nothing_was_sampled() -> None:
    (sample,) = build_demonstration(lease(), [1, 2], [1, 2, 3, 4], "x").samples
    assert (list(sample.prompt_token_ids), list(sample.response_token_ids)) == ([1, 2], [3, 4])
    assert not sample.rollout_logprobs
    assert not sample.version_spans
    assert not sample.HasField("routed_experts")
    assert sample.status == pb.SAMPLE_STATUS_COMPLETED


async def test_a_worker_makes_sft_groups_without_generating_and_names_bad_records(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(text, record):\n    return float(text == record['answer'])\n")
    buffer, engine = FakeBuffer(samples_per_prompt=1), FakeEngine()
    async with serving(buffer, engine) as address:
        settings = WorkerSettings.model_validate(
            {
                "worker_id": "w0",
                "buffer_address": address,
                "router_address": address,
                "base_dir": tmp_path,
                "rewards": {"default": "reward.py:score"},
                "reward_processes": 1,
                "lease_wait_s": 0.3,
                "demonstration": {"end": "$"},
            }
        )
        good = buffer.add({"prompt": "1+1=", "answer": "2", "response": "2"}, "sft")
        bad = buffer.add({"prompt": "1+2=", "answer": "3"}, "sft")
        stop = asyncio.Event()
        task = asyncio.create_task(run_worker(settings, stop))
        await buffer.settled(2)
        stop.set()
        await asyncio.wait_for(task, 10)
    ((sample,),) = [group.samples for group in buffer.groups]
    assert sample.group_id == good
    assert "".join(map(chr, sample.response_token_ids)) == "2$"
    assert (sample.response_text, sample.reward) == ("2", 1.0)
    assert buffer.given_up == [bad]
    assert 'has no key "response"' in buffer.failures[0][2]
    assert not engine.requests
