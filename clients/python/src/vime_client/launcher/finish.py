"""What only living services know, kept for the report in `services/info.json`; and the report without a driver."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from vime_client.buffer import BufferClient
from vime_client.channel import ChannelSettings
from vime_client.clock import MonotonicClock
from vime_client.errors import RpcError
from vime_client.launcher.patience import Patience, waits_for
from vime_client.launcher.probes import Probe, all_components
from vime_client.launcher.process import REAP_S
from vime_client.logs import get_logger
from vime_client.telemetry import dist_version

_REPORT_S = 120.0
_log = get_logger(__name__)


async def record_versions(run_dir: Path, probes: Mapping[str, Probe]) -> None:
    """Versions of services and engines."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    versions = {"python": python, "vime-client": dist_version("vime-client"), **await all_components(probes)}
    _update(run_dir, versions=versions)


async def record_counts(run_dir: Path, buffer_address: str) -> None:
    """The buffer's counts of every table at the end of the run."""
    if not buffer_address:
        return
    try:
        async with BufferClient(buffer_address, ChannelSettings(max_attempts=2)) as buffer:
            tables = await buffer.tables()
    except RpcError as error:
        _log.warning("the buffer's last counts are unknown", cause=str(error))
        return
    _update(run_dir, tables={name: _counts(table.counts) for name, table in tables.items()})


async def final_report(run_dir: Path) -> None:
    """Write report.html and summary.json from another process: plots need libraries that have no place here."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "vime_client.report", str(run_dir)), stdin=asyncio.subprocess.DEVNULL
    )
    # bounded by: the patience below
    end = asyncio.ensure_future(process.wait())
    if not await waits_for(end, process.pid, Patience(_REPORT_S, MonotonicClock())):
        process.kill()
        await asyncio.wait([end], timeout=REAP_S)
    if (code := process.returncode) != 0:
        _log.error("the report could not be written", exit_code=code)


def read_info(run_dir: Path) -> dict[str, Any]:
    """What was recorded: `versions` and `tables`."""
    try:
        info: dict[str, Any] = json.loads((run_dir / "services" / "info.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return info


def _update(run_dir: Path, **changes: object) -> None:
    path = run_dir / "services" / "info.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**read_info(run_dir), **changes}, indent=1), encoding="utf-8")
    new.replace(path)


def _counts(counts: Any) -> dict[str, Any]:
    """Field names as in the contract, numbers as numbers."""
    plain = json_format.MessageToDict(
        counts, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {
        name: {reason: int(count) for reason, count in value.items()} if isinstance(value, dict) else int(value)
        for name, value in plain.items()
    }
