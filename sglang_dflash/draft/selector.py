# SPDX-License-Identifier: Apache-2.0
"""DFlash2's candidate selector: which of a row's candidates suits the token before it.

The rows of a plain block do not see each other's proposals, so that two good halves of different
continuations may stand side by side. The selector scores neighbours instead,

    S_j(a, b) = U_j(b) + <A[a] * (P h_j), B[b]>,

U_j being row j's own logits, a a candidate of the row before and b one of this row, and a path is
walked from the anchor.

Source: DFlash2 (inco.ai/blog/dflash2); the checkpoint format is that of SGLang's
`DFlash2DraftModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from sglang_dflash.draft.config import DraftConfig

__all__ = ["CandidateSelector", "Lattice", "follow"]


class Lattice(NamedTuple):
    """The candidates of n blocks' rows, and what each is worth after each of the row before.

    Attributes:
        tokens: [n, S, K] int64, S = B-1 rows with K candidates each, the row's own best first.
        scores: [n, S, K, K] float32 logits; [i, j, a, b] is of candidate b of row j after
            candidate a of row j-1. In row 0, after the anchor, all a are alike.
    """

    tokens: torch.Tensor
    scores: torch.Tensor


class CandidateSelector(nn.Module):
    """The selector's weights; every rank has all of them. The scores of a new one are 0."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        # A token that training never meets before another keeps what all began with.
        self.predecessor_codebook = nn.Parameter(torch.ones(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    @classmethod
    def of(cls, config: DraftConfig) -> CandidateSelector | None:
        """Return a draft's, or None where it has none."""
        if not config.selector_rank:
            return None
        assert config.vocab_size is not None, "from_dict asks for it"
        return cls(config.hidden_size, config.vocab_size, config.selector_rank)

    def pair_scores(
        self, hidden: torch.Tensor, predecessors: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Return <A[a] * (P h), B[b]> for each predecessor a and candidate b of a row.

        Args:
            hidden: [..., H], the draft's final hidden states.
            predecessors: [..., P] int64 tokens.
            candidates: [..., K] int64 tokens.

        Returns:
            [..., P, K].
        """
        gate = self.hidden_projection(hidden).unsqueeze(-2)  # [..., 1, r]
        # As embeddings, for their gradients are summed in one order on any number of threads.
        before = F.embedding(predecessors, self.predecessor_codebook)  # [..., P, r]
        after = F.embedding(candidates, self.successor_codebook)  # [..., K, r]
        return (before * gate) @ after.transpose(-1, -2)

    def lattice(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        candidates: torch.Tensor,
        logits: torch.Tensor,
    ) -> Lattice:
        """Return what every candidate is worth after every candidate before it.

        Args:
            hidden: [n, S, H], of the mask rows.
            anchors: [n] int64, the tokens before row 0.
            candidates: [n, S, K] int64.
            logits: [n, S, K], the rows' own.
        """
        first = anchors[:, None, None].expand(-1, 1, candidates.shape[2])
        predecessors = torch.cat([first, candidates[:, :-1]], dim=1)
        pairs = self.pair_scores(hidden, predecessors, candidates)
        return Lattice(candidates, logits.float().unsqueeze(2) + pairs.float())


def follow(steps: torch.Tensor) -> torch.Tensor:
    """Return the path that begins in column 0 and takes at each row what stands there.

    Args:
        steps: [n, S, K] int64 < K: the candidate of row j that comes after candidate a of row j-1.

    Returns:
        [n, S] int64.
    """
    path = [steps[:, 0, :1]]
    for j in range(1, steps.shape[1]):
        path.append(steps[:, j].gather(1, path[-1]))
    return torch.cat(path, dim=1)
