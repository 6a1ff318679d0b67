# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of block rows against the target's tokens or distribution, without [M, V] kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["RowLabels", "RowLosses", "label_cross_entropy"]

# Logits that exist at a time: few enough to stay in a CPU's cache, enough rows to pay for reading
# the head's weight once a piece.
_PIECE_LOGITS = {"cpu": 2**22, "cuda": 2**27}


class RowLabels(NamedTuple):
    """The law that each row should have, on few tokens, and the token that the text has.

    Attributes:
        tokens: [M] int64.
        ids: [M, k] int64.
        probs: [M, k] float32, adding up to 1 in a row.
    """

    tokens: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor


class RowLosses(NamedTuple):
    """What each row says against its label.

    Attributes:
        losses: [M] float32 (float64 for such a head), cross-entropies; they alone have a gradient.
        log_probs: [M], of the same type, of the text's token.
        best: [M, k] int64, the k most likely tokens, rows of the head.
    """

    losses: torch.Tensor
    log_probs: torch.Tensor
    best: torch.Tensor


def label_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: RowLabels,
    bias: torch.Tensor | None = None,
    *,
    num_best: int = 1,
    best_below: int | None = None,
) -> RowLosses:
    """Return the rows' cross-entropies, and what their weights and hits are made from.

    The gradient is made together with the losses, piece by piece, so that neither logits nor
    probabilities of all rows exist at once and none is computed twice. The head gets no gradient.

    Args:
        hidden: [M, H] float.
        head: [V, H] float, the output head's weight; its type is that of the products.
        labels: What the rows should say; tokens and ids are rows of the head.
        bias: [V] float, added to the logits, or None.
        num_best: k, of the most likely tokens returned.
        best_below: They are of the head's first rows up to here; None takes all.
    """
    asked = (num_best, len(head) if best_below is None else best_below)
    return RowLosses(*_LabelCrossEntropy.apply(hidden, head, labels, bias, asked))


class _LabelCrossEntropy(torch.autograd.Function):
    """Losses and gradients in one pass over pieces of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: RowLabels,
        bias: torch.Tensor | None,
        asked: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if head.dtype == torch.float64 else torch.float32
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        log_probs = torch.empty_like(losses)
        best = torch.empty(len(hidden), asked[0], dtype=torch.int64, device=hidden.device)
        gradient = torch.empty(hidden.shape, dtype=wide, device=hidden.device)
        rows = max(32, _PIECE_LOGITS[hidden.device.type] // len(head))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            own = RowLabels(labels.tokens[part], labels.ids[part], labels.probs[part].to(wide))
            found, gradient[part] = _piece(hidden[part].to(head.dtype), head, own, bias, asked)
            losses[part], log_probs[part], best[part] = found
        ctx.save_for_backward(gradient.to(hidden.dtype))
        ctx.mark_non_differentiable(log_probs, best)
        return losses, log_probs, best

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        # A row's weight is not rounded to a narrow type of the hidden states.
        return (gradient * grad[:, None]).to(gradient.dtype), None, None, None, None


def _piece(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: RowLabels,
    bias: torch.Tensor | None,
    asked: tuple[int, int],
) -> tuple[RowLosses, torch.Tensor]:
    """Return what m rows say, and the gradients of their losses by the hidden states [m, H]."""
    logits = hidden @ head.T if bias is None else torch.addmm(bias, hidden, head.T)  # [m, V]
    wide = labels.probs.dtype
    highest, likeliest = logits.max(dim=-1)
    num_best, below = asked
    best = likeliest[:, None]
    if (num_best, below) != (1, len(head)):
        best = logits[:, :below].topk(num_best, dim=-1).indices
    soft = torch.softmax(logits, dim=-1, dtype=wide)
    # The best token's probability is at least 1/V, so that its logarithm is safe.
    log_total = highest.to(wide) - soft.gather(1, likeliest[:, None])[:, 0].log()
    log_probs = logits.gather(1, labels.ids).to(wide) - log_total[:, None]
    own = logits.gather(1, labels.tokens[:, None])[:, 0].to(wide) - log_total
    # p less the label, before rounding: where a label is nearly certain, a narrow p has lost it.
    soft.scatter_add_(1, labels.ids, -labels.probs)
    found = RowLosses(-(labels.probs * log_probs).sum(-1), own, best)
    return found, (soft.to(head.dtype) @ head).to(wide)
