"""`vime buffer`: what a buffer's tables hold, what blocks them, and the groups that training could not use."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime.buffer.v1.table_service_pb2 import QuarantinedGroup, TableCounts, TableInfo
from vime.common.v1.trajectory_pb2 import Sample, TrajectoryGroup
from vime_client.addresses import split_address
from vime_client.buffer import BufferClient
from vime_client.errors import RpcError
from vime_client.launcher.plan import load_plan

_T = TypeVar("_T")


class NoBuffer(Exception):
    """There is no buffer, or it does not know the group; the message is a sentence."""


def print_tables(where: str, console: Console) -> None:
    """Print every table of a run's buffer, and its quarantine.

    Args:
        where: run folder, or `host:port` of a buffer.

    Raises:
        NoBuffer: `where` is neither, or nothing answers there.
    """

    async def read(buffer: BufferClient) -> tuple[list[TableInfo], list[QuarantinedGroup]]:
        infos = list((await buffer.tables()).values())
        try:
            return infos, [group for info in infos for group in await buffer.quarantined(info.config.name)]
        except RpcError as error:
            if error.code is not grpc.StatusCode.UNIMPLEMENTED:  # a buffer of 0.2.0 has no quarantine to show
                raise
            return infos, []

    infos, quarantined = _ask(where, read)
    for info in infos:
        _print_table(info, console)
    if quarantined:
        _print_quarantine(quarantined, console)


def print_group(where: str, name: str) -> None:
    """Print a quarantined group, `GROUP#ATTEMPT`, as JSON: the file that `vime inspect` reads, and the group itself.

    Raises:
        NoBuffer: as above, or the group is not kept.
    """
    group_id, _, attempt = name.rpartition("#")
    if not group_id or not attempt.isdecimal():
        raise NoBuffer(f'"{name}" does not have the form GROUP#ATTEMPT, such as "train:0:17#0"')
    group = _ask(where, lambda buffer: buffer.quarantined_group(group_id, int(attempt)))
    trajectories = [_trajectory(group, sample) for sample in group.samples]
    whole = MessageToDict(group, preserving_proto_field_name=True)
    json.dump({"trajectories": trajectories, "comment": {"group": whole}}, sys.stdout, ensure_ascii=False, indent=1)
    sys.stdout.write("\n")


def _ask(where: str, question: Callable[[BufferClient], Awaitable[_T]]) -> _T:
    address = _address(where)

    async def ask() -> _T:
        async with BufferClient(address) as buffer:
            return await question(buffer)

    try:
        return asyncio.run(ask())
    except RpcError as error:
        raise NoBuffer(f"the buffer at {address} says: {error.message} [{error.reason or error.code.name}]") from error


def _address(where: str) -> str:
    folder = Path(where)
    if folder.is_dir():
        try:
            return load_plan(folder).buffer
        except FileNotFoundError as error:
            raise NoBuffer(f"{folder} holds no run") from error
    try:
        split_address(where)
    except ValueError as error:
        raise NoBuffer(f"{where} is neither a run folder nor an address: {error}") from error
    return where


def _print_table(info: TableInfo, console: Console) -> None:
    counts: TableCounts = info.counts
    policy = info.policy_version
    head = f"step {info.last_completed_step} of policy {policy.run_id}/{policy.incarnation}/{policy.step}"
    console.print(Text.assemble((info.config.name, "bold"), f"  {head}"))
    if info.blocked:
        console.print(Text(f"  blocked: {info.blocked}", style="red"))
    groups = (
        f"inserted {counts.groups_inserted} = stored {counts.groups_stored} + leased {counts.groups_leased} "
        f"+ consumed {counts.groups_consumed} + retired {counts.groups_retired} "
        f"+ dropped {_by(counts.groups_dropped)} + evicted {_by(counts.groups_evicted)}"
    )
    prompts = (
        f"drawn {counts.prompts_drawn} = open {counts.prompts_open} + inserted {counts.prompts_inserted} "
        f"+ re-queued {counts.prompts_requeued} + given up {_by(counts.prompts_given_up)}"
    )
    console.out(f"  groups   {groups}\n  prompts  {prompts}", highlight=False)
    if info.skipped_records:
        console.out(f"  records  skipped {_by(info.skipped_records)}", highlight=False)


def _by(reasons: Any) -> str:
    """The sum of a count, and its parts where there are some."""
    parts = ", ".join(f"{name} {number}" for name, number in sorted(reasons.items()) if number)
    return f"{sum(reasons.values())}" + (f" ({parts})" if parts else "")


def _print_quarantine(groups: list[QuarantinedGroup], console: Console) -> None:
    table = Table("group", "step", "worker", "engines", "bytes", "why", title="quarantined groups", box=None)
    for group in groups:
        name = f"{group.group_id}#{group.attempt}"
        size = str(group.bytes) if group.kept else f"{group.bytes} (gone)"
        columns = (name, str(group.train_step), group.worker_id, " ".join(group.engine_ids), size, group.detail)
        table.add_row(*map(Text, columns))
    console.print(table)


def _trajectory(group: TrajectoryGroup, sample: Sample) -> dict[str, Any]:
    """A sample as the looking glass reads it."""
    name = f"{group.group_id}#{sample.sample_index}"
    forked = {"trajectory_id": sample.trajectory_id} if sample.trajectory_id else {}
    return {
        "id": name,
        "group_id": group.group_id,
        **forked,
        "reward": sample.reward if sample.HasField("reward") else None,
        "prompt_token_ids": list(sample.prompt_token_ids),
        "response_token_ids": list(sample.response_token_ids),
        "loss_mask": [int(masked) for masked in sample.loss_mask] or [1] * len(sample.response_token_ids),
        "rollout_logprobs": list(sample.rollout_logprobs),
        "logprobs": list(sample.rollout_logprobs),
    }
