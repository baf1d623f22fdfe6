"""Checks of a routing trace: together its segments cover every token that the model consumed, once.

DESIGN section 3: missing, extra, duplicate or out-of-range rows are an error, never padding.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from vime_buffer.content import RouteSegment, RouteTrace
from vime_buffer.values import ModelLimits
from vime_service.errors import BadRoutingTrace, DigestMismatch, InvalidArgument

_FEW = 32
"""Experts per token up to which comparing columns is faster than sorting rows."""
_SHOWN = 16
_ITEM_BYTES = {"UINT8": 1, "UINT16": 2}


def check_routes(
    trace: RouteTrace, consumed_tokens: int, run_id: str, where: str, model: ModelLimits | None = None
) -> tuple[object, ...]:
    """Check a trace; what all samples of a group must share: layers, number of experts, top-k.

    Args:
        trace: the segments, each `[rows, moe_layers, top_k]`.
        consumed_tokens: prompt + response - 1, the number of rows expected.
        run_id: the run that all versions must be of.
        where: the field's path, for messages.
        model: whose layers, experts and top-k they must be; None: nothing is known of it.

    Raises:
        BadRoutingTrace: rows or ids are wrong.
        DigestMismatch: the bytes are not those that were announced.
        InvalidArgument: dtype, source or version is wrong.
    """
    layers = tuple(trace.moe_layer_ids)
    if model is not None:
        _check_model("moe_layer_ids", list(layers), list(model.moe_layer_ids), where)
        _check_model("num_experts", trace.num_experts, model.num_experts, where)
    if not layers or any(b <= a for a, b in pairwise(layers)):
        raise BadRoutingTrace(
            f"{where}.moe_layer_ids must rise and not be empty, found {list(layers[:8])}",
            field=f"{where}.moe_layer_ids",
            expected="rising",
            actual=len(layers),
        )
    if trace.num_experts < 1:
        raise BadRoutingTrace(f"{where}.num_experts is 0", field=f"{where}.num_experts", expected=1, actual=0)
    _check_cover(trace, consumed_tokens, where)
    top_ks = {
        _check_segment(segment, trace, len(layers), run_id, f"{where}.segments[{position}]")
        for position, segment in enumerate(trace.segments)
    }
    if len(top_ks) != 1:
        raise BadRoutingTrace(
            f"{where}: segments disagree about top-k: {sorted(top_ks)}", field=where, expected=1, actual=len(top_ks)
        )
    top_k = top_ks.pop()
    if model is not None:
        _check_model("top_k", top_k, model.top_k, where)
    return layers, trace.num_experts, top_k


def _check_model(name: str, actual: object, expected: object, where: str) -> None:
    if actual != expected:
        raise BadRoutingTrace(
            f"{where}.{name} is {str(actual)[:200]}, the model's is {str(expected)[:200]}",
            field=f"{where}.{name}",
            expected=str(expected)[:200],
            actual=str(actual)[:200],
        )


def _check_cover(trace: RouteTrace, consumed_tokens: int, where: str) -> None:
    expected = 0
    for position, segment in enumerate(trace.segments):
        if segment.rows == 0 or segment.first_token != expected:
            what = "has no rows" if segment.rows == 0 else f"begins at token {segment.first_token}"
            raise BadRoutingTrace(
                f"{where}.segments[{position}] {what}, expected rows from token {expected} on",
                field=f"{where}.segments[{position}]",
                expected=expected,
                actual=segment.first_token,
            )
        expected += segment.rows
    if expected != consumed_tokens:
        raise BadRoutingTrace(
            f"{where} has {expected} rows for {consumed_tokens} consumed tokens (prompt + response - 1)",
            field=where,
            expected=consumed_tokens,
            actual=expected,
        )


def _check_segment(segment: RouteSegment, trace: RouteTrace, layers: int, run_id: str, where: str) -> int:
    """Top-k of the segment."""
    wanted = "UINT8" if trace.num_experts <= 256 else "UINT16"
    if segment.dtype != wanted:
        raise InvalidArgument(
            f"{where}.experts is {segment.dtype or 'of no dtype'}; {trace.num_experts} experts go as {wanted}",
            field=f"{where}.experts.dtype",
            expected=wanted,
            actual=segment.dtype,
        )
    if not segment.source_known:
        raise InvalidArgument(f"{where}.source is unspecified", field=f"{where}.source")
    if segment.version.run_id != run_id:
        raise InvalidArgument(
            f'{where}.weight_version is of run "{segment.version.run_id}", this is run "{run_id}"',
            field=f"{where}.weight_version",
            expected=run_id,
            actual=segment.version.run_id,
        )
    shape = segment.shape
    top_k = shape[2] if len(shape) == 3 else 0
    if shape[:2] != (segment.rows, layers) or not 1 <= top_k <= trace.num_experts:
        raise BadRoutingTrace(
            f"{where}.experts has shape {list(shape)}, expected [{segment.rows}, {layers}, top_k]",
            field=f"{where}.experts.shape",
            expected=f"{segment.rows},{layers}",
            actual=",".join(map(str, shape)),
        )
    _check_bytes(segment, trace, math.prod(shape) * _ITEM_BYTES[wanted], top_k, where)
    return top_k


def _check_bytes(segment: RouteSegment, trace: RouteTrace, nbytes: int, top_k: int, where: str) -> None:
    if segment.inline is None:
        raise InvalidArgument(
            f"{where}.experts comes as a payload handle; routes are taken inline only", field=f"{where}.experts.handle"
        )
    if len(segment.inline) != nbytes:
        raise BadRoutingTrace(
            f"{where}.experts has {len(segment.inline)} bytes, its shape says {nbytes}",
            field=f"{where}.experts",
            expected=nbytes,
            actual=len(segment.inline),
        )
    digest = xxhash.xxh3_128_hexdigest(segment.inline)
    if digest != segment.digest:
        raise DigestMismatch(
            f"{where}.experts has digest {digest}, announced was {segment.digest or 'none'}",
            name=f"{where}.experts",
            expected=segment.digest,
            actual=digest,
        )
    num_experts = trace.num_experts
    experts = np.frombuffer(segment.inline, dtype=np.uint8 if num_experts <= 256 else "<u2")
    highest = int(experts.max())
    if highest >= num_experts:
        raise BadRoutingTrace(
            f"{where}.experts names expert {highest} of {num_experts}",
            field=f"{where}.experts",
            expected=num_experts - 1,
            actual=highest,
        )
    row = _repeats(experts.reshape(-1, top_k))
    if row is not None:
        token, layer = divmod(row, len(trace.moe_layer_ids))
        chosen = experts.reshape(-1, top_k)[row].tolist()
        raise BadRoutingTrace(
            f"{where}.experts chooses {chosen[:_SHOWN]} for token {segment.first_token + token} in layer "
            f"{trace.moe_layer_ids[layer]}: an expert is chosen once",
            field=f"{where}.experts",
            expected=top_k,
            actual=len(set(chosen)),
        )


def _repeats(rows: NDArray[Any]) -> int | None:
    """The first row that holds a value twice. Columns are compared: sorting each short row takes far longer."""
    top_k = rows.shape[1]
    if top_k > _FEW:
        ordered = np.sort(rows, axis=1)
        found = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    else:
        columns = np.ascontiguousarray(rows.T)
        found = np.zeros(rows.shape[0], dtype=bool)
        for a, b in combinations(range(top_k), 2):
            found |= columns[a] == columns[b]
    return int(found.argmax()) if found.any() else None
