# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules: pure functions on tensors.

Three rules say how much of a block is kept. All keep the target's law, whatever was proposed:

- `accept_equal`: the target's own choices (argmax, or draws) confirm the proposals.
- `accept_rejection`: each proposal is kept or refused for itself, with probability min(1, p/q).
- `accept_block`: the block is judged as a whole; keeps at least as many tokens on average.

The rows of request i are `target_probs[row_starts[i] : row_starts[i] + widths[i]]`, so the verified
widths may differ: `row_starts = arange(n) * B` where they do not. Row j of a request is *the* law
of the token after block row j, with everything that shapes it (temperature, top-k, penalties,
grammar). A greedy request is a one-hot row and a point mass; it comes out deterministic.

A block has at least one proposal (B >= 2). Nothing here waits for the device, and nothing of the
vocabulary's width is made but the one law per request from which its last token is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "Acceptance",
    "Chances",
    "DraftProbs",
    "Verdict",
    "accept_block",
    "accept_equal",
    "accept_rejection",
    "block_chances",
    "last_law",
    "rejection_chances",
    "verdict",
]


class Verdict(NamedTuple):
    """What verify decided for n requests.

    Attributes:
        tokens: [n, B] int64. Row i starts with request i's committed tokens; the rest is unused.
        num_committed: [n] int32 in 1..B, accepted proposals plus the next anchor.
        next_anchor: [n] int64, the last committed token.
    """

    tokens: torch.Tensor
    num_committed: torch.Tensor
    next_anchor: torch.Tensor


class DraftProbs(NamedTuple):
    """The law q from which the proposals were drawn, on its support.

    Attributes:
        token_ids: [n, B-1, C] int64 in 0..V-1. No token twice among the entries above 0.
        probs: [n, B-1, C] float; rows sum to 1. Entries of 0 count for nothing and may pad a row.
            A proposal that was not drawn is a point mass: 1 at the proposal.
    """

    token_ids: torch.Tensor
    probs: torch.Tensor


class Chances(NamedTuple):
    """A rule's coins for given proposals.

    Attributes:
        accept: [n, B-1] float. Column j is the chance of proposal j: to be kept if all before it
            are (rejection), or to be the last kept if none after it is (block). 0 beyond the width.
        scale: [n, B] float, above 0 where the rule can stop. After r kept proposals the token that
            ends the step follows max(scale[r] * p_r - q_r, 0), normalised.
    """

    accept: torch.Tensor
    scale: torch.Tensor


class Acceptance(NamedTuple):
    """How much is kept, and the law of the token that ends the step.

    Attributes:
        num_accepted: [n] int64 in 0..widths-1.
        last_law: [n, V] float, not normalised: of the recovered token after a refusal, of the bonus
            token if everything was kept.
    """

    num_accepted: torch.Tensor
    last_law: torch.Tensor


def accept_equal(
    proposals: torch.Tensor, target_tokens: torch.Tensor, widths: torch.Tensor | None = None
) -> Verdict:
    """Return the longest prefix of proposals that the target's own choices confirm, and one more.

    An accepted proposal *is* the target's choice at its place, so the committed tokens are a prefix
    of `target_tokens`: those of plain decoding, whatever the draft proposed. Where the choices are
    draws, the noise of a row must not depend on the proposals before it; the proposal of the same
    row may share it.

    Args:
        proposals: [n, B-1] int64. Column j is proposed for block row j+1.
        target_tokens: [n, B] int64. Column j is the target's choice after block row j.
        widths: [n] int64 in 1..B, verified rows per request; None: all. Columns beyond are unused.

    Returns:
        The verdict; tokens beyond `num_committed` are the target's answers to refused proposals.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), the deterministic case.
    """
    agree = proposals == target_tokens[:, :-1]
    if widths is not None:
        agree = agree & (_steps(proposals) < widths.unsqueeze(1))
    num_accepted = _length_of_prefix(agree)
    next_anchor = target_tokens.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    return Verdict(target_tokens, (num_accepted + 1).to(torch.int32), next_anchor)


def accept_rejection(
    proposals: torch.Tensor,
    draft: DraftProbs,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    row_starts: torch.Tensor,
    widths: torch.Tensor,
) -> Acceptance:
    """Return what token-wise speculative sampling keeps.

    A proposal is kept with probability min(1, p/q) and everything after the first refusal is
    dropped; the refused place is filled from what p has above q.

    Args:
        proposals: [n, B-1] int64, drawn from `draft`; anything beyond `widths - 1`.
        draft: q, [n, B-1, C].
        target_probs: [M, V] float, p; rows sum to 1.
        uniforms: [n, B-1] float in [0, 1), one per proposal.
        row_starts: [n] int64, the first row of each request.
        widths: [n] int64 in 1..B, verified rows per request, anchor included.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
    """
    chances = rejection_chances(proposals, draft, target_probs, row_starts, widths)
    num_accepted = _length_of_prefix(uniforms < chances.accept)
    law = last_law(num_accepted, chances.scale, draft, target_probs, row_starts, widths)
    return Acceptance(num_accepted, law)


def accept_block(
    proposals: torch.Tensor,
    draft: DraftProbs,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    row_starts: torch.Tensor,
    widths: torch.Tensor,
) -> Acceptance:
    """Return what block verification keeps: all up to the *last* proposal whose coin says so.

    A proposal that the target likes more than the draft did makes up for an earlier one that it
    likes less, so on average at least as much is kept as by `accept_rejection`.

    Args:
        proposals: [n, B-1] int64, drawn from `draft`; anything beyond `widths - 1`.
        draft: q, [n, B-1, C]. Column j may depend on the proposals before it.
        target_probs: [M, V] float, p; rows sum to 1.
        uniforms: [n, B-1] float in [0, 1), one per proposal.
        row_starts: [n] int64, the first row of each request.
        widths: [n] int64 in 1..B, verified rows per request, anchor included.

    Source: Sun et al. 2025 (arXiv 2403.10444), algorithm 2.
    """
    chances = block_chances(proposals, draft, target_probs, row_starts, widths)
    num_accepted = ((uniforms < chances.accept) * _steps(proposals)).amax(dim=1)
    law = last_law(num_accepted, chances.scale, draft, target_probs, row_starts, widths)
    return Acceptance(num_accepted, law)


def verdict(
    proposals: torch.Tensor, num_accepted: torch.Tensor, last_tokens: torch.Tensor
) -> Verdict:
    """Return the verdict that keeps some proposals and ends with a token drawn by the caller.

    Args:
        proposals: [n, B-1] int64.
        num_accepted: [n] int64 in 0..B-1.
        last_tokens: [n] int64, drawn from `Acceptance.last_law`.
    """
    last = last_tokens.unsqueeze(1)
    tokens = torch.cat([proposals, last], dim=1).scatter(1, num_accepted.unsqueeze(1), last)
    return Verdict(tokens, (num_accepted + 1).to(torch.int32), last_tokens)


def rejection_chances(
    proposals: torch.Tensor,
    draft: DraftProbs,
    target_probs: torch.Tensor,
    row_starts: torch.Tensor,
    widths: torch.Tensor,
) -> Chances:
    """Return min(1, p/q) of each proposal, and a scale of 1: the refused token follows p - q.

    Args:
        proposals: [n, B-1] int64.
        draft: q, [n, B-1, C].
        target_probs: [M, V] float, p.
        row_starts: [n] int64.
        widths: [n] int64 in 1..B.
    """
    on_support = _on_support(draft, target_probs, row_starts, widths)
    ratios = _ratios(proposals, draft, on_support, widths)
    scale = ratios.new_ones(ratios.shape[0], ratios.shape[1] + 1)
    return Chances(ratios.clamp(max=1), scale)


def block_chances(
    proposals: torch.Tensor,
    draft: DraftProbs,
    target_probs: torch.Tensor,
    row_starts: torch.Tensor,
    widths: torch.Tensor,
) -> Chances:
    """Return the coins h of block verification, and the capped likelihood ratios P.

    With P_0 = 1, P_i = min(1, P_(i-1) * p(x_i) / q(x_i)) and R_i = sum over x of
    max(P_i * p(x) - q(x), 0) in the laws after i proposals: h_i = R_i / (R_i + 1 - P_i), and
    h_i = P_i for the last verified proposal. In logarithms P is a walk reflected at 0, so it
    takes two scans and no loop.

    Args:
        proposals: [n, B-1] int64.
        draft: q, [n, B-1, C].
        target_probs: [M, V] float, p.
        row_starts: [n] int64.
        widths: [n] int64 in 1..B.
    """
    on_support = _on_support(draft, target_probs, row_starts, widths)
    walk = _ratios(proposals, draft, on_support, widths).log().cumsum(dim=1)
    capped = (walk - walk.cummax(dim=1).values.clamp(min=0)).exp()  # P_1 .. P_(B-1)
    inner = capped[:, :-1]
    rest = _mass_above(inner, on_support[:, 1:], draft.probs[:, 1:])
    total = rest + (1 - inner)
    # 0/0: p and q agree, so the next proposal is kept, but for rounding; then this one is.
    coins = torch.where(total == 0, 1.0, rest / total)
    coins = torch.cat([coins, capped[:, -1:]], dim=1)
    # Beyond the width the ratios are 0, hence P and h too.
    coins = torch.where(_steps(proposals) == widths.unsqueeze(1) - 1, capped, coins)
    return Chances(coins, torch.cat([torch.ones_like(capped[:, :1]), capped], dim=1))


def last_law(
    num_accepted: torch.Tensor,
    scale: torch.Tensor,
    draft: DraftProbs,
    target_probs: torch.Tensor,
    row_starts: torch.Tensor,
    widths: torch.Tensor,
) -> torch.Tensor:
    """Return the law of the token that ends the step, [n, V], not normalised.

    It is max(p - q / scale, 0) after a refusal and p after none. Where rounding leaves nothing of
    it, p and q agree, a refusal had no probability worth the name, and p itself is returned.

    Args:
        num_accepted: [n] int64 in 0..widths-1.
        scale: [n, B] float, of `Chances`.
        draft: q, [n, B-1, C].
        target_probs: [M, V] float, p.
        row_starts: [n] int64.
        widths: [n] int64 in 1..B.
    """
    law = target_probs.index_select(0, row_starts + num_accepted)  # [n, V], the only one
    column = num_accepted.clamp(max=draft.probs.shape[1] - 1)[:, None, None]
    token_ids = draft.token_ids.take_along_dim(column, dim=1).squeeze(1)  # [n, C]
    probs = draft.probs.take_along_dim(column, dim=1).squeeze(1).to(law.dtype)
    refused = (num_accepted < widths - 1).unsqueeze(1)
    # q is scaled up rather than p down: law stays as it is outside q's support.
    scaled = torch.where(refused, probs / scale.gather(1, num_accepted.unsqueeze(1)), 0.0)
    taken = law.gather(1, token_ids).minimum(scaled)
    law.scatter_add_(1, token_ids, -taken)
    vanished = law.sum(dim=1, keepdim=True) <= 0
    return law.scatter_add_(1, token_ids, taken * vanished)


def _steps(proposals: torch.Tensor) -> torch.Tensor:
    """Return 1..B-1, the number of proposals up to and with each column."""
    return torch.arange(1, proposals.shape[1] + 1, device=proposals.device)


def _length_of_prefix(kept: torch.Tensor) -> torch.Tensor:
    """Return [n] int64, how many leading entries of [n, B-1] bool are true."""
    return kept.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _on_support(
    draft: DraftProbs, target_probs: torch.Tensor, row_starts: torch.Tensor, widths: torch.Tensor
) -> torch.Tensor:
    """Return [n, B-1, C], p of q's tokens; columns beyond the width repeat the last row's."""
    columns = torch.arange(draft.probs.shape[1], device=draft.probs.device)
    rows = row_starts.unsqueeze(1) + columns.minimum(widths.unsqueeze(1) - 1)  # [n, B-1]
    return target_probs[rows.unsqueeze(2), draft.token_ids]


def _ratios(
    proposals: torch.Tensor, draft: DraftProbs, on_support: torch.Tensor, widths: torch.Tensor
) -> torch.Tensor:
    """Return [n, B-1], p/q of the proposals; 0 beyond the width and where q has no such token."""
    drawn = (draft.token_ids == proposals.unsqueeze(2)) & (draft.probs > 0)
    ratios = torch.where(drawn, on_support / draft.probs.to(on_support.dtype), 0.0).sum(dim=2)
    return torch.where(_steps(proposals) < widths.unsqueeze(1), ratios, 0.0)


def _mass_above(
    scale: torch.Tensor, on_support: torch.Tensor, draft_probs: torch.Tensor
) -> torch.Tensor:
    """Return [n, columns], the sum over the vocabulary of max(scale * p - q, 0).

    Outside q's support it is what p has there, scaled. Adding that up keeps small sums exact,
    which scale - sum(min(scale * p, q)) would not.
    """
    probs = draft_probs.to(on_support.dtype)
    inside = torch.where(probs > 0, on_support, 0.0)
    outside = (1 - inside.sum(dim=2)).clamp(min=0)
    above = (scale.unsqueeze(2) * inside - probs).clamp(min=0).sum(dim=2)
    return scale * outside + above
