"""Process groups of a rank: torch.distributed and Megatron's parallel state."""

import datetime
import logging
import os
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from vime_service.bulk import Deadline
from vime_service.bulk.gloo import open_store
from vime_trainer.algorithms.ranks import Reduce
from vime_trainer.engine.config import EngineConfig
from vime_trainer.engine.errors import PeerFailed, UnsupportedLayoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def initialize(config: EngineConfig) -> torch.device:
    """Join the world that torchrun's environment describes (or a world of one) and build Megatron's groups.

    Calling it again in one process keeps the groups that exist. Returns the device of this rank.
    Raises UnsupportedLayoutError where there is no such device.
    """
    torch.set_num_threads(config.threads)
    device = torch.device("cpu")
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedLayoutError("device = 'cuda', but torch sees no CUDA device")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    if not dist.is_initialized():
        _join("nccl" if config.device == "cuda" else "gloo", timeout)
    if not parallel_state.model_parallel_is_initialized():
        sizes = config.parallel
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            # Its own groups would wait for half an hour; a fraction of a minute is fine.
            distributed_timeout_minutes=timeout.total_seconds() / 60,
        )
        for group in process_groups():  # it makes one, for experts over gloo, that is not given what it is told
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    return device


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group of this process: torch's default one and Megatron's."""
    return list(dist.distributed_c10d._world.pg_map)


def _join(backend: str, timeout: datetime.timedelta) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torch's own way to make this store would listen on all interfaces.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by who started the ranks, as in torchrun
        store = open_store(address, port, Deadline.after(timeout.total_seconds()), host=rank == 0 and not hosted)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    else:  # a world of one needs no address
        dist.init_process_group(
            backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    logger.info("joined the process group as rank %d of %d (%s)", dist.get_rank(), dist.get_world_size(), backend)


def data_parallel_rank() -> int:
    """Rank of this process among those that hold the same weights."""
    return cast(int, parallel_state.get_data_parallel_rank())


def data_parallel_size() -> int:
    """Number of processes that hold the same weights."""
    return cast(int, parallel_state.get_data_parallel_world_size())


def all_reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over the data-parallel ranks, in place; returns its argument."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def all_reduce_max(values: torch.Tensor) -> torch.Tensor:
    """Maximum over the data-parallel ranks, in place; returns its argument."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def any_rank(flag: bool) -> bool:
    """True on every rank if `flag` is on one of them. Collective."""
    return bool(all_reduce_max(torch.tensor([float(flag)])).item())


def together(what: str, action: Callable[[], T]) -> T:
    """Run `action`; if it failed on any rank every rank raises, so that none waits for another in a later collective.

    Raises what `action` raised, elsewhere PeerFailed. Collective.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  whatever it is, the others must hear of it; it is raised again below
        failure = error
    failed = any_rank(failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise PeerFailed(f"could not {what}: another rank failed, its log says why")
    return result


def rank_0_alone(what: str, action: Callable[[], object]) -> None:
    """`action` on rank 0, `together` with the others, who wait for it."""
    together(what, lambda: action() if data_parallel_rank() == 0 else None)


def _all_reduce(values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if data_parallel_size() > 1:
        group = parallel_state.get_data_parallel_group()
        # NCCL reduces nothing that lies on the host, gloo nothing else.
        there = values.cuda() if dist.get_backend(group) == "nccl" else values
        dist.all_reduce(there, op=op, group=group)
        values.copy_(there)
    return values


def all_gather(values: torch.Tensor) -> list[torch.Tensor]:
    """Each data-parallel rank's 1-D tensor of integers, in order; lengths may differ."""
    ranks = data_parallel_size()
    if ranks == 1:
        return [values]
    own = torch.zeros(ranks, dtype=torch.int64)
    own[data_parallel_rank()] = values.numel()
    lengths = all_reduce_max(own).tolist()
    # One row per rank, of which each fills its own: what is shorter stays the smallest number, and is cut off again.
    rows = torch.full(
        (ranks, max(1, *lengths)), torch.iinfo(values.dtype).min, dtype=values.dtype, device=values.device
    )
    rows[data_parallel_rank(), : values.numel()] = values
    return [row[:length] for row, length in zip(all_reduce_max(rows), lengths, strict=True)]


GLOBAL = Reduce(sum=all_reduce_sum, max=all_reduce_max, gather=all_gather)
"""The data-parallel ranks, in the library's form."""


def shutdown() -> None:
    """Leave the world. Safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
