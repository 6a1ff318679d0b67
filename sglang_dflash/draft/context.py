# SPDX-License-Identifier: Apache-2.0
"""KV injection's arithmetic: context features -> K and V of every draft layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

__all__ = ["context_kv"]


def context_kv(
    context: torch.Tensor,
    positions: torch.Tensor,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k_norm_weight: torch.Tensor,
    eps: float,
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
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
        rotate: (positions [M], x [M, heads * D]) -> x with rotary embedding applied.

    Returns:
        k and v, each [L, M, kv heads, D] in the dtype of `context`.

    Source: DFlash (arXiv 2602.06036), section on KV injection.
    """
    num_layers, head_dim = k_norm_weight.shape
    rows = context.shape[0]
    kv = functional.linear(context, weight, bias).view(rows, num_layers, 2, -1, head_dim)
    k = functional.rms_norm(kv[:, :, 0], (head_dim,), eps=eps) * k_norm_weight[:, None]
    k = rotate(positions, k.reshape(rows, -1)).view(rows, num_layers, -1, head_dim)
    return k.transpose(0, 1), kv[:, :, 1].transpose(0, 1)
