"""What a prompt lease weighs in the answer of LeasePrompts. The contract's messages are never larger than counted here.

The file is checked against `record_room`, so that every record passes alone; an answer takes as many leases as fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from vime_buffer.settings import LARGEST_SETTINGS, TableSettings
from vime_buffer.values import PromptRecord

_FRAME = 4096
"""Ids, names and numbers of a lease: names are bounded."""
_SEED = 10
_TOKEN_ID = 5
_MESSAGE = 64


def prompt_bytes(record_json: str, prompt: str | Sequence[Mapping[str, object]] | Sequence[int]) -> int:
    """Bytes of a record and its prompt."""
    size = len(record_json.encode())
    if isinstance(prompt, str):
        return size + len(prompt.encode())
    for item in prompt:
        size += _TOKEN_ID if isinstance(item, int) else _message_bytes(item)
    return size


def _message_bytes(message: Mapping[str, object]) -> int:
    texts = [str(message.get(key) or "") for key in ("role", "content", "tool_call_id")]
    calls = message.get("tool_calls")
    if calls:
        texts.append(json.dumps(calls, ensure_ascii=False))
    return _MESSAGE + sum(len(text.encode()) for text in texts)


def lease_bytes(record: PromptRecord, settings: TableSettings) -> int:
    """Bytes of a lease of a record."""
    sampling = len(settings.sampling.model_dump_json().encode())
    return prompt_bytes(record.record_json, record.prompt) + sampling + _SEED * settings.samples_per_prompt + _FRAME


def record_room(settings: TableSettings, limit: int) -> int:
    """Bytes that one record and its prompt may have, whatever the table's other settings become.

    Args:
        settings: the table.
        limit: the message cap in bytes.
    """
    return limit - LARGEST_SETTINGS - _SEED * settings.samples_per_prompt - 2 * _FRAME
