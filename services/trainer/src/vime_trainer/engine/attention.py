"""Causal self-attention for Megatron's local layer spec, on torch's scaled_dot_product_attention.

Megatron's own unfused core attention materialises [batch, heads, length, length]; TransformerEngine's is not available
here.
"""

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Drop-in `core_attention`: right-padded batches, grouped queries, no attention mask but the causal one.

    With padding on the right a real token never sees a padded one, so no padding mask is needed.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.grouped = config.num_query_groups != config.num_attention_heads

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend: query [length, batch, heads, head_dim] -> [length, batch, heads * head_dim].

        Keys and values have groups in place of heads.
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("CausalAttention takes right-padded batches: no mask, no bias, no packed sequences")
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=self.grouped
        )
        length, batch = out.size(2), out.size(0)
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)
