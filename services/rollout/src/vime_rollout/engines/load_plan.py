"""Watch what a weight load writes, element by element, without caring how the model maps names to parameters.

A dispatch mode sees every in-place operation while a model's own loader runs. Where the target lies in the storage of
a watched parameter, the exact elements are recorded, with the source tensor they came from. It works on meta tensors:
a load can be tried on a twin of the model that has no memory, before a single real weight is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

MAX_RUNS = 1 << 20
MAX_ERROR = 300
Intervals = list[tuple[int, int]]
Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and stride of a strided region of a storage, in elements."""


@dataclass(frozen=True, slots=True)
class _Write:
    """One in-place operation: elements of a parameter, and where they came from (`source` "" for a fill)."""

    parameter: str
    source: str
    target: Region


@dataclass(slots=True)
class LoadRecord:
    """What one load wrote on one rank. Plain data: it crosses the engine's processes.

    Attributes:
        unwritten: parameters not (wholly) written: name -> (elements written, elements).
        doubled: parameters some element of which was written from two sources: name -> those sources.
        unused: tensors nothing was read from.
        read: tensor -> intervals of its elements that were read, in row-major order.
        wrong_dtype: (tensor, its dtype, parameter, the parameter's dtype).
        written: parameters written whole and once.
        error: what the model's loader said when it failed; empty when it did not.
    """

    unwritten: dict[str, tuple[int, int]] = field(default_factory=dict)
    doubled: dict[str, list[str]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    read: dict[str, Intervals] = field(default_factory=dict)
    wrong_dtype: list[tuple[str, str, str, str]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    error: str = ""


class LoadWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types no __init_subclass__ of it
    """Use as a context around `model.load_weights(watcher.feed(tensors))`, then call `record`."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        # The references keep each storage alive, so that its address cannot come to mean another tensor.
        self._parameters = dict(parameters)
        self._by_storage = {tensor.untyped_storage()._cdata: name for name, tensor in parameters.items()}
        self._sources: dict[int, str] = {}
        self._source_tensors: dict[str, torch.Tensor] = {}
        self.current = ""
        self._writes: dict[_Write, None] = {}
        self._read: dict[str, list[Region]] = {}
        self._dtypes: dict[tuple[str, str, str, str], None] = {}

    def feed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand tensors to the loader, remembering which is which."""
        for name, tensor in tensors:
            self._sources[tensor.untyped_storage()._cdata] = name
            self._source_tensors[name] = tensor
            self.current = name
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        schema = func._schema.arguments
        for position, argument in enumerate(schema[: len(args)]):
            target = args[position]
            if argument.alias_info is None or not argument.alias_info.is_write or not torch.is_tensor(target):
                continue
            parameter = self._by_storage.get(target.untyped_storage()._cdata)
            if parameter is not None:
                self._saw(parameter, target, [a for a in args if torch.is_tensor(a) and a is not target])
        return func(*args, **(kwargs or {}))

    def _saw(self, parameter: str, target: torch.Tensor, others: list[torch.Tensor]) -> None:
        source = ""
        for other in others:
            source = self._sources.get(other.untyped_storage()._cdata, "")
            if source:
                whole = self._source_tensors[source]
                offset, shape, stride = _region(other)
                self._read.setdefault(source, []).append((offset - int(whole.storage_offset()), shape, stride))
            else:  # made from the tensor that is being loaded
                source = self.current
                whole = self._source_tensors[source]
                self._read.setdefault(source, []).append((0, tuple(whole.shape), tuple(whole.stride())))
            owner = self._parameters[parameter]
            if self._source_tensors[source].dtype != owner.dtype:
                key = (source, _short(self._source_tensors[source].dtype), parameter, _short(owner.dtype))
                self._dtypes[key] = None
        self._writes[_Write(parameter, source, _region(target))] = None

    def record(self, error: str = "") -> LoadRecord:
        """What was written since the start."""
        record = LoadRecord(error=error, wrong_dtype=list(self._dtypes))
        by_parameter: dict[str, list[_Write]] = {name: [] for name in self._parameters}
        for write in self._writes:
            by_parameter[write.parameter].append(write)
        for name, writes in by_parameter.items():
            numel = self._parameters[name].numel()
            starts, ends, owner = _runs([write.target for write in writes])
            covered = sum(end - start for start, end in _merge(starts, ends))
            doubled = np.nonzero(starts[1:] < np.maximum.accumulate(ends)[:-1])[0].tolist()
            if doubled:
                first, second = owner[doubled[0]], owner[doubled[0] + 1]
                record.doubled[name] = [writes[first].source, writes[second].source]
            if covered != numel:
                record.unwritten[name] = (covered, numel)
            elif not doubled:
                record.written.append(name)
        record.read = {name: _merge(*_runs(regions)[:2]) for name, regions in self._read.items()}
        record.unused = [name for name in self._source_tensors if name not in self._read]
        return record


def combine(records: Sequence[LoadRecord]) -> LoadRecord:
    """The records of all ranks as one: a tensor counts as read where any rank read it."""
    whole = LoadRecord()
    for rank, record in enumerate(records):
        prefix = f"rank {rank}: " if len(records) > 1 else ""
        whole.unwritten.update({prefix + name: value for name, value in record.unwritten.items()})
        whole.doubled.update({prefix + name: value for name, value in record.doubled.items()})
        whole.wrong_dtype += record.wrong_dtype
        whole.error = whole.error or (prefix + record.error if record.error else "")
        for name, intervals in record.read.items():
            whole.read.setdefault(name, []).extend(intervals)
    for name, intervals in whole.read.items():
        ordered = np.array(sorted(intervals), dtype=np.int64)
        whole.read[name] = _merge(ordered[:, 0], ordered[:, 1])
    whole.unused = [name for name in records[0].unused if name not in whole.read]
    whole.written = [name for name in records[0].written if all(name in record.written for record in records)]
    return whole


def problems(record: LoadRecord, sizes: Mapping[str, int], ignored: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with a load, in sentences that name tensors and parameters; empty when it is whole.

    Args:
        record: of all ranks.
        sizes: elements of each tensor that was to be loaded.
        ignored: parameters that no checkpoint of the model writes.
    """
    if record.error:  # what the load did not come to do is no news
        return [record.error.split("\n", 1)[0][:MAX_ERROR]]
    found = [f"{name} is read by no parameter" for name in record.unused]
    for name, numel in sizes.items():
        read = sum(end - start for start, end in record.read.get(name, []))
        if name not in record.unused and read != numel:
            found.append(f"{name} has {numel} elements, the model read {read}")
    found += [f"{t} is {dtype}, parameter {p} is {wanted}" for t, dtype, p, wanted in record.wrong_dtype]
    found += [
        f"parameter {name} was written twice, by {' and '.join(sources)}" for name, sources in record.doubled.items()
    ]
    found += [
        f"parameter {name} is missing {numel - done} of {numel} elements"
        for name, (done, numel) in record.unwritten.items()
        if name not in ignored
    ]
    return found


def _region(tensor: torch.Tensor) -> Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _runs(
    regions: Sequence[Region],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and ends of the contiguous element runs of strided regions, sorted, and each run's region."""
    starts: list[npt.NDArray[np.int64]] = []
    ends: list[npt.NDArray[np.int64]] = []
    owners: list[npt.NDArray[np.int64]] = []
    for index, (offset, shape, stride) in enumerate(regions):
        if 0 in shape:
            continue
        axes = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1)
        length = 1
        while axes and axes[0][0] == length:
            length *= axes.pop(0)[1]
        begin = np.array([offset], dtype=np.int64)
        for step, size in axes:
            begin = (begin[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
            if len(begin) > MAX_RUNS:
                raise ValueError(f"a region of shape {shape} and stride {stride} has more than {MAX_RUNS} runs")
        starts.append(begin)
        ends.append(begin + length)
        owners.append(np.full(len(begin), index, dtype=np.int64))
    if not starts:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty
    start, end, owner = np.concatenate(starts), np.concatenate(ends), np.concatenate(owners)
    order = np.argsort(start, kind="stable")
    return start[order], end[order], owner[order]


def _merge(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Intervals:
    """Sorted intervals with touching and overlapping ones joined."""
    if not len(starts):
        return []
    reach = np.maximum.accumulate(ends)
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return [(int(a), int(b)) for a, b in zip(starts[first], reach[last], strict=True)]
