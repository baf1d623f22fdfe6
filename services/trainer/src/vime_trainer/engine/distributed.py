"""Process groups of a rank: torch.distributed and Megatron's parallel state."""

import datetime
import logging
import os
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from vime_service.bulk import Deadline
from vime_service.bulk.gloo import open_store
from vime_trainer.engine.config import EngineConfig, ParallelConfig
from vime_trainer.engine.errors import UnsupportedLayoutError

logger = logging.getLogger(__name__)


def initialize(config: EngineConfig) -> torch.device:
    """Join the world that torchrun's environment describes (or a world of one) and build Megatron's groups.

    Calling it again in one process keeps the groups that exist. Returns the device of this rank.
    Raises UnsupportedLayoutError for layouts that were not verified.
    """
    check_layout(config.parallel)
    torch.set_num_threads(config.threads)
    device = torch.device("cpu")
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedLayoutError("device = 'cuda', but torch sees no CUDA device")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _join("nccl" if config.device == "cuda" else "gloo", datetime.timedelta(seconds=config.collective_timeout_s))
    if not parallel_state.model_parallel_is_initialized():
        sizes = config.parallel
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
        )
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    return device


def check_layout(sizes: ParallelConfig) -> None:
    """Refuse what was not verified: today every model-parallel size must be 1; data parallelism is free."""
    for name, size in sizes:
        if size != 1:
            raise UnsupportedLayoutError(
                f"parallel.{name} = {size} is not supported yet; it must be 1 (data parallelism is free)"
            )


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
    if data_parallel_size() > 1:
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values


def all_reduce_max(values: torch.Tensor) -> torch.Tensor:
    """Maximum over the data-parallel ranks, in place; returns its argument."""
    if data_parallel_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return values


def barrier() -> None:
    """Wait for every rank; the collective timeout bounds it."""
    dist.barrier()


def shutdown() -> None:
    """Leave the world. Safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
