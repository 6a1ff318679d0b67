# SPDX-License-Identifier: Apache-2.0
"""A plugin that makes the acceptance rule wrong in a way that a file names, step by step."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_dflash.verify import accept

__all__ = ["register"]

_right = accept.accept_block


def register() -> None:
    """Put the wrong rules where the worker will look for the right one."""
    accept.accept_block = _accept  # type: ignore[assignment]


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
