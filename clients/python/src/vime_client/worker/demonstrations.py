"""Groups of the table `sft`: answers that somebody wrote, as samples to learn. Nothing is generated.

The engine's tokenizer turns prompt and prompt + answer into ids; the answer is what the second has more than the first.
"""

from __future__ import annotations

import json

from pydantic import Field

from vime.buffer.v1 import prompt_service_pb2
from vime.common.v1 import trajectory_pb2 as pb
from vime_client.config_loading import ConfigModel, nearest_of
from vime_client.one_line import is_valid, one_line, told

SFT_TABLE = "sft"


class DemonstrationSection(ConfigModel):
    """Where the demonstrations of table `sft` stand in its records."""

    response_key: str = Field(default="response", min_length=1)
    """Key of the answer's text."""
    end: str = ""
    """Text behind every answer, usually the tokenizer's end token, such as `<eos>`; a chat template brings its own."""


class BadDemonstration(Exception):
    """A record cannot be learnt; the message says which and why."""


def demonstration_of(prompt: pb.Prompt, section: DemonstrationSection) -> str:
    """The answer's text in the prompt's record.

    Raises:
        BadDemonstration: there is none, or it is no text.
    """
    try:
        record = json.loads(prompt.record_json, parse_int=float)  # int() refuses numbers of thousands of digits
    except (ValueError, RecursionError) as error:
        raise BadDemonstration(f"record {prompt.prompt_id} cannot be read: {told(error)}") from error
    if isinstance(record, dict) and record and section.response_key not in record:
        hint = one_line(nearest_of(section.response_key, record))
        raise BadDemonstration(
            f'record {prompt.prompt_id} has no key "{section.response_key}" (worker.demonstration.response_key); {hint}'
        )
    found = record.get(section.response_key) if isinstance(record, dict) else None
    if not isinstance(found, str) or not found or not is_valid(found):
        raise BadDemonstration(
            f'record {prompt.prompt_id} has {json.dumps(found)} under "{section.response_key}": a demonstration is '
            "valid text that is not empty (worker.demonstration.response_key names its key)"
        )
    return found


def answered(prompt: pb.Prompt, answer: str, end: str) -> pb.Prompt:
    """The prompt with its answer behind it, to be rendered.

    Raises:
        BadDemonstration: the prompt is token ids, which cannot be joined with text.
    """
    match prompt.WhichOneof("input"):
        case "text":
            return pb.Prompt(prompt_id=prompt.prompt_id, text=prompt.text + answer + end)
        case "chat":
            chat = pb.Chat()
            chat.CopyFrom(prompt.chat)
            chat.messages.append(pb.ChatMessage(role="assistant", content=answer + end))
            arguments = json.loads(chat.template_kwargs_json or "{}") | {"add_generation_prompt": False}
            chat.template_kwargs_json = json.dumps(arguments)
            return pb.Prompt(prompt_id=prompt.prompt_id, chat=chat)
        case kind:
            raise BadDemonstration(
                f"prompt {prompt.prompt_id} is {kind or 'empty'}: only text and chats have demonstrations"
            )


def build_demonstration(
    lease: prompt_service_pb2.PromptLease, prompt_token_ids: list[int], whole: list[int], answer: str
) -> pb.TrajectoryGroup:
    """The group of a lease, without rewards: one sample of the answer's ids, no logprobs, no version, no routes.

    Raises:
        BadDemonstration: the tokenizer joins the two into other tokens, or the answer exceeds max_tokens.
    """
    name, split = lease.prompt.prompt_id, len(prompt_token_ids)
    if whole[:split] != prompt_token_ids:
        same = next(i for i in range(split) if whole[i : i + 1] != prompt_token_ids[i : i + 1])
        raise BadDemonstration(
            f"prompt {name}: with its answer, token {same} of {split} of the prompt is another one; "
            "end the prompt where the tokenizer cuts"
        )
    response, limit = whole[split:], lease.sampling.max_tokens
    if not 0 < len(response) <= limit:
        raise BadDemonstration(f"prompt {name}: the demonstration has {len(response)} tokens, max_tokens is {limit}")
    return pb.TrajectoryGroup(
        group_id=lease.group_id,
        attempt=lease.attempt,
        table=lease.table,
        prompt=lease.prompt,
        sampling=lease.sampling,
        samples=[
            pb.Sample(
                group_id=lease.group_id,
                sample_index=index,
                prompt_token_ids=prompt_token_ids,
                response_token_ids=response,
                finish_reason=pb.FINISH_REASON_STOP,
                status=pb.SAMPLE_STATUS_COMPLETED,
                response_text=answer,
            )
            for index in range(lease.num_samples)
        ],
    )
