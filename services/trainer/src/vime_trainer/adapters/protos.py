"""Small things between the domain and the contract: versions, durations, names of enum values."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration

from vime.common.v1.trajectory_pb2 import Prompt
from vime.common.v1.weight_version_pb2 import WeightVersion
from vime_trainer.loop.versions import Version


def version_to_proto(version: Version) -> WeightVersion:
    """Domain to contract."""
    return WeightVersion(run_id=version.run_id, incarnation=version.incarnation, step=version.step)


def version_from_proto(version: WeightVersion) -> Version:
    """Contract to domain."""
    return Version(version.run_id, version.incarnation, version.step)


def prompt_text(prompt: Prompt) -> str | list[str] | None:
    """What the model was asked, for people: the text, or that of each message; None where only token ids are known."""
    return prompt.text or [message.content for message in prompt.chat.messages] or None


def seconds(value: float) -> Duration:
    """Seconds to the contract's duration."""
    duration = Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration


def to_seconds(duration: Duration) -> float:
    """The contract's duration to seconds."""
    return duration.seconds + duration.nanos / 1e9


def enum_name(enum: Any, value: int) -> str:
    """`SampleStatus, 2` -> "truncated"; the number where the value comes from a newer contract than ours."""
    if value not in enum.values():
        return str(value)
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return str(enum.Name(value)).removeprefix(prefix).lower()
