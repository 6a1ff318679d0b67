# SPDX-License-Identifier: Apache-2.0
"""Acceptance by place in the block, from the histograms that SGLang keeps of each request."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["by_position"]


def by_position(rows: Sequence[int], accepted: Sequence[int]) -> dict[str, list[int]]:
    """Return in how many steps each proposal was verified, and in how many it was accepted.

    With unequal widths a proposal that was not verified was not refused either, so acceptance by
    position is the ratio of the two lists. Entry 0 is the first proposal, the row after the anchor.

    Args:
        rows: [w] steps that verified w rows, the anchor included.
        accepted: [k] steps that accepted k proposals.

    Returns:
        `spec_verified_per_position` and `spec_accepted_per_position`, as long as the widest step's
        proposals.
    """
    positions = range(1, len(rows) - 1)
    return {
        "spec_verified_per_position": [sum(rows[position + 1 :]) for position in positions],
        "spec_accepted_per_position": [sum(accepted[position:]) for position in positions],
    }
