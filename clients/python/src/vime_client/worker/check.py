"""What can be known of rewards, filter and demonstrations before the first lease: files and signatures, what they ask
for against the records of the tables, and the plug-ins' answers to one sample."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from grpc import StatusCode

from vime.common.v1 import trajectory_pb2 as pb
from vime_client.errors import RpcError
from vime_client.one_line import is_valid
from vime_client.recipe import EVAL_PREFIX
from vime_client.rewards.functions import FunctionError, FunctionSpec
from vime_client.rewards.pool import RewardPool
from vime_client.rewards.reward import PluginReward, is_plugin, prompt_arguments, sample_arguments
from vime_client.worker.config import WorkerSettings, WorkerTable
from vime_client.worker.demonstrations import SFT_TABLE, BadDemonstration, demonstration_of
from vime_client.worker.filters import NONZERO_STD, PluginFilter

_RECORDS = 1000
"""Records of each table that are looked at."""
_BYTES = 1 << 26
"""Bytes of each table that are looked at."""
_OF_THE_SAMPLE = frozenset(
    {StatusCode.INVALID_ARGUMENT, StatusCode.OUT_OF_RANGE, StatusCode.UNKNOWN, StatusCode.INTERNAL}
)
"""What a plug-in may answer because it cannot score what this program made up: it is there, and that is all to know."""
_OF_PROMPT = frozenset({*prompt_arguments(pb.Prompt(), ""), "record"})
_OF_SAMPLE = _OF_PROMPT | sample_arguments(pb.Sample()).keys()
_OF_REWARD_BATCH = _OF_PROMPT | {"samples"}
_OF_FILTER = _OF_REWARD_BATCH | {"rewards"}


class Record(NamedTuple):
    """A record of a table."""

    where: str
    """Where it stands."""
    keys: Mapping[str, Any]
    """What it is."""
    prompt: Any
    """What it has under the table's prompt key."""


async def check_user_code(settings: WorkerSettings, pool: RewardPool) -> list[str]:
    """A sentence for each thing that cannot work; plug-ins are called once."""
    records = {name: list(_first_records(table)) for name, table in settings.tables.items()}
    problems = []
    for name, text in settings.rewards.items():
        seen = [record for t, found in records.items() if settings.table(t).reward == name for record in found]
        if is_plugin(text):
            problems += await _plugin_reward(f'reward "{name}"', text, settings, seen)
        else:
            problems += await _function(f'reward "{name}"', text, settings, pool, seen, None)
    trained = [record for t, found in records.items() if not t.startswith(EVAL_PREFIX) for record in found]
    if is_plugin(settings.filter):
        problems += await _plugin_filter(settings, trained)
    elif settings.filter not in ("", NONZERO_STD):
        problems += await _function("filter", settings.filter, settings, pool, trained, _OF_FILTER)
    for record in records.get(SFT_TABLE, ()):
        prompt = pb.Prompt(prompt_id=record.where, record_json=json.dumps(record.keys))
        try:
            demonstration_of(prompt, settings.demonstration)
        except BadDemonstration as error:
            problems.append(f'table "{SFT_TABLE}": {error}')
            break
    return problems


async def _function(
    what: str,
    text: str,
    settings: WorkerSettings,
    pool: RewardPool,
    records: Iterable[Record],
    known: frozenset[str] | None,
) -> list[str]:
    """`known` is what it may ask for beside keys of the records; None: what a reward may, by its signature."""
    try:
        spec = FunctionSpec.parse(text, settings.base_dir)
        signature = await pool.load(spec)
    except FunctionError as error:
        return [f"{what}: {error}"]
    if known is None:
        known = _OF_REWARD_BATCH if "samples" in signature["names"] else frozenset(_OF_SAMPLE)
    asked = [name for name in signature["required"] if name not in known]
    for where, keys, _ in records:
        for name in asked:
            if name not in keys:
                near = difflib.get_close_matches(name, keys, n=1) or difflib.get_close_matches(name, known, n=1)
                hint = f'; did you mean "{near[0]}"?' if near else ""
                return [
                    f'{what}: {spec} asks for "{name}", which is neither known of a '
                    f"{'group' if 'samples' in known else 'sample'} ({', '.join(sorted(known))}) nor a key of {where} "
                    f"({', '.join(sorted(keys)) or 'empty'}){hint}"
                ]
    return []


async def _plugin_reward(what: str, url: str, settings: WorkerSettings, records: list[Record]) -> list[str]:
    reward = PluginReward(url, settings.reward_timeout_s)
    group = _made_up(records)
    try:
        await reward.ask(group.prompt, group.samples[:1])
    except (RpcError, FunctionError) as error:
        return _told(what, error)
    finally:
        await reward.close()
    return []


async def _plugin_filter(settings: WorkerSettings, records: list[Record]) -> list[str]:
    plugin = PluginFilter(settings.filter, settings.reward_timeout_s)
    try:
        await plugin.drop_reason(_made_up(records))
    except (RpcError, FunctionError) as error:
        return _told("filter", error)
    finally:
        await plugin.close()
    return []


def _told(what: str, error: RpcError | FunctionError) -> list[str]:
    return [] if isinstance(error, RpcError) and error.code in _OF_THE_SAMPLE else [f"{what}: {error}"]


def _made_up(records: list[Record]) -> pb.TrajectoryGroup:
    """Two answers to the first prompt, as an engine would give them."""
    prompt = pb.Prompt(prompt_id="check", source="check")
    shown = records[0].prompt if records else ""
    if isinstance(shown, str):
        prompt.text = _valid(shown)
    elif isinstance(shown, list) and all(isinstance(entry, Mapping) for entry in shown):
        prompt.chat.messages.extend(
            pb.ChatMessage(role=_valid(entry.get("role")), content=_valid(entry.get("content"))) for entry in shown
        )
    else:
        prompt.token_ids.ids.append(0)
    prompt.record_json = json.dumps(records[0].keys if records else {})
    samples = [
        pb.Sample(
            group_id="check",
            sample_index=index,
            prompt_token_ids=[0],
            response_token_ids=[0],
            rollout_logprobs=[0.0],
            response_text="check",
            finish_reason=pb.FINISH_REASON_STOP,
            status=pb.SAMPLE_STATUS_COMPLETED,
            reward=float(index),
        )
        for index in range(2)
    ]
    return pb.TrajectoryGroup(group_id="check", prompt=prompt, samples=samples)


def _valid(text: Any) -> str:
    return text if isinstance(text, str) and is_valid(text) else ""


def _first_records(table: WorkerTable) -> Iterator[Record]:
    """The first records of a JSONL file. What is none, or lacks what all must have, is left to the buffer, which tells
    of every one or skips it."""
    if table.source is None:
        return
    needed = {table.prompt_key, *table.required_keys}
    left = _BYTES
    with table.source.open("rb") as file:
        for number in range(1, min(table.limit or _RECORDS, _RECORDS) + 1):
            line = file.readline(_BYTES)
            left -= len(line)
            if not line or left < 0:
                return
            try:
                keys = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
            except (ValueError, RecursionError):
                continue
            if isinstance(keys, dict) and needed <= keys.keys():
                yield Record(f"{table.source.name} line {number}", keys, keys[table.prompt_key])
