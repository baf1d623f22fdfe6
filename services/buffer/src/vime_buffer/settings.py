"""Settings of tables, from TOML or from CreateTable, and the refusal of those that must deadlock."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, field_validator

from vime_service.config import ConfigModel
from vime_service.errors import ImpossibleConfig, InexactSampling, InvalidArgument

Kind = Literal["train", "eval", "sft", "unscored"]
_NAME = re.compile(r"train|sft|unscored|eval/[A-Za-z0-9][A-Za-z0-9_.-]*")
_GIB = 1 << 30
LONGEST_NAME = 128
"""Characters of a table's, a source's and a reward's name."""
LARGEST_SETTINGS = 64 << 10
"""Bytes of a table's settings as JSON: every lease carries some of them, every listing all."""
_LONGEST_TTL = 86400
_MAX_TTLS = 20

BOUNDS_IN_A_ROW = ("max_drops_in_a_row", "max_failures_in_a_row", "max_unusable_in_a_row")
_FEWEST_IN_A_ROW = 4
MUTABLE = (
    "sampling",
    "max_attempts",
    "lease_ttl",
    "max_lease",
    "eval_interval",
    "retained_bytes",
    *BOUNDS_IN_A_ROW,
)
"""Settings that may change while a table runs."""


class SourceSettings(ConfigModel):
    """Where prompts come from: a JSONL file."""

    name: str = Field(default="", pattern=r"^[^:\s]*$")
    """Name of the source, part of prompt ids. Unset: the file's name without its ending."""
    path: Path
    """JSONL file; a relative path is relative to the configuration file."""
    prompt_key: str = Field(default="prompt", min_length=1)
    """Key of the record that holds the prompt: text, a list of messages, or a list of token ids."""
    shuffle: bool = False
    """Shuffle every epoch, with the run seed plus the epoch."""
    epochs: int = Field(default=0, ge=0, lt=2**32)
    """Passes over the source; 0 means no end. Eval tables take one pass in every round."""
    required_keys: tuple[str, ...] = ()
    """Keys that every record must have."""
    lenient: bool = False
    """Skip and count bad lines instead of refusing the file."""
    limit: int = Field(default=0, ge=0)
    """Use at most this many records, from the start; 0 means all."""

    def has(self, epoch: int) -> bool:
        """True if the source has this pass."""
        return self.epochs == 0 or epoch < self.epochs


class SamplingSettings(ConfigModel):
    """How responses are sampled; the contract's SamplingParams."""

    max_tokens: int = Field(ge=1, lt=2**32)
    """Largest number of response tokens."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """Softmax temperature; 0 is greedy. Unset means 1."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus mass kept. Unset means 1."""
    top_k: int | None = Field(default=None, ge=0, lt=2**32)
    """Candidates kept. Unset or 0 means all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, beside the model's own."""
    ignore_eos: bool = False
    """Go on after EOS until max_tokens."""
    extra_json: str = ""
    """Engine options of other names, as one JSON object."""

    def differs(self, said: Mapping[str, object]) -> tuple[str, object, object] | None:
        """The first field in which a group was sampled otherwise, with both values; None if there is none.

        A group that says nothing of it is held to what changes logprobs: the trainer takes its word for the defaults.
        """
        for name in type(self).model_fields if said else ("temperature", "top_p", "top_k"):
            meant, found = _meaning(name, getattr(self, name)), _meaning(name, said.get(name))
            if meant != found:
                return name, meant, found
        return None

    @field_validator("extra_json")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        if value:
            try:
                parsed = json.loads(value)
            except ValueError as error:
                raise ValueError(f"extra_json is not JSON: {error}") from None
            if not isinstance(parsed, dict):
                raise ValueError(f"extra_json must be a JSON object, not {type(parsed).__name__}")
        return value


def _meaning(name: str, value: Any) -> object:
    """A value as the engine understands it: unset is its default, floats are those of the wire."""
    if name in ("temperature", "top_p"):
        return struct.unpack("<f", struct.pack("<f", 1.0 if value is None else value))[0]
    if name in ("stop", "stop_token_ids"):
        return tuple(value or ())
    return value or 0


class TableSettings(ConfigModel):
    """One table. Tables of all kinds are the same thing with other limits."""

    name: str = ""
    """`train`, `eval/<name>`, `sft` or `unscored`; in TOML it is the section's key and is not written again."""
    source: SourceSettings
    """Prompts."""
    sampling: SamplingSettings
    """How to sample."""
    samples_per_prompt: int = Field(default=1, ge=1, le=65536)
    """Samples of one group."""
    groups_per_step: int = Field(default=0, ge=0, lt=2**32)
    """Groups of one batch; must be set for every table but eval tables."""
    max_staleness: int = Field(default=0, ge=0, lt=2**32)
    """k: 0 is synchronous on-policy, 1 one step off, more bounded asynchrony."""
    publish_interval: int = Field(default=1, ge=1, lt=2**32)
    """Steps between publishes; publish_interval - 1 must not exceed max_staleness."""
    max_attempts: int = Field(default=3, ge=1, le=1000)
    """Attempts of a prompt before it is given up."""
    lease_ttl: float = Field(default=60.0, gt=0, le=_LONGEST_TTL)
    """Seconds that a prompt lease lives without a keep-alive."""
    max_lease: float = Field(default=0.0, ge=0, le=_MAX_TTLS * _LONGEST_TTL)
    """Seconds that a prompt lease lives at most, however often it is kept alive: a worker that lives on while its work
    never ends must not hold a prompt, and with it the batch, for ever. 0 means 20 x lease_ttl."""
    generation_deadline: float = Field(default=50.0, gt=0, le=86400)
    """Seconds that one generation may take at most; must be below lease_ttl."""
    selector: Literal["admission_order", "ready_first"] = "admission_order"
    """Order in which stored groups are leased to training."""
    max_evictions: int = Field(default=2, ge=1, le=1000)
    """ready_first: evictions of one prompt before training waits for it."""
    retained_bytes: int = Field(default=_GIB, ge=1)
    """Bytes of consumed groups kept for a rewind; a checkpoint frees them."""
    capacity: int = Field(default=0, ge=0, lt=2**32)
    """Largest number of groups stored and open together; 0 means what the admission rule gives."""
    eval_interval: int = Field(default=0, ge=0, lt=2**32)
    """Eval tables: steps between rounds; rounds before step 1 and after the last are always held."""
    eval_hold: bool = True
    """Eval tables: the next LeaseBatch waits until the round is done."""
    reward: str = ""
    """Name of the reward in the recipe; unset means its default."""
    require_routes: bool = False
    """Groups must have routing traces."""
    max_drops_in_a_row: int = Field(default=0, ge=0, lt=2**32)
    """Groups that filters may drop in a row before LeaseBatch fails; 0 means 20 x groups_per_step."""
    max_failures_in_a_row: int = Field(default=0, ge=0, lt=2**32)
    """Prompts that may be given up in a row, whatever failed, before LeaseBatch fails; 0 means 2 x groups_per_step, and
    not below 4."""
    max_unusable_in_a_row: int = Field(default=0, ge=0, lt=2**32)
    """Groups that training may refuse without training a step in between before the run is told; 0 means
    2 x groups_per_step, and not below 4."""

    max_forks: int = Field(default=256, ge=1, le=65536)
    """Samples that one trajectory may have forked into."""
    max_reward_parts: int = Field(default=64, ge=1, le=65536)
    """Parts that the reward of one sample may have."""

    @field_validator("name")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        if value and not _NAME.fullmatch(value):
            raise ValueError(f'table "{value}": the name must be train, sft, unscored or eval/<name>')
        return value

    @property
    def kind(self) -> Kind:
        """The part of the name before the slash."""
        return cast(Kind, self.name.partition("/")[0])  # `name` is checked

    @property
    def is_eval(self) -> bool:
        """True for `eval/<name>`."""
        return self.kind == "eval"

    @classmethod
    def stored(cls, text: str) -> TableSettings:
        """Settings from the ledger, which may be older than a setting, or than the refusal of one that does nothing."""
        table = cls.model_validate_json(text)
        return table.model_copy(update={field: _default(field) for field in _idle(table)}).filled()

    def at(self, path: Path) -> TableSettings:
        """The same table with its source at `path`."""
        return self.model_copy(update={"source": self.source.model_copy(update={"path": path})})

    def filled(self) -> TableSettings:
        """The same table with every default that depends on other settings written out."""
        source = self.source
        if not source.name:
            source = source.model_copy(update={"name": re.sub(r"[:\s]", "_", source.path.stem)})
        changes: dict[str, object] = {"source": source, "max_lease": self.max_lease or _MAX_TTLS * self.lease_ttl}
        if not self.is_eval:
            changes["capacity"] = self.capacity or (self.max_staleness + 1) * self.groups_per_step
            changes["max_drops_in_a_row"] = self.max_drops_in_a_row or 20 * self.groups_per_step
            few = max(_FEWEST_IN_A_ROW, 2 * self.groups_per_step)
            changes["max_failures_in_a_row"] = self.max_failures_in_a_row or few
            changes["max_unusable_in_a_row"] = self.max_unusable_in_a_row or few
        return self.model_copy(update=changes)


def _default(field: str) -> object:
    return TableSettings.model_fields[field].get_default()


def _idle(table: TableSettings) -> dict[str, str]:
    """Settings that do nothing on this table, and why."""
    if table.is_eval:
        scheduling = ("groups_per_step", "max_staleness", "publish_interval", "selector", "max_evictions", "capacity")
        return dict.fromkeys((*scheduling, *BOUNDS_IN_A_ROW), "eval tables have no admission rule")
    idle = dict.fromkeys(("eval_interval", "eval_hold"), "it is for eval tables")
    if table.selector != "ready_first":
        idle["max_evictions"] = f"selector {table.selector} evicts nothing; only ready_first does"
    return idle


def check_table(table: TableSettings) -> None:
    """Refuse what cannot work, with both numbers.

    Raises:
        InvalidArgument: a setting is missing, or has no effect on a table of this kind.
        ImpossibleConfig: the table must deadlock.
        InexactSampling: the trainer could not reproduce the logprobs.
    """
    _check_size(table)
    for field, why in _idle(table).items():
        value = getattr(table, field)
        if value != _default(field):
            raise InvalidArgument(
                f'table "{table.name}": {field} {value} has no effect: {why}', field=field, value=value
            )
    if table.is_eval:
        _check_eval(table)
    else:
        _check_train(table)
    if table.lease_ttl <= table.generation_deadline:
        raise ImpossibleConfig(
            f'table "{table.name}": lease_ttl {table.lease_ttl:g} s must be above generation_deadline '
            f"{table.generation_deadline:g} s, or leases end while their samples are still generated",
            lease_ttl=table.lease_ttl,
            generation_deadline=table.generation_deadline,
        )
    if 0 < table.max_lease < table.lease_ttl:
        raise ImpossibleConfig(
            f'table "{table.name}": max_lease {table.max_lease:g} s must not be below lease_ttl {table.lease_ttl:g} s',
            max_lease=table.max_lease,
            lease_ttl=table.lease_ttl,
        )


def _check_size(table: TableSettings) -> None:
    for field, value in (("name", table.name), ("source.name", table.source.name), ("reward", table.reward)):
        if len(value) > LONGEST_NAME:
            raise InvalidArgument(
                f'{field} "{value[:40]}..." has {len(value)} characters, at most {LONGEST_NAME} may be',
                field=field,
                limit=LONGEST_NAME,
                actual=len(value),
            )
    size = len(table.model_dump_json().encode())
    if size > LARGEST_SETTINGS:
        raise InvalidArgument(
            f'the settings of table "{table.name}" have {size} bytes, at most {LARGEST_SETTINGS} may be',
            field="config",
            limit=LARGEST_SETTINGS,
            actual=size,
        )


def _check_train(table: TableSettings) -> None:
    if table.groups_per_step < 1:
        raise InvalidArgument(f'table "{table.name}": groups_per_step must be set', field="groups_per_step", value=0)
    capacity = table.capacity or (table.max_staleness + 1) * table.groups_per_step
    if table.groups_per_step > capacity:
        raise ImpossibleConfig(
            f'table "{table.name}": groups_per_step {table.groups_per_step} is above capacity {capacity}: '
            "a batch could never fill",
            groups_per_step=table.groups_per_step,
            capacity=capacity,
        )
    if table.publish_interval - 1 > table.max_staleness:
        raise ImpossibleConfig(
            f'table "{table.name}": publish_interval {table.publish_interval} - 1 is above max_staleness '
            f"{table.max_staleness}: the admission rule would wait for a publish that waits for the next batch",
            publish_interval=table.publish_interval,
            max_staleness=table.max_staleness,
        )
    if table.kind == "train":
        _check_exact(table)


def _check_eval(table: TableSettings) -> None:
    if table.source.epochs > 1:
        raise InvalidArgument(
            f'table "{table.name}": source.epochs {table.source.epochs} has no effect: '
            "an eval round takes its source once",
            field="source.epochs",
            value=table.source.epochs,
        )


def _check_exact(table: TableSettings) -> None:
    """The trainer divides by the temperature and knows no nucleus."""
    sampling = table.sampling
    wrong = {
        "temperature": sampling.temperature == 0 and sampling.temperature,
        "top_p": sampling.top_p is not None and sampling.top_p < 1 and sampling.top_p,
        "top_k": bool(sampling.top_k) and sampling.top_k,
    }
    for field, value in wrong.items():
        if value is not False:
            raise InexactSampling(
                f'table "{table.name}": sampling.{field} {value:g} gives logprobs that the trainer cannot reproduce; '
                "leave it unset for training tables",
                field=f"sampling.{field}",
                value=value,
            )


def check_budget(tables: Iterable[TableSettings], max_bytes: int) -> None:
    """Refuse tables that may keep as many bytes of trained groups as there are for all groups.

    Raises:
        ImpossibleConfig: nothing could be inserted any more before the first of them asks for a checkpoint.
    """
    retained = sum(table.retained_bytes for table in tables if not table.is_eval)
    if retained >= max_bytes:
        raise ImpossibleConfig(
            f"retained_bytes of all tables, {retained} together, must be below buffer.max_bytes {max_bytes}: "
            "groups that are trained and kept for a rewind would leave no room for new ones",
            retained_bytes=retained,
            max_bytes=max_bytes,
        )


def changed_fields(old: TableSettings, new: TableSettings) -> list[str]:
    """Names of the settings that differ. The file's place may change; its content is checked by digest."""

    def essence(table: TableSettings) -> dict[str, Any]:
        data = table.model_dump(mode="json")
        data["source"].pop("path")
        return data

    before, after = essence(old), essence(new)
    return [field for field in before if before[field] != after[field]]
