# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of block rows against the target's tokens or distribution, without [M, V] kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["RowLabels", "label_cross_entropy", "position_weights"]

# Logits that exist at a time: few enough to stay in a CPU's cache, enough rows to pay for reading
# the head's weight once a piece.
_PIECE_LOGITS = {"cpu": 2**22, "cuda": 2**27}


class RowLabels(NamedTuple):
    """The law that each row should have, on few tokens.

    Attributes:
        ids: [M, k] int64.
        probs: [M, k] float32, adding up to 1 in a row.
    """

    ids: torch.Tensor
    probs: torch.Tensor


def position_weights(block_size: int, decay: float) -> torch.Tensor:
    """Return the weights of a block's rows 1..B-1, exp(-(k-1)/decay), [B-1] float32.

    A refused early proposal makes all later ones worthless.
    """
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / decay)


def label_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: RowLabels,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted mean of the rows' cross-entropies, and each row's most likely token.

    The gradient is made together with the loss, piece by piece, so that neither logits nor
    probabilities of all rows exist at once and none is computed twice. The head gets no gradient.

    Args:
        hidden: [M, H] float.
        head: [V, H] float, the output head's weight; its type is that of the products.
        labels: What the rows should say; ids [M, k] are rows of the head.
        weights: [M] float32, above 0.
        bias: [V] float, added to the logits, or None.

    Returns:
        The loss, a float32 scalar (float64 for such a head), and [M] int64.
    """
    loss, predictions = _LabelCrossEntropy.apply(
        hidden, head, labels.ids, labels.probs, weights / weights.sum(), bias
    )
    return loss, predictions


class _LabelCrossEntropy(torch.autograd.Function):
    """Loss and gradient in one pass over pieces of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        ids: torch.Tensor,
        probs: torch.Tensor,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.float64 if head.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        gradient = torch.empty(hidden.shape, dtype=wide, device=hidden.device)
        predictions = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        rows = max(32, _PIECE_LOGITS[hidden.device.type] // len(head))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            losses, gradient[part], predictions[part] = _piece(
                hidden[part].to(head.dtype), head, ids[part], probs[part].to(wide), bias
            )
            total += (losses * weights[part]).sum()
        ctx.save_for_backward(gradient.mul_(weights[:, None]).to(hidden.dtype))
        ctx.mark_non_differentiable(predictions)
        return total, predictions

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None, None


def _piece(
    hidden: torch.Tensor,
    head: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return losses [m], their gradients by the hidden states [m, H], and best tokens [m]."""
    logits = hidden @ head.T if bias is None else torch.addmm(bias, hidden, head.T)  # [m, V]
    highest, best = logits.max(dim=-1)
    soft = torch.softmax(logits, dim=-1, dtype=probs.dtype)
    # The best token's probability is at least 1/V, so that its logarithm is safe.
    log_total = highest.to(probs.dtype) - soft.gather(1, best[:, None])[:, 0].log()
    log_probs = logits.gather(1, ids).to(probs.dtype) - log_total[:, None]
    # p less the label, before rounding: where a label is nearly certain, a narrow p has lost it.
    soft.scatter_add_(1, ids, -probs)
    return -(probs * log_probs).sum(-1), (soft.to(head.dtype) @ head).to(probs.dtype), best
