# SPDX-License-Identifier: Apache-2.0
"""From the draft's hidden states to proposals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["VocabularyHead", "propose_greedy"]


@dataclass(frozen=True)
class VocabularyHead:
    """This rank's shard of the target's output head.

    Attributes:
        project: hidden rows [R, H] -> logits [R, local vocabulary and padding].
        num_tokens: rows of the shard that are tokens; padding follows them.
        first_token_id: the vocabulary id of its first row.
        gather: concatenates a [rows, 1] tensor of every rank along dim 1; None on one rank.
    """

    project: Callable[[torch.Tensor], torch.Tensor]
    num_tokens: int
    first_token_id: int = 0
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None


def propose_greedy(hidden: torch.Tensor, head: VocabularyHead) -> torch.Tensor:
    """Return the most probable token of each mask row, each on its own.

    Args:
        hidden: [n, B, H], the draft's output for the whole block; row 0 (the anchor) predicts
            nothing.
        head: the target's output head.

    Returns:
        [n, B-1] int64. Ties go to the lowest token id, on any number of ranks.
    """
    rows = hidden[:, 1:].reshape(-1, hidden.shape[-1])
    logits = head.project(rows)[:, : head.num_tokens]
    scores, tokens = logits.max(dim=-1, keepdim=True)  # [R, 1]
    tokens = tokens + head.first_token_id
    if head.gather is not None:
        best_rank = head.gather(scores).argmax(dim=1, keepdim=True)
        tokens = head.gather(tokens).gather(1, best_rank)
    return tokens.view(hidden.shape[0], -1)
