# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules: pure functions on tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Verdict", "accept_greedy"]


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


def accept_greedy(proposals: torch.Tensor, target_tokens: torch.Tensor) -> Verdict:
    """Return the longest prefix of proposals that the target's own choices confirm, and one more.

    An accepted proposal *is* the target's choice at its place, so the committed tokens are a prefix
    of `target_tokens`: the tokens of plain greedy decoding, whatever the draft proposed.

    Args:
        proposals: [n, B-1] int64. Column j is proposed for block row j+1.
        target_tokens: [n, B] int64. Column j is the target's argmax after block row j.

    Returns:
        The verdict; tokens beyond `num_committed` are the target's answers to refused proposals.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), the deterministic case.
    """
    agree = (proposals == target_tokens[:, :-1]).to(torch.int32)
    num_accepted = agree.cumprod(dim=1).sum(dim=1)  # [n]
    next_anchor = target_tokens.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    return Verdict(target_tokens, (num_accepted + 1).to(torch.int32), next_anchor)
