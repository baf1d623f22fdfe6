"""What can be known of rewards, filter and demonstrations before the first lease: files and signatures, what they ask
for against the records of the tables, and the plug-ins' answers to one sample."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vime.common.v1 import trajectory_pb2 as pb
from vime_client.errors import RpcError
from vime_client.one_line import is_valid
from vime_client.recipe import EVAL_PREFIX
from vime_client.rewards.functions import FunctionError, FunctionSpec
from vime_client.rewards.pool import RewardPool
from vime_client.rewards.reward import PluginReward, is_plugin, prompt_arguments, sample_arguments
from vime_client.worker.config import WorkerSettings
from vime_client.worker.demonstrations import SFT_TABLE, BadDemonstration, demonstration_of
from vime_client.worker.filters import NONZERO_STD, PluginFilter

_RECORDS = 1000
"""Records of each table that are looked at."""
_LONGEST_LINE = 1 << 26
_OF_PROMPT = frozenset({*prompt_arguments(pb.Prompt(), ""), "record"})
_OF_SAMPLE = _OF_PROMPT | sample_arguments(pb.Sample()).keys()
_OF_REWARD_BATCH = _OF_PROMPT | {"samples"}
_OF_FILTER = _OF_REWARD_BATCH | {"rewards"}

Record = tuple[str, Mapping[str, Any]]
"""Where a record stands, and what it is."""


async def check_user_code(settings: WorkerSettings, pool: RewardPool) -> list[str]:
    """A sentence for each thing that cannot work; plug-ins are called once."""
    records = {
        name: list(_first_records(table.source)) for name, table in settings.tables.items() if table.source is not None
    }
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
    for where, record in records.get(SFT_TABLE, ()):
        prompt = pb.Prompt(prompt_id=where, record_json=json.dumps(record))
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
    for where, record in records:
        for name in asked:
            if name not in record:
                near = difflib.get_close_matches(name, record, n=1) or difflib.get_close_matches(name, known, n=1)
                hint = f'; did you mean "{near[0]}"?' if near else ""
                return [
                    f'{what}: {spec} asks for "{name}", which is neither known of a '
                    f"{'group' if 'samples' in known else 'sample'} ({', '.join(sorted(known))}) nor a key of {where} "
                    f"({', '.join(sorted(record)) or 'empty'}){hint}"
                ]
    return []


async def _plugin_reward(what: str, url: str, settings: WorkerSettings, records: list[Record]) -> list[str]:
    reward = PluginReward(url, settings.reward_timeout_s)
    try:
        await reward.ask(_prompt(records), [pb.Sample(sample_index=0)])
    except (RpcError, FunctionError) as error:
        return [f"{what}: {error}"]
    finally:
        await reward.close()
    return []


async def _plugin_filter(settings: WorkerSettings, records: list[Record]) -> list[str]:
    plugin = PluginFilter(settings.filter, settings.reward_timeout_s)
    try:
        await plugin.drop_reason(pb.TrajectoryGroup(prompt=_prompt(records), samples=[pb.Sample(reward=0.0)]))
    except (RpcError, FunctionError) as error:
        return [f"filter: {error}"]
    finally:
        await plugin.close()
    return []


def _prompt(records: list[Record]) -> pb.Prompt:
    record = records[0][1] if records else {}
    text = record.get("prompt")
    shown = text if isinstance(text, str) and is_valid(text) else ""
    return pb.Prompt(prompt_id="check", text=shown, record_json=json.dumps(record), source="check")


def _first_records(path: Path) -> Iterator[Record]:
    """The first records of a JSONL file. Lines that are none are left to the buffer, which tells of every one."""
    with path.open("rb") as file:
        for number in range(1, _RECORDS + 1):
            line = file.readline(_LONGEST_LINE)
            if not line:
                return
            try:
                record = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield f"{path.name} line {number}", record
