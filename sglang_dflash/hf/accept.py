# SPDX-License-Identifier: Apache-2.0
"""How much of one request's block is kept: the rules, in the form in which papers state them."""

from __future__ import annotations

import torch

__all__ = ["accept_greedy", "accept_sampled", "acceptance_probability", "draw", "residual"]


def accept_greedy(proposals: torch.Tensor, target_logits: torch.Tensor) -> list[int]:
    """Return the tokens that a greedy step commits: the target's own, as far as it was guessed.

    Args:
        proposals: [B-1] int64.
        target_logits: [B, V]; row j is the law of the token after block row j.

    Returns:
        1 to B tokens: the accepted proposals, then the target's next token.
    """
    choices = target_logits.argmax(-1).tolist()
    num_accepted = 0
    for proposal, choice in zip(proposals.tolist(), choices, strict=False):
        if proposal != choice:
            break
        num_accepted += 1
    return choices[: num_accepted + 1]


def accept_sampled(
    proposals: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Return the tokens that a sampled step commits; they follow the target's law.

    Args:
        proposals: [B-1] int64, proposal j drawn from row j of `draft_probs`.
        target_probs: [B, V] float; row j is the law of the token after block row j.
        draft_probs: [B-1, V] float.
        generator: Source of randomness, on the tensors' device; None takes torch's.

    Returns:
        1 to B tokens: the accepted proposals, then the recovered or the bonus token.
    """
    count = proposals.shape[0]
    uniforms = torch.rand(count, generator=generator, device=target_probs.device).tolist()
    committed: list[int] = []
    for j, token in enumerate(proposals.tolist()):
        if uniforms[j] >= acceptance_probability(target_probs[j], draft_probs[j], token):
            return [*committed, draw(residual(target_probs[j], draft_probs[j]), generator)]
        committed.append(token)
    return [*committed, draw(target_probs[count], generator)]


def acceptance_probability(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, token: int
) -> float:
    """Return min(1, p/q) of a proposed token.

    Args:
        target_probs: [V] float, p.
        draft_probs: [V] float, q; above 0 at the token, for it was drawn from q.
        token: The proposal.
    """
    return min(1.0, float(target_probs[token]) / float(draft_probs[token]))


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Return the law of the token after a refusal, max(p - q, 0) normalised.

    Args:
        target_probs: [V] float, p.
        draft_probs: [V] float, q.

    Returns:
        [V] float. p itself where rounding leaves nothing, which has probability 0 in exact
        arithmetic: p = q refuses nothing.
    """
    rest = (target_probs - draft_probs).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else target_probs


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> int:
    """Return a token drawn from a distribution.

    Args:
        probs: [V] float.
        generator: Source of randomness, on the tensor's device; None takes torch's.
    """
    return int(torch.multinomial(probs, 1, generator=generator))
