"""A chat message of a record as the contract's fields."""

from __future__ import annotations

import json
from collections.abc import Mapping


def chat_message(message: Mapping[str, object]) -> dict[str, str]:
    """`role`, `content`, `tool_call_id` and `tool_calls_json`; tool calls stay JSON, whatever they hold."""
    fields = {"role": str(message["role"]), "content": str(message["content"])}
    if message.get("tool_call_id"):
        fields["tool_call_id"] = str(message["tool_call_id"])
    if message.get("tool_calls"):
        fields["tool_calls_json"] = json.dumps(message["tool_calls"], ensure_ascii=False)
    return fields
