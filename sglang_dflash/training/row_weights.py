# SPDX-License-Identifier: Apache-2.0
"""How much each row of a block counts in the loss."""

from __future__ import annotations

import torch

__all__ = ["decay_weights", "dpace_weights"]


def decay_weights(block_size: int, decay: float) -> torch.Tensor:
    """Return the weights of a block's rows 1..B-1, exp(-(k-1)/decay), [B-1] float32.

    A refused early proposal makes all later ones worthless.
    """
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / decay)


@torch.no_grad()
def dpace_weights(confidences: torch.Tensor, known: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return weights of blocks' rows that follow from what the draft has learnt so far.

    With s_i = (1 - alpha) q_i + alpha, row j weighs the sum over m >= j of s_1 ... s_m. At alpha 0
    that is the derivative of the number of proposals kept, on average, by the row's
    log-probability; alpha above 0 lets rows behind an unlikely one learn too. Weights fall along a
    block, and the less so the surer the draft is of its first rows.

    Args:
        confidences: [..., B-1] float, q of rows 1..B-1 in 0..1, the probability that the draft
            gives the text's token; unused where `known` is False.
        known: [..., B-1] bool, rows with a label, the first ones of their block.
        alpha: In 0..1.

    Returns:
        [..., B-1] like `confidences`, with no gradient; 0 where `known` is False.

    Source: D-PACE (arXiv 2605.18810), Eq. 7 and 8.
    """
    # A text's end is no refusal: rows beyond it neither lower nor raise the weights before them.
    smoothed = ((1 - alpha) * confidences + alpha).where(known, 0.0)
    accepted = smoothed.cumprod(dim=-1)
    return accepted.flip(-1).cumsum(dim=-1).flip(-1)
