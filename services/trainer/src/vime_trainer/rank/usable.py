"""Which groups of a share can be trained at all. Looked at before any rank trains: one that cannot leaves its batch,
and the run goes on without it."""

from __future__ import annotations

from collections.abc import Sequence

from vime.common.v1.trajectory_pb2 import Sample as SampleProto
from vime.common.v1.trajectory_pb2 import TrajectoryGroup
from vime_trainer.algorithm_config import AlgorithmConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.errors import EngineError
from vime_trainer.engine.shape import ModelShape
from vime_trainer.rank.groups import GroupError, Share, name_of, select


def select_usable(
    groups: Sequence[TrajectoryGroup], places: Sequence[int], config: AlgorithmConfig, engine: Engine
) -> tuple[Share, dict[str, str]]:
    """The trainable samples of the groups that fit the model and themselves; the other groups by id, with the reason.

    Args:
        groups: whole groups.
        places: position of each in the batch.
        config: as in `select`.
        engine: what they are to be trained by.
    """
    share, unusable = select([], [], config), dict[str, str]()
    for place, group in zip(places, groups, strict=True):
        try:
            _check(group, engine.model_shape)
            part = select([group], [place], config)
            engine.check(part.samples)
        except (ValueError, EngineError) as error:  # NumPy's, too, of bytes that are no array
            unusable[group.group_id] = str(error)
            continue
        for name in ("samples", "protos", "places", "all_protos", "unscored"):
            getattr(share, name).extend(getattr(part, name))
        share.left_out.update(part.left_out)
    return share, unusable


def check_routes(sample: SampleProto, shape: ModelShape) -> None:
    """Refuse a trace that says it is of another model: its rows would be replayed at the wrong layers.

    Raises GroupError naming both.
    """
    if not sample.HasField("routed_experts"):
        return
    trace = sample.routed_experts
    layers, experts = list(trace.moe_layer_ids), int(trace.num_experts)
    if layers != list(shape.moe_layers):
        raise GroupError(
            f"{name_of(sample)}: the routing trace is of MoE layers {layers}, the model's are {list(shape.moe_layers)}"
        )
    if experts != shape.num_experts:
        raise GroupError(
            f"{name_of(sample)}: the routing trace is of {experts} experts, the model has {shape.num_experts}"
        )


def _check(group: TrajectoryGroup, shape: ModelShape) -> None:
    seen: set[int] = set()
    for sample in group.samples:
        if sample.group_id != group.group_id:
            raise GroupError(f"group {group.group_id} holds sample {name_of(sample)}, which is of another group")
        if sample.sample_index in seen:  # both would pass for one trajectory
            raise GroupError(f"group {group.group_id} holds sample {name_of(sample)} twice")
        seen.add(sample.sample_index)
        check_routes(sample, shape)
