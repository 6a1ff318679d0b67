# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a text on the CPU, where the stock kernel pays for whole tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["decode_attention", "fast_decoding"]

_NAME = "grouped_decode"  # with "flash" in it, transformers would look for a kernel package


@contextmanager
def fast_decoding(target: PreTrainedModel) -> Iterator[None]:
    """Let a target on the CPU use `decode_attention` for a while; others stay as they are."""
    before = target.config._attn_implementation
    if target.device.type != "cpu" or before != "sdpa":
        yield
        return
    AttentionInterface.register(_NAME, decode_attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    target.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        target.set_attn_implementation(before)


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention's output, that of a single query row with its KV heads as the heads.

    Args:
        module: The target's attention layer.
        query: [n, heads, T, D] any float type.
        key: [n, num_kv_heads, S, D].
        value: [n, num_kv_heads, S, D].
        attention_mask: [n, 1, T, S] bool, or None where all is seen.
        scaling: Of the scores; None takes D ** -0.5.
        options: What the layer says beside, for the stock kernel.

    Returns:
        [n, T, heads, D], and no weights.

    Source: must equal `sdpa_attention_forward` of transformers up to rounding.
    """
    if query.shape[2] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    # Heads that share a KV head are the rows of one product, so that its keys are read once.
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])  # [n, kv, g, D]
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(len(query), 1, -1, query.shape[-1]), None
