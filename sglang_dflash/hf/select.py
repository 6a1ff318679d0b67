# SPDX-License-Identifier: Apache-2.0
"""Proposals of one block by a DFlash2 draft, row after row: each depends on the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_dflash.hf.accept import draw

if TYPE_CHECKING:
    from sglang_dflash.hf.draft import HFDraft

__all__ = ["Successors", "successors", "walk"]


class Successors(NamedTuple):
    """What may come next at a row.

    Attributes:
        tokens: [K] int64, the row's candidates, its own best first.
        scores: [K] float32 logits over them.
    """

    tokens: torch.Tensor
    scores: torch.Tensor


def walk(
    draft: HFDraft,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    anchor: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a block's proposals, and the laws that they were drawn from.

    Args:
        draft: One with a candidate selector.
        hidden: [B-1, H], its output for the mask rows.
        logits: [B-1, V], the target's head on that.
        anchor: The token before the first row.
        temperature: 0 takes the best candidate of each row, above 0 draws one from
            softmax(scores / temperature).
        generator: Source of randomness, on the tensors' device; None takes torch's.

    Returns:
        [B-1] int64, and [B-1, V] float32, 0 at all but a row's K candidates; None where nothing
        was drawn.
    """
    proposals: list[int] = []
    draft_probs = None if temperature == 0 else torch.zeros_like(logits, dtype=torch.float32)
    previous = anchor
    for j in range(len(hidden)):
        tokens, scores = successors(draft, hidden[j], logits[j], previous)
        if draft_probs is None:
            choice = int(scores.argmax())
        else:
            probs = torch.softmax(scores / temperature, dim=-1)
            draft_probs[j, tokens] = probs
            choice = draw(probs, generator)
        previous = int(tokens[choice])
        proposals.append(previous)
    return torch.tensor(proposals, device=logits.device), draft_probs


def successors(
    draft: HFDraft, hidden: torch.Tensor, logits: torch.Tensor, previous: int
) -> Successors:
    """Return the candidates of one row, scored as what comes after a token.

    Args:
        draft: One with a candidate selector.
        hidden: [H], its output for the row.
        logits: [V], the target's head on that.
        previous: The token before the row's.
    """
    config, selector = draft.config, draft.candidate_selector
    assert selector is not None, "only DFlash2 drafts have one"
    own, tokens = logits.topk(config.selector_top_k)
    own = own.float() * config.output_multiplier
    cap = config.final_logit_softcapping
    if cap is not None:
        own = cap * torch.tanh(own / cap)
    pairs = selector.pair_scores(hidden, tokens.new_tensor([previous]), tokens)  # [1, K]
    return Successors(tokens, own + pairs[0].float())
