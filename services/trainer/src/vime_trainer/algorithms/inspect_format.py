"""The looking glass's file: hand-written trajectories as JSON, checked, and as the tensors of a step.

The format is documented in docs/inspect.md. Every refusal names the trajectory and both numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from vime_trainer.algorithms.advantages import AdvantageConfig, AdvantageInputs
from vime_trainer.algorithms.decisions import (
    RewardConfig,
    SoftOverlong,
    drop_truncated,
    parse_rewards,
    shape_rewards,
    soft_overlong_penalty,
    trajectory_lengths,
)
from vime_trainer.algorithms.index import index_of, trajectory_key
from vime_trainer.algorithms.losses import (
    CorrectionConfig,
    Head,
    PolicyBatch,
    PolicyLossConfig,
    Rejection,
    ValueLossConfig,
    icepop,
    mis,
    tis,
)
from vime_trainer.algorithms.tensors import pad_rows

TOKEN_COLUMNS = (
    "loss_mask", "logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "entropy",
    "values", "old_values",
)  # fmt: skip
OTHER_KEYS = (
    "id", "group_id", "trajectory_id", "reward", "prompt_token_ids", "response_token_ids", "finish_reason", "head",
    "comment",
)  # fmt: skip
PRESETS: dict[str, Callable[[], CorrectionConfig]] = {"tis": tis, "icepop": icepop, "mis": mis}
DTYPES = {"float32": torch.float32, "float64": torch.float64}

Settings = TypeVar("Settings", AdvantageConfig, PolicyLossConfig, ValueLossConfig, RewardConfig, SoftOverlong)


@dataclass(frozen=True)
class InspectSettings:
    """The parts of a step's configuration that the file may set."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    soft_overlong: SoftOverlong | None = None
    drop_truncated: bool = False
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Document:
    """A checked file. `split`: ranks → micro-batches → positions in `ids`. `inputs` hold the shaped rewards.
    `lengths`: response tokens of each trajectory, to cut the padding off again.
    """

    ids: list[str]
    lengths: list[int]
    group_ids: list[Any]
    split: list[list[list[int]]]
    settings: InspectSettings
    raw_rewards_B: Tensor
    unscored_reasons: dict[int, str]
    inputs: AdvantageInputs
    columns: dict[str, Tensor]
    head: Head | None

    def policy_batch(self, advantages_BT: Tensor, loss_mask_BT: Tensor) -> PolicyBatch:
        """The whole batch with its advantages. Raises `ValueError` without current logprobs."""
        if "logprobs" not in self.columns:
            raise ValueError("no trajectory has logprobs, the current policy's; the loss needs them")
        names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy")
        given = {"old_logprobs": self.columns["logprobs"]} | self.columns  # the first step on the batch
        columns = {f"{name}_BT": given[name] for name in names if name in given}
        return PolicyBatch(self.columns["logprobs"], advantages_BT, loss_mask_BT, head=self.head, **columns)


def read_document(data: Any) -> Document:
    """Check parsed JSON and build tensors. Raises `ValueError` that says where."""
    _check_keys(data, "the file", {"settings", "trajectories", "split", "comment"})
    settings = _settings(data.get("settings", {}))
    rows = data.get("trajectories")
    if not isinstance(rows, list) or not rows:
        raise ValueError("the file needs a non-empty list `trajectories`")
    for place, row in enumerate(rows):
        _check_row(row, place)
    ids = [str(row["id"]) for row in rows]
    repeated = next((name for name, count in Counter(ids).items() if count > 1), None)
    if repeated is not None:
        raise ValueError(f"trajectory {repeated!r}: the id occurs {ids.count(repeated)} times")
    lengths = [len(row["response_token_ids"]) for row in rows]
    columns = _columns(rows, lengths, settings.dtype)
    raw = parse_rewards([row.get("reward") for row in rows])
    trajectories = _trajectories(rows)
    _check_siblings(rows, trajectories, raw.rewards_B)
    mask_BT = columns["loss_mask"]
    if settings.drop_truncated:
        mask_BT = drop_truncated(mask_BT, torch.tensor([row.get("finish_reason") == "length" for row in rows]))
    return Document(
        ids=ids,
        lengths=lengths,
        group_ids=[row["group_id"] for row in rows],
        split=_split(data.get("split"), ids),
        settings=settings,
        raw_rewards_B=raw.rewards_B,
        unscored_reasons=raw.reasons,
        inputs=_inputs(rows, columns, trajectories, _shaped(raw.rewards_B, trajectories, lengths, settings), mask_BT),
        columns=columns,
        head=_head(rows, max(lengths), settings.dtype),
    )


# ---- settings


def _settings(given: Any) -> InspectSettings:
    _check_keys(given, "settings", {item.name for item in fields(InspectSettings)})
    loss = dict(given.get("loss", {}))
    if loss.get("correction") is not None:
        loss["correction"] = _correction(loss["correction"])
    overlong = given.get("soft_overlong")
    dtype = given.get("dtype", "float64")
    if dtype not in DTYPES:
        raise ValueError(f"settings.dtype={dtype!r}: known: {', '.join(DTYPES)}")
    return InspectSettings(
        advantage=_build(AdvantageConfig, given.get("advantage", {}), "settings.advantage"),
        loss=_build(PolicyLossConfig, loss, "settings.loss"),
        value_loss=_build(ValueLossConfig, given.get("value_loss", {}), "settings.value_loss"),
        reward=_build(RewardConfig, given.get("reward", {}), "settings.reward"),
        soft_overlong=None if overlong is None else _build(SoftOverlong, overlong, "settings.soft_overlong"),
        drop_truncated=bool(given.get("drop_truncated", False)),
        dtype=DTYPES[dtype],
    )


def _correction(given: Any) -> CorrectionConfig:
    """Either {"preset": "tis" | "icepop" | "mis", …} or the fields themselves."""
    where = "settings.loss.correction"
    _check_keys(given, where, {item.name for item in fields(CorrectionConfig)} | {"preset"})
    rest = {name: value for name, value in given.items() if name != "preset"}
    if rest.get("rejection") is not None:
        _check_keys(rest["rejection"], f"{where}.rejection", {item.name for item in fields(Rejection)})
        rest["rejection"] = Rejection(**rest["rejection"])
    preset = given.get("preset")
    if preset is None:
        return CorrectionConfig(**rest)
    if preset not in PRESETS:
        raise ValueError(f"{where}.preset={preset!r}: known: {', '.join(PRESETS)}")
    base = PRESETS[preset]()
    return CorrectionConfig(**({item.name: getattr(base, item.name) for item in fields(base)} | rest))


def _build(kind: type[Settings], given: Any, where: str) -> Settings:
    _check_keys(given, where, {item.name for item in fields(kind)})
    try:
        return kind(**given)
    except TypeError as error:  # a value of a type that the field cannot compare
        raise ValueError(f"{where}: {error}") from error


def _check_keys(given: Any, where: str, known: set[str]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be an object, not {type(given).__name__}")
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{where} has unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")


# ---- trajectories


def _check_row(row: Any, place: int) -> None:
    _check_keys(row, f"trajectory number {place}", {*TOKEN_COLUMNS, *OTHER_KEYS})
    for key in ("id", "group_id", "response_token_ids"):
        if key not in row:
            raise ValueError(f"trajectory {row.get('id', f'number {place}')!r} has no {key}")
    for key in ("group_id", "trajectory_id"):
        name = row.get(key)
        if not isinstance(name, str | int | float | None) or (isinstance(name, float) and not math.isfinite(name)):
            raise ValueError(f"trajectory {row['id']!r}: {key} must be a string or a number, not {row[key]!r}")
    _check_numbers(row["response_token_ids"], f"trajectory {row['id']!r}: response_token_ids")
    length = len(row["response_token_ids"])
    for name in (name for name in TOKEN_COLUMNS if row.get(name) is not None):
        _check_numbers(row[name], f"trajectory {row['id']!r}: {name}")
        if len(row[name]) != length:
            raise ValueError(f"trajectory {row['id']!r}: {name} has {len(row[name])} entries, "
                             f"response_token_ids has {length}")  # fmt: skip


def _check_numbers(entries: Any, where: str) -> None:
    if not isinstance(entries, list):
        raise ValueError(f"{where} must be a list, not {type(entries).__name__}")
    for place, entry in enumerate(entries):
        if not isinstance(entry, bool | int | float):
            raise ValueError(f"{where}[{place}]={entry!r} is not a number")


def _columns(rows: Sequence[Mapping[str, Any]], lengths: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Padded [B, T] tensors of the columns the file has; a column is in every non-empty trajectory or in none."""
    present: dict[str, list[Tensor]] = {}
    for name in TOKEN_COLUMNS:
        holders = [row["id"] for row in rows if row.get(name) is not None]
        if name == "loss_mask":
            masks = [row.get(name) for row in rows]
            present[name] = [
                torch.ones(n, dtype=torch.float64) if mask is None else torch.tensor(mask, dtype=torch.float64)
                for mask, n in zip(masks, lengths, strict=True)
            ]
        elif holders:
            lacking = [row["id"] for row, n in zip(rows, lengths, strict=True) if n and row.get(name) is None]
            if lacking:
                raise ValueError(f"trajectory {lacking[0]!r} has no {name}, but trajectory {holders[0]!r} has")
            present[name] = [torch.tensor(row.get(name) or [], dtype=dtype) for row in rows]
    columns = pad_rows(**present)
    columns["loss_mask"] = columns["loss_mask"] != 0
    _check_entries(columns, [str(row["id"]) for row in rows])
    return columns


def _check_entries(columns: dict[str, Tensor], ids: list[str]) -> None:
    """At a trained token a non-finite number or a positive logprob is a mistake; elsewhere it is ignored."""
    for name, x_BT in columns.items():
        bad = torch.nonzero(columns["loss_mask"] & ~torch.isfinite(x_BT))
        if len(bad):
            b, t = bad[0].tolist()
            raise ValueError(f"trajectory {ids[b]!r}: {name}[{t}]={x_BT[b, t].item()} at an unmasked token")
        if name.endswith("logprobs") and bool((columns["loss_mask"] & (x_BT > 0)).any()):
            b, t = torch.nonzero(columns["loss_mask"] & (x_BT > 0))[0].tolist()
            raise ValueError(f"trajectory {ids[b]!r}: {name}[{t}]={x_BT[b, t].item()} is above 0, no log probability")


def _head(rows: Sequence[Mapping[str, Any]], width: int, dtype: torch.dtype) -> Head | None:
    """The engine's top-K per token, −inf where absent."""
    if all(row.get("head") is None for row in rows):
        return None
    sides: dict[str, Tensor] = {}
    for side in ("rollout_logprobs", "logprobs"):
        tokens = [_head_side(row, side) for row in rows]
        most = max((len(entries) for row in tokens for entries in row), default=0)
        padded = [[[*entries, *[-math.inf] * (most - len(entries))] for entries in row] for row in tokens]
        empty = [[-math.inf] * most]
        sides[side] = torch.tensor([row + empty * (width - len(row)) for row in padded], dtype=dtype)
    return Head(sides["rollout_logprobs"], sides["logprobs"])


def _head_side(row: Mapping[str, Any], side: str) -> list[list[float]]:
    length = len(row["response_token_ids"])
    head = row.get("head") or {"rollout_logprobs": [[]] * length, "logprobs": [[]] * length}
    _check_keys(head, f"trajectory {row['id']!r}: head", {"rollout_logprobs", "logprobs"})
    entries: list[list[float]] = head.get(side, [])
    if len(entries) != length:
        raise ValueError(f"trajectory {row['id']!r}: head.{side} has {len(entries)} entries, "
                         f"response_token_ids has {length}")  # fmt: skip
    for entry in entries:
        _check_numbers(entry, f"trajectory {row['id']!r}: an entry of head.{side}")
    for t, (ours, theirs) in enumerate(zip(head["rollout_logprobs"], head["logprobs"], strict=False)):
        if len(ours) != len(theirs):
            raise ValueError(f"trajectory {row['id']!r}: head[{t}] has {len(ours)} rollout and {len(theirs)} logprobs")
    return entries


def _shaped(raw_B: Tensor, trajectories: Sequence[Hashable], lengths: list[int], settings: InspectSettings) -> Tensor:
    overlong = settings.soft_overlong
    longest = torch.tensor(trajectory_lengths(trajectories, lengths))
    penalty_B = None if overlong is None else soft_overlong_penalty(longest, overlong)
    return shape_rewards(raw_B, settings.reward, penalty_B)


def _trajectories(rows: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    """What siblings share, as in the trainer: the place of their group and the trajectory they forked from."""
    places = index_of([row["group_id"] for row in rows]).ids_B.tolist()
    return [trajectory_key(place, row.get("trajectory_id"), row["id"]) for place, row in zip(places, rows, strict=True)]


def _check_siblings(rows: Sequence[Mapping[str, Any]], trajectories: Sequence[Hashable], rewards_B: Tensor) -> None:
    first: dict[Hashable, int] = {}
    for b, trajectory in enumerate(trajectories):
        sibling = first.setdefault(trajectory, b)
        mine, its = float(rewards_B[b]), float(rewards_B[sibling])
        if mine != its and not (math.isnan(mine) and math.isnan(its)):
            raise ValueError(
                f"{rows[b]['id']!r} and {rows[sibling]['id']!r} forked from trajectory {rows[b]['trajectory_id']!r} "
                f"but have reward {rows[b].get('reward')!r} and {rows[sibling].get('reward')!r}"
            )


def _inputs(
    rows: Sequence[Mapping[str, Any]],
    columns: dict[str, Tensor],
    trajectories: Sequence[Hashable],
    rewards_B: Tensor,
    loss_mask_BT: Tensor,
) -> AdvantageInputs:
    """`old_logprobs` defaults to the current ones (the first step), `old_values` to `values`."""
    old = columns.get("old_logprobs", columns.get("logprobs"))
    return AdvantageInputs(
        rewards_B=rewards_B,
        loss_mask_BT=loss_mask_BT,
        groups=index_of([row["group_id"] for row in rows]),
        trajectories=index_of(trajectories),
        old_logprobs_BT=old,
        ref_logprobs_BT=columns.get("ref_logprobs"),
        teacher_logprobs_BT=columns.get("teacher_logprobs"),
        values_BT=columns.get("old_values", columns.get("values")),
    )


# ---- split


def _split(given: Any, ids: list[str]) -> list[list[list[int]]]:
    """Ranks → micro-batches → positions. Without one: one rank, one micro-batch."""
    if given is None:
        return [[list(range(len(ids)))]]
    position = {name: place for place, name in enumerate(ids)}
    if not isinstance(given, list) or not all(isinstance(rank, list) for rank in given):
        raise ValueError("split must be a list of ranks, each a list of micro-batches, each a list of trajectory ids")
    named = [str(name) for rank in given for micro in rank for name in micro]
    unknown = next((name for name in named if name not in position), None)
    if unknown is not None:
        raise ValueError(f"split names trajectory {unknown!r}, which is not in the file")
    counts = Counter(named)
    for name in ids:
        if counts[name] != 1:
            raise ValueError(f"split holds trajectory {name!r} {counts[name]} times; every trajectory is trained once")
    return [[[position[str(name)] for name in micro] for micro in rank] for rank in given]
