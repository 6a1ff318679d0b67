# SPDX-License-Identifier: Apache-2.0
"""A plugin for tests: acceptance rules made wrong, widths made up, context injected otherwise."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from sglang_dflash.budget import policy
from sglang_dflash.draft.forward import DraftForward
from sglang_dflash.verify import accept

__all__ = ["register"]

_right = accept.accept_block
_inject = DraftForward.inject


def register() -> None:
    """Put what the environment asks for where the worker will look for the right thing."""
    if "DFLASH_MUTANT_FILE" in os.environ:
        accept.accept_block = _accept  # type: ignore[assignment]
    if "DFLASH_RANDOM_WIDTHS" in os.environ:
        policy.FixedWidth = _RandomWidths  # type: ignore[misc]
    if "DFLASH_PLAIN_STEPS" in os.environ:
        policy.FixedWidth = _MostlyPlain  # type: ignore[misc]
    if "DFLASH_LATER" in os.environ:
        DraftForward.inject = _never_late  # type: ignore[method-assign]


def _accept(proposals, draft, target_probs, uniforms, row_starts, widths):
    name = Path(os.environ["DFLASH_MUTANT_FILE"]).read_text()
    arguments = (draft, target_probs, row_starts, widths)
    if name == "p instead of p/q":
        chances = accept.rejection_chances(proposals, *arguments)
        drawn = (draft.token_ids == proposals.unsqueeze(2)) * draft.probs
        kept = (uniforms < chances.accept * drawn.sum(2)).long().cumprod(1).sum(1)
        return accept.Acceptance(kept, accept.last_law(kept, chances.scale, *arguments))
    right = _right(proposals, draft, target_probs, uniforms, row_starts, widths)
    if name == "q not subtracted":
        return right._replace(last_law=target_probs[row_starts + right.num_accepted])
    assert name == "right", name
    return right


def _never_late(self, *arguments, later=False):
    """Inject at once what could wait, or never."""
    if not later or os.environ["DFLASH_LATER"] == "at once":
        _inject(self, *arguments)


class _RandomWidths(policy.FixedWidth):
    """Other widths for each request and step, of draft and verify; one step of five is plain."""

    wants_confidence = True  # so that all ranks take the first one's

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._random = random.Random(1)

    def draft_width(self, facts: policy.StepFacts) -> int:
        widest = super().draft_width(facts)
        narrow = self._random.randint(2, widest)
        return self._random.choice([1, narrow, narrow, widest, widest])

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        most = 1 if confidence is None else confidence.shape[1] + 1
        return [self._random.randint(1, most) for _ in range(self._num_requests)]


class _MostlyPlain(policy.FixedWidth):
    """Some plain steps, then a whole block."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._left = self._plain_steps = int(os.environ["DFLASH_PLAIN_STEPS"])

    def draft_width(self, facts: policy.StepFacts) -> int:
        width = super().draft_width(facts)
        self._left = self._left - 1 if self._left else self._plain_steps
        return 1 if self._left else width

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        return [self._width if self._left == 0 else 1] * self._num_requests
