"""Configuration of the buffer service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from vime_buffer.settings import TableSettings, check_budget, check_table
from vime_client.config_loading import Key, refuse
from vime_service.answer_size import FRAME_BYTES
from vime_service.config import ConfigModel, Seconds
from vime_service.errors import VimeError
from vime_service.server_config import ServiceConfig


class BufferSettings(ConfigModel):
    """The ledger: where it lies, whose it is, which tables it has."""

    dir: Path
    """Folder of the ledger and its segments; made if it is not there. One buffer process at a time may use it."""
    run_id: str = Field(min_length=1)
    """The run. A folder holds one run for ever; another run's id is refused."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The run's seed: of shuffles and of sample seeds."""
    segment_bytes: int = Field(default=64 << 20, ge=4096)
    """Size at which a segment file is closed and the next begun; payloads are deleted by whole segments."""
    max_bytes: int = Field(default=64 << 30, ge=1)
    """Byte budget of all payloads; beyond it InsertGroup answers FULL until a checkpoint frees some."""
    quarantine_bytes: int = Field(default=256 << 20, ge=0)
    """Byte budget of groups that training could not use, kept beside the others for people; the newest are kept."""
    max_group_bytes: int = Field(default=48 << 20, ge=1)
    """Largest group; must fit into one message."""
    source_roots: tuple[Path, ...] = ()
    """Folders that CreateTable may name sources in. Unset: the folders of the sources configured here."""
    worker_silence_s: Seconds = 10.0
    """LeaseBatch says that no worker asks for prompts when none has for this long."""
    tables: dict[str, TableSettings] = Field(default={})
    """Tables that exist from the start, by name."""

    @field_validator("tables", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        named: dict[str, Any] = {}
        for name, table in value.items():
            if isinstance(table, dict) and table.get("name", name) != name:
                raise ValueError(f'table "{name}" calls itself "{table["name"]}"')
            named[name] = {**table, "name": name} if isinstance(table, dict) else table
        return named

    @field_validator("tables", mode="after")
    @classmethod
    def _possible(cls, tables: dict[str, TableSettings], info: ValidationInfo) -> dict[str, TableSettings]:
        base = (info.context or {}).get("base_dir", Path())
        resolved: dict[str, TableSettings] = {}
        refused: list[tuple[Key, str]] = []
        for name, table in tables.items():
            try:
                check_table(table)
            except VimeError as error:
                refused.append(((name,), error.message))
                continue
            path = (base / table.source.path).absolute()
            source = table.source.model_copy(update={"path": path})
            resolved[name] = table.model_copy(update={"source": source}).filled()
        refuse(refused)
        return resolved

    @model_validator(mode="after")
    def _one_file_for_a_source_name(self) -> BufferSettings:
        check_source_names(self.tables.values())
        return self

    @model_validator(mode="after")
    def _room_for_new_groups(self) -> BufferSettings:
        try:
            check_budget(self.tables.values(), self.max_bytes)
        except VimeError as error:
            raise ValueError(error.message) from None
        return self

    def roots(self) -> tuple[Path, ...]:
        """Folders that CreateTable may name sources in."""
        found = self.source_roots or tuple(table.source.path.parent for table in self.tables.values())
        return tuple(dict.fromkeys(path.resolve() for path in found))


def check_source_names(tables: Any) -> None:
    """Prompt ids begin with the source's name, so that one name must mean one file.

    Raises:
        ValueError: two files share a name.
    """
    paths: dict[str, Path] = {}
    for table in tables:
        name, path = table.source.name, table.source.path
        if paths.setdefault(name, path) != path:
            raise ValueError(
                f'two sources are called "{name}": {paths[name]} and {path}; give one of them another source.name'
            )


class BufferConfig(ServiceConfig):
    """All settings of the buffer service."""

    buffer: BufferSettings
    """The ledger."""

    @model_validator(mode="after")
    def _a_group_fits_into_a_message(self) -> BufferConfig:
        group, message = self.buffer.max_group_bytes, self.server.max_message_bytes
        if group + FRAME_BYTES > message:
            raise ValueError(
                f"buffer.max_group_bytes {group} does not fit into one message: server.max_message_bytes is {message}, "
                f"of which {FRAME_BYTES} are the frame's"
            )
        return self
