"""Log-probabilities and entropy of sampled tokens, from vocabulary-parallel logits."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Natural log-probability of each target under softmax(logits / temperature).

    logits [batch, length, vocab / tp], targets int64 [batch, length], temperatures float32 [batch] -> float32 [batch,
    length]. The rollout reports logprobs of the distribution that it sampled from, so both sides divide by the same
    temperature.
    """
    scaled = scale(logits, temperatures)
    # Megatron works sequence-first and overwrites its input: `scaled` is ours to lose.
    loss: torch.Tensor = vocab_parallel_cross_entropy(scaled.transpose(0, 1).contiguous(), targets.t().contiguous())
    return -loss.t()


def token_entropy(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature): [batch, length, vocab / tp] -> float32 [batch, length].

    H = log Z - sum_v p_v x_v, with Z and the sum reduced over the tensor-parallel ranks.
    """
    scaled = scale(logits, temperatures)
    highest = scaled.detach().max(dim=-1).values
    group = parallel_state.get_tensor_model_parallel_group()
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shifted = scaled - highest[..., None]
    weights = shifted.exp()
    total = reduce_from_tensor_model_parallel_region(weights.sum(-1), group=group)
    mean = reduce_from_tensor_model_parallel_region((weights * shifted).sum(-1), group=group) / total
    entropy: torch.Tensor = total.log() - mean
    return entropy


def scale(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """float32 logits divided by each row's temperature."""
    return logits.float() / temperatures.to(logits.device).view(-1, *([1] * (logits.dim() - 1)))
