# SPDX-License-Identifier: Apache-2.0
"""When to draft, when to decode plainly, and when to look again."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["DraftSwitch", "Pacing", "steps_between"]


@dataclass(frozen=True)
class Pacing:
    """How the budget moves between drafting and plain decoding.

    Attributes:
        margin: how much faster the other way must be expected before the switch turns.
        min_steps: a way is kept at least this many steps.
        exploration: share of the time that looking again may cost, 0..1.
        shortest_pause: steps between two looks, at least.
        longest_pause: steps between two looks, at most; beats `exploration`, so that no estimate is
            ever frozen.
    """

    margin: float = 0.02
    min_steps: int = 4
    exploration: float = 0.01
    shortest_pause: int = 4
    longest_pause: int = 1000


class DraftSwitch:
    """Chooses between drafting and plain decoding, with hysteresis.

    Args:
        pacing: its constants.
        drafting: where it starts.
    """

    def __init__(self, pacing: Pacing, *, drafting: bool = True) -> None:
        self.drafting = drafting
        self._pacing = pacing
        self._steps = pacing.min_steps  # no dwell before the first turn

    def turn(self, advantage: float) -> bool:
        """Return whether the next step drafts.

        Args:
            advantage: expected rate with the draft over that without (`planner.worth_drafting`).
        """
        self._steps += 1
        away = 1 / advantage if self.drafting else advantage
        if away > 1 + self._pacing.margin and self._steps > self._pacing.min_steps:
            self.drafting = not self.drafting
            self._steps = 1
        return self.drafting


def steps_between(extra_seconds: float, step_seconds: float, pacing: Pacing) -> int:
    """Return how many steps one look must be apart from the next.

    A look that takes `extra_seconds` more than a usual step, once in k steps, costs at most
    `extra / (k * step)` of the time; what it gains in tokens is not counted.

    Args:
        extra_seconds: of the look beyond a usual step.
        step_seconds: of a usual step.
        pacing: the share that may be spent, and the bounds.
    """
    steps = math.ceil(max(extra_seconds, 0.0) / (pacing.exploration * step_seconds))
    return min(max(steps, pacing.shortest_pause), pacing.longest_pause)
