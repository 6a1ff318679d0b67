# SPDX-License-Identifier: Apache-2.0
"""KV injection's arithmetic: context features -> K and V of every draft layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_dflash.kernels.context_keys import context_keys

__all__ = ["context_kv"]


def context_kv(
    context: torch.Tensor,
    positions: torch.Tensor,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k_norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    is_neox_style: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of all draft layers for M context rows, by one projection.

    The context path has no input layer norm: K = rope(k_norm(W_k c)), V = W_v c, where
    c = hidden_norm(fc(features)).

    Args:
        context: [M, H], projected context features.
        positions: [M] int64, absolute positions.
        weight: [L * 2 * kv, H], layer after layer, K rows then V rows.
        bias: [L * 2 * kv] or None.
        k_norm_weight: [L, D].
        eps: of the K norm.
        cos_sin: [positions, R] float, the rotary embedding's cosines and sines.
        is_neox_style: whether halves of a head turn, or neighbours.

    Returns:
        k and v, each [L, M, kv heads, D] in the dtype of `context`.

    Source: DFlash (arXiv 2602.06036), section on KV injection.
    """
    num_layers, head_dim = k_norm_weight.shape
    rows = context.shape[0]
    kv = functional.linear(context, weight, bias).view(rows, num_layers, 2, -1, head_dim)
    k = context_keys(
        kv[:, :, 0], positions, k_norm_weight, cos_sin, eps=eps, is_neox_style=is_neox_style
    )
    return k, kv[:, :, 1].transpose(0, 1)
