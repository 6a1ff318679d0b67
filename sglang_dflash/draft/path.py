# SPDX-License-Identifier: Apache-2.0
"""Proposals of a DFlash2 draft: a path through the candidates of a block's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflash.draft.proposer import (
    Proposal,
    RowProposer,
    Sampling,
    VocabularyHead,
    candidate_noise,
    cut_law,
)
from sglang_dflash.draft.selector import CandidateSelector, Lattice, follow
from sglang_dflash.verify.accept import DraftProbs

if TYPE_CHECKING:
    from sglang_dflash.draft.config import DraftConfig

__all__ = ["PathProposer", "proposer_of"]


def proposer_of(
    selector: CandidateSelector | None, head: VocabularyHead, config: DraftConfig
) -> RowProposer | PathProposer:
    """Return what makes a draft's proposals: a path where it has a selector, else row by row."""
    return RowProposer(head) if selector is None else PathProposer(selector, head, config)


class PathProposer:
    """Walks the selector's scores: the best candidate after the one before, or one drawn."""

    def __init__(
        self, selector: CandidateSelector, head: VocabularyHead, config: DraftConfig
    ) -> None:
        self._selector = selector
        self._head = head
        self._top_k = config.selector_top_k
        self._multiplier = config.output_multiplier
        self._softcap = config.final_logit_softcapping

    def propose(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        sampling: Sampling | None,
        positions: torch.Tensor,
        *,
        with_confidence: bool = False,
    ) -> Proposal:
        """Return proposals for the mask rows of n blocks.

        Args:
            hidden: [n, B, H], the draft's output for the whole block.
            anchors: [n] int64.
            sampling: how each request is sampled; None where all are greedy.
            positions: [n, B] int64, the place of each row.
            with_confidence: whether the chances of the proposals, as the draft sees them, are
                wanted too; of unseeded draws the mean over all paths, for widths that knew the
                draw would change the law.
        """
        lattice = self._lattice(hidden, anchors)
        if sampling is None:
            return _best_path(lattice, with_confidence=with_confidence)
        return _drawn_path(lattice, sampling, positions, with_confidence=with_confidence)

    def _lattice(self, hidden: torch.Tensor, anchors: torch.Tensor) -> Lattice:
        """Return the candidates of blocks [n, B, H] and their scores."""
        shape = len(hidden), hidden.shape[1] - 1, -1
        logits, tokens, _ = self._head.best(hidden, self._top_k)
        logits = logits.float() * self._multiplier
        if self._softcap is not None:
            capped = self._softcap * torch.tanh(logits / self._softcap)
            logits = torch.where(logits.isneginf(), logits, capped)  # rows that are no tokens
        return self._selector.lattice(
            hidden[:, 1:], anchors, tokens.view(shape), logits.view(shape)
        )


def _best_path(lattice: Lattice, *, with_confidence: bool) -> Proposal:
    """Return the path that takes the best candidate at each row."""
    highest, steps = lattice.scores.max(dim=-1)  # [n, S, K] each
    path = follow(steps)
    tokens = lattice.tokens.gather(2, path.unsqueeze(2)).squeeze(2)
    confidence = None
    if with_confidence:
        chances = (highest - lattice.scores.logsumexp(dim=-1)).exp()
        confidence = chances.gather(2, _before(path)).squeeze(2)
    return Proposal(tokens, confidence=confidence)


class _Laws(NamedTuple):
    """What each row proposes after each candidate a of the row before, its best first.

    Attributes:
        order: [n, S, K, K] int64, the candidates in that order.
        probs: [n, S, K, K] float32, the law of the draw, cut as the request cuts the target's.
        chances: [n, S, K, K] float32, the draft's probabilities at temperature 1.
    """

    order: torch.Tensor
    probs: torch.Tensor
    chances: torch.Tensor


def _drawn_path(
    lattice: Lattice, sampling: Sampling, positions: torch.Tensor, *, with_confidence: bool
) -> Proposal:
    """Return a path drawn row by row, and the laws along it.

    The draw after every candidate is made at once, with one noise a row; only the one on the path
    is used. A greedy request's law is its best candidate.
    """
    scores, order = lattice.scores.sort(dim=-1, descending=True, stable=True)
    heat = sampling.temperatures[:, :, None, None]
    laws = _Laws(order, cut_law(torch.softmax(scores / heat, -1), sampling), scores.softmax(-1))
    noise = _noise(lattice.tokens, order, sampling, positions)
    ranks = (laws.probs.log() + noise).argmax(-1, keepdim=True)  # [n, S, K, 1]
    path = follow(order.gather(3, ranks).squeeze(3))
    # What stands after the candidate that the path comes from:
    before = _before(path)
    own_order, own_probs, own_ranks = (
        x.gather(2, before.unsqueeze(3).expand(-1, -1, -1, x.shape[3])).squeeze(2)
        for x in (order, laws.probs, ranks)
    )
    candidates = lattice.tokens.gather(2, own_order)
    confidence = None
    if with_confidence and sampling.seeds is None:
        confidence = _mean_chances(laws)
    elif with_confidence:
        taken = laws.chances.gather(3, ranks).squeeze(3)
        confidence = taken.gather(2, before).squeeze(2)
    return Proposal(
        candidates.gather(2, own_ranks).squeeze(2), DraftProbs(candidates, own_probs), confidence
    )


def _noise(
    tokens: torch.Tensor, order: torch.Tensor, sampling: Sampling, positions: torch.Tensor
) -> torch.Tensor:
    """Return [n, S, 1 or K, K], the noise of each draw by predecessor and rank."""
    noise = candidate_noise(tokens, sampling, positions).unsqueeze(2)
    if sampling.seeds is None:
        return noise
    ranks = torch.arange(tokens.shape[2], device=tokens.device)
    places = torch.where(sampling.by_rank[:, None, None, None], ranks, order)
    return noise.expand_as(order).gather(3, places)


def _mean_chances(laws: _Laws) -> torch.Tensor:
    """Return [n, S] float32, the draft's chance of what it draws, over all paths."""
    chance = (laws.probs * laws.chances).sum(-1)  # [n, S, K], after each candidate
    step = torch.zeros_like(laws.probs).scatter(3, laws.order, laws.probs)
    # How likely the path is to be at each candidate of the row before; the anchor is column 0.
    at = torch.zeros_like(chance[:, 0])
    at[:, 0] = 1.0
    means = []
    for j in range(chance.shape[1]):
        means.append((at * chance[:, j]).sum(-1))
        at = (at.unsqueeze(1) @ step[:, j]).squeeze(1)
    return torch.stack(means, dim=1)


def _before(path: torch.Tensor) -> torch.Tensor:
    """Return [n, S, 1], the candidate that each of a path [n, S] comes after; 0 is the anchor."""
    return F.pad(path[:, :-1], (1, 0)).unsqueeze(2)
