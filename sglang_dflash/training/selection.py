# SPDX-License-Identifier: Apache-2.0
"""The loss of DFlash2's candidate selector: the right one of a row's candidates."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from sglang_dflash.training.loss import RowLabels, RowLosses

if TYPE_CHECKING:
    from sglang_dflash.draft.selector import CandidateSelector

__all__ = ["selector_cross_entropy"]

# Elements of the head's rows that are gathered at a time. They are gathered anew for the gradient:
# those of all rows together would be far more than their logits.
_PIECE = 2**24


def selector_cross_entropy(
    selector: CandidateSelector,
    hidden: torch.Tensor,
    predecessors: torch.Tensor,
    candidates: torch.Tensor,
    head: tuple[torch.Tensor, torch.Tensor],
    labels: RowLabels,
) -> RowLosses:
    """Return the cross-entropies of rows among their candidates, after the text's own token.

    A row counts in decoding only where all before it are right, so that the text's token is the
    one that the selector will see there. Where the text's next token is no candidate it takes the
    place of the last one: the loss is about choosing, and the rows' own brings it among them.

    Args:
        selector: With gradients.
        hidden: [M, H], with a gradient.
        predecessors: [M] int64, the text's tokens before the rows'.
        candidates: [M, K] int64, rows of the head.
        head: Its weight [V', H], and the token of each of its rows, [V'] int64.
        labels: What the rows should say; its tokens and ids are rows of the head.

    Returns:
        `best` and `log_probs` are as a decoder sees them: -1 and -inf where the text's token is no
        candidate. Only the losses have a gradient.
    """
    rows = max(1, _PIECE // (candidates.shape[1] * hidden.shape[1]))
    parts = [
        checkpoint(_piece, selector, *part, use_reentrant=False)
        for part in zip(
            hidden.split(rows),
            predecessors.split(rows),
            candidates.split(rows),
            repeat(head),
            map(RowLabels, *(x.split(rows) for x in labels)),
        )
    ]
    return RowLosses(*map(torch.cat, zip(*parts, strict=True)))


def _piece(
    selector: CandidateSelector,
    hidden: torch.Tensor,
    predecessors: torch.Tensor,
    candidates: torch.Tensor,
    head: tuple[torch.Tensor, torch.Tensor],
    labels: RowLabels,
) -> RowLosses:
    """Return what m of the rows say."""
    weight, tokens_of = head
    missing = ~(candidates == labels.tokens[:, None]).any(-1)
    candidates = candidates.clone()
    candidates[missing, -1] = labels.tokens[missing]
    own = (weight[candidates] @ hidden.to(weight.dtype)[:, :, None])[:, :, 0]  # [m, K]
    pairs = selector.pair_scores(hidden, predecessors[:, None], tokens_of[candidates])[:, 0]
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    log_probs = (own.to(wide) + pairs.to(wide)).log_softmax(-1)
    law = ((candidates[:, :, None] == labels.ids[:, None]) * labels.probs[:, None]).sum(-1)
    law = law / law.sum(-1, keepdim=True)
    # A decoder does not propose what is no candidate.
    text = log_probs.detach().masked_fill(candidates != labels.tokens[:, None], -torch.inf)
    best = candidates.gather(1, log_probs.argmax(-1, keepdim=True))
    return RowLosses(
        -(law * log_probs).sum(-1),
        text.amax(-1).masked_fill(missing, -torch.inf),
        best.masked_fill(missing[:, None], -1),
    )
