"""Build the megatron-core model of a shape: GPTModel with the local layer spec, wrapped for data parallelism."""

import logging
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from vime_trainer.engine.attention import CausalAttention
from vime_trainer.engine.config import EngineConfig
from vime_trainer.engine.errors import UnsupportedModelError
from vime_trainer.engine.shape import ModelShape

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, config: EngineConfig) -> TransformerConfig:
    """Megatron's settings for `shape`. Everything that needs TransformerEngine or Apex is off."""
    dtype = DTYPES[config.dtype]
    settings: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": config.device == "cpu",
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    if shape.is_moe:
        settings |= _moe_settings(shape)
    if config.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**settings)


def _moe_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": [int(i in shape.moe_layers) for i in range(shape.num_layers)],
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_router_pre_softmax": False,  # softmax over the top-k logits == HF's norm_topk_prob
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,  # experts one by one: the grouped kernels need TransformerEngine
        "moe_router_dtype": "fp32",
        "moe_router_fusion": False,  # the fused top-k would bypass replay
        "moe_token_dispatcher_type": "alltoall",
        "moe_enable_routing_replay": True,
    }


def build_model(shape: ModelShape, config: EngineConfig, device: torch.device) -> nn.Module:
    """A GPTModel on `device`, weights not yet loaded.

    Its forward takes ids [batch, length] and gives logits of that order.
    """
    settings = transformer_config(shape, config)
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    model = GPTModel(
        settings,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        parallel_output=True,
    )
    built = len(routers(model))
    if built != len(shape.moe_layers):
        raise UnsupportedModelError(f"built {built} routers for {len(shape.moe_layers)} MoE layers")
    logger.info("built %s: %d parameters", shape.architecture, sum(p.numel() for p in model.parameters()))
    placed: nn.Module = model.to(device)
    return placed


def wrap_model(model: nn.Module, config: EngineConfig) -> DistributedDataParallel:
    """Wrap for mixed precision and data parallelism; call it after the weights are loaded."""
    settings = model.config
    if config.dtype == "bfloat16":
        model = Float16Module(settings, model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.optimizer.distributed,
        # Megatron would raise; a non-finite step is skipped instead, see step.py.
        check_for_nan_in_grad=False,
    )
    return DistributedDataParallel(settings, ddp, model)


def unwrap(model: nn.Module) -> nn.Module:
    """The GPTModel inside of DDP and Float16Module."""
    while hasattr(model, "module"):
        model = cast(nn.Module, model.module)
    return model


def routers(model: nn.Module) -> list[TopKRouter]:
    """The routers of this rank, in layer order."""
    return [module for module in model.modules() if isinstance(module, TopKRouter)]
