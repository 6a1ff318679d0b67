# SPDX-License-Identifier: Apache-2.0
"""From the draft's hidden states to proposals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflash.noise import exponential, gumbel
from sglang_dflash.verify.accept import DraftProbs

__all__ = [
    "Best",
    "Proposal",
    "RowProposer",
    "Sampling",
    "VocabularyHead",
    "candidate_noise",
    "cut_law",
    "propose_greedy",
    "propose_nothing",
    "propose_sampled",
]

# The draft's law is cut to this many tokens: what is proposed beyond them is hardly ever accepted.
_SUPPORT = 32
# An unseeded proposal is drawn at this share of the request's temperature: the block's tokens do
# not see each other, so a draw from the draft's own law is unlikely as a whole (bench/LOG.md).
_SHARPNESS = 0.7


_CHUNK_LOGITS = 1 << 26  # that are made at a time


class Proposal(NamedTuple):
    """What the draft proposes for the mask rows of n blocks.

    Attributes:
        tokens: [n, B-1] int64.
        draft_probs: the law each was drawn from; None where all requests are greedy.
        confidence: [n, w-1] float32, the draft's probability of each at temperature 1, w the rows
            of a block that the draft ran over; of unseeded draws its mean over what might have been
            drawn, for the widths that follow from it must not know the draw. None where nobody
            asked.
        is_empty: whether the draft did not run.
    """

    tokens: torch.Tensor
    draft_probs: DraftProbs | None = None
    confidence: torch.Tensor | None = None
    is_empty: bool = False

    def filled(self, num_proposals: int) -> Proposal:
        """Return the proposals of a narrower block with empty ones, which nobody verifies, behind.

        Args:
            num_proposals: B-1, of a whole block.
        """
        n, made = self.tokens.shape
        if made == num_proposals:
            return self
        empty = propose_nothing(n, num_proposals - made, self.tokens.device)
        tokens = torch.cat([self.tokens, empty.tokens], dim=1)
        if self.draft_probs is None:
            return self._replace(tokens=tokens)
        width = self.draft_probs.token_ids.shape[2]
        parts = zip(self.draft_probs, empty.draft_probs, strict=True)
        joined = [torch.cat([own, F.pad(none, (0, width - 1))], dim=1) for own, none in parts]
        return self._replace(tokens=tokens, draft_probs=DraftProbs(*joined))


class Sampling(NamedTuple):
    """How n requests are sampled, as far as a draft does well to know it.

    Attributes:
        temperatures: [n, 1] float32.
        top_ks: [n] int32; 1 is greedy.
        top_ps: [n] float32.
        seeds: [n] int64, or None where seeds are not honoured.
        by_rank: [n] bool, whether a seeded draw is over ranks: where top-k or top-p cuts.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor | None = None
    by_rank: torch.Tensor | None = None


class Best(NamedTuple):
    """The most probable tokens of R rows.

    Attributes:
        scores: [R, count], their logits, best first.
        tokens: [R, count] int64, vocabulary ids.
        log_mass: [R, 1] float32, the logarithm of the sum of all exponentials; [R, 0] where nobody
            asked.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    log_mass: torch.Tensor


@dataclass(frozen=True)
class VocabularyHead:
    """This rank's shard of the target's output head.

    Attributes:
        project: hidden rows [R, H] -> logits [R, local vocabulary and padding].
        num_tokens: rows of the shard that are tokens; padding follows them.
        first_token_id: the vocabulary id of its first row.
        token_ids: [num_tokens] int64, the vocabulary id of each row where they do not follow each
            other, rising; None where they do.
        gather: concatenates a [rows, k] tensor of every rank along dim 1; None on one rank.
    """

    project: Callable[[torch.Tensor], torch.Tensor]
    num_tokens: int
    first_token_id: int = 0
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None
    token_ids: torch.Tensor | None = None

    def tokens_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the vocabulary ids of some of the shard's rows, [...] int64 in and out."""
        if self.token_ids is not None:
            return self.token_ids[rows]
        return rows + self.first_token_id if self.first_token_id else rows

    def best(self, hidden: torch.Tensor, count: int, *, with_mass: bool = False) -> Best:
        """Return the `count` largest logits of each mask row over all ranks, and their tokens.

        Rows are done a chunk at a time: their logits in float32 would take gigabytes.

        Args:
            hidden: [n, B, H], the draft's output for whole blocks; row 0 (the anchor) predicts
                nothing, so that there are R = n * (B-1) rows.
            count: how many, at most the vocabulary; of equal ones 1 takes the lowest token id.
            with_mass: whether the logarithm of all exponentials' sum is wanted too.
        """
        rows = hidden[:, 1:].reshape(-1, hidden.shape[-1])
        step = max(1, _CHUNK_LOGITS // self.num_tokens)
        parts = [self._best(part, count, with_mass=with_mass) for part in rows.split(step)]
        if len(parts) == 1:
            own = parts[0]
        else:
            scores, tokens, masses = zip(*parts, strict=True)
            own = Best(torch.cat(scores), torch.cat(tokens), torch.cat(masses))
        return own if self.gather is None else self._of_all_ranks(own, count, self.gather)

    def _best(self, rows: torch.Tensor, count: int, *, with_mass: bool) -> Best:
        """Return this rank's best of rows [r, H]."""
        logits = self.project(rows)[:, : self.num_tokens]
        if count == 1:
            scores, places = logits.max(dim=-1, keepdim=True)
        else:
            scores, places = logits.topk(min(count, self.num_tokens), dim=-1)
        mass = logits.float().logsumexp(dim=-1, keepdim=True) if with_mass else scores[:, :0]
        return Best(scores, self.tokens_of(places), mass)

    @staticmethod
    def _of_all_ranks(
        own: Best, count: int, gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> Best:
        scores, tokens = gather(own.scores), gather(own.tokens)
        if count == 1:
            order = scores.argmax(dim=1, keepdim=True)  # the first of equal ones
            scores = scores.gather(1, order)
        else:
            scores, order = scores.topk(min(count, scores.shape[1]), dim=-1)
        mass = own.log_mass
        if mass.shape[1]:
            mass = gather(mass).logsumexp(dim=-1, keepdim=True)
        return Best(scores, tokens.gather(1, order), mass)


class RowProposer:
    """Proposals of a plain draft: each row's own, whatever the others propose."""

    def __init__(self, head: VocabularyHead) -> None:
        self._head = head

    def propose(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        sampling: Sampling | None,
        positions: torch.Tensor,
        *,
        with_confidence: bool = False,
    ) -> Proposal:
        """Return proposals for the mask rows of n blocks: the best tokens, or drawn.

        Args:
            hidden: [n, B, H], the draft's output for the whole block.
            anchors: [n] int64; a row does not ask for them.
            sampling: how each request is sampled; None where all are greedy.
            positions: [n, B] int64, the place of each row.
            with_confidence: whether the probabilities of the proposals are wanted too.
        """
        asked = {"with_confidence": with_confidence}
        if sampling is None:
            return propose_greedy(hidden, self._head, **asked)
        return propose_sampled(hidden, self._head, sampling, positions, **asked)


def propose_greedy(
    hidden: torch.Tensor, head: VocabularyHead, *, with_confidence: bool = False
) -> Proposal:
    """Return the most probable token of each mask row, each on its own.

    Args:
        hidden: [n, B, H], the draft's output for the whole block; row 0 (the anchor) predicts
            nothing.
        head: the target's output head.
        with_confidence: whether the probabilities of the proposals are wanted too.

    Returns:
        The proposals; ties go to the lowest token id, on any number of ranks.
    """
    n = hidden.shape[0]
    best = head.best(hidden, 1, with_mass=with_confidence)
    confidence = None
    if with_confidence:
        confidence = (best.scores.float() - best.log_mass).exp().view(n, -1)
    return Proposal(best.tokens.view(n, -1), confidence=confidence)


def propose_sampled(
    hidden: torch.Tensor,
    head: VocabularyHead,
    sampling: Sampling,
    positions: torch.Tensor,
    *,
    with_confidence: bool = False,
) -> Proposal:
    """Return proposals drawn from the draft's law, for requests that are sampled.

    Seeded requests are drawn with the very noise of the target's draw at that place, so that where
    the two laws are near, so are the draws (Daliri, Musco, Suresh 2024); others with fresh noise.
    A greedy request's law is its best token.

    Args:
        hidden: [n, B, H], the draft's output for the whole block.
        head: the target's output head.
        sampling: how each request is sampled.
        positions: [n, B] int64, the place of each row.
        with_confidence: whether the probabilities of the proposals are wanted too. The acceptance
            rule is exact for widths that are independent of the draws: were a row verified because
            it drew a likely token, likely tokens would be committed too often. A seeded text is the
            target's own whatever is verified.
    """
    n, num_proposals = hidden.shape[0], hidden.shape[1] - 1
    scores, tokens, log_mass = head.best(hidden, _SUPPORT, with_mass=with_confidence)
    scores, tokens = scores.view(n, num_proposals, -1), tokens.view(n, num_proposals, -1)
    heat = sampling.temperatures.unsqueeze(2) * (_SHARPNESS if sampling.seeds is None else 1.0)
    probs = torch.softmax(scores.float() / heat, dim=-1)
    probs = cut_law(probs, sampling)
    noise = candidate_noise(tokens, sampling, positions)
    best = (probs.log() + noise).argmax(-1, keepdim=True)
    proposals = tokens.gather(2, best).squeeze(2)
    confidence = None
    if with_confidence:
        each = (scores.float() - log_mass.view(n, num_proposals, 1)).exp()
        if sampling.seeds is None:
            confidence = (probs * each).sum(2)
        else:
            confidence = each.gather(2, best).squeeze(2)
    return Proposal(proposals, DraftProbs(tokens, probs), confidence)


def propose_nothing(n: int, num_proposals: int, device: torch.device | str) -> Proposal:
    """Return the proposals of a step without the draft: token 0, and certain of it.

    Such a step has one row a request, and verifies them only where a graph has rows to spare.
    """
    tokens = torch.zeros(n, num_proposals, dtype=torch.int64, device=device)
    column = tokens.unsqueeze(2)
    probs = torch.ones_like(column, dtype=torch.float32)
    return Proposal(tokens, DraftProbs(column, probs), is_empty=True)


def cut_law(probs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Cut the draft's laws as the requests cut the target's.

    A draft that came to NaN has a law of zeros: its proposal is refused, and the target's drawn.

    Args:
        probs: [n, ..., C], best first.
        sampling: of the n requests.
    """
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    each = (-1,) + (1,) * (probs.dim() - 1)
    cut = ranks >= sampling.top_ks.view(each)
    cut = cut | (probs.cumsum(-1) - probs > sampling.top_ps.view(each))
    probs = probs.masked_fill(cut, 0.0)
    return (probs / probs.sum(-1, keepdim=True)).nan_to_num(nan=0.0)


def candidate_noise(
    tokens: torch.Tensor, sampling: Sampling, positions: torch.Tensor
) -> torch.Tensor:
    """Return the Gumbel noise by which each row draws one of its candidates, [n, B-1, C].

    Seeded requests get that of the target's own draw at that place, float64; others fresh noise,
    float32.

    Args:
        tokens: [n, B-1, C] int64, the candidates.
        sampling: how each request is sampled.
        positions: [n, B] int64, the place of each row.
    """
    if sampling.seeds is None:
        return -exponential(tokens).log_()
    _, num_proposals, width = tokens.shape
    # The token of mask row j is drawn by the target at row j - 1.
    places = positions[:, :-1].flatten()
    seeds = sampling.seeds.repeat_interleave(num_proposals)
    ranks = torch.arange(width, device=tokens.device)
    columns = torch.where(sampling.by_rank[:, None, None], ranks, tokens)
    return gumbel(seeds, places, columns.flatten(0, 1)).view_as(tokens)
