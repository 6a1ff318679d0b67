# SPDX-License-Identifier: Apache-2.0
"""When to draft, when to decode plainly, and when to look again."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DraftSwitch", "LookPurse", "Pacing"]

_MOST_LOOKS = 4  # that may be saved up: so many are wasted when luck ends


@dataclass(frozen=True)
class Pacing:
    """How the budget moves between drafting and plain decoding.

    Attributes:
        margin: how much faster drafting must be expected to be for it to go on; twice that for it
            to begin. Near break-even the times of steps leave out what drafting costs elsewhere:
            requests end apart, so that others' prefills come one by one.
        narrow_margin: how much faster fewer rows must be expected to be than all: measured times
            are uncertain, and the fastest of many looks faster than it is.
        min_steps: a way is kept at least this many steps.
        exploration: share of the time that looking again may cost, what looks save not counted,
            0..1.
        shortest_pause: steps between two looks while drafting, at least, and between the first two
            after a turn.
        longest_pause: steps between two looks, at most; beats `exploration`, so that no estimate is
            ever frozen.
    """

    margin: float = 0.02
    narrow_margin: float = 0.01
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

    def keeps(self, advantage: float) -> bool:
        """Return whether drafting of this advantage would go on; see `turn`."""
        return advantage > 1 + self._pacing.margin

    def turn(self, advantage: float) -> bool:
        """Return whether the next step drafts.

        Args:
            advantage: expected rate with the draft over that without.
        """
        self._steps += 1
        pays = self.keeps(advantage) if self.drafting else advantage > 1 + 2 * self._pacing.margin
        if pays != self.drafting and self._steps > self._pacing.min_steps:
            self.drafting = not self.drafting
            self._steps = 1
        return self.drafting


class LookPurse:
    """What may be spent on looking: a share of the time, and what looks earn.

    Every step pays in its share. A look pays the seconds that it takes beyond a usual step, and
    gets back those that its tokens save. So looks that earn nothing take `exploration` of the time
    at most, and looks that pay for themselves follow one another: a draft that became good is found
    within a few steps of the first look that sees it.

    Args:
        pacing: the share.
    """

    def __init__(self, pacing: Pacing) -> None:
        self._share = pacing.exploration
        self._seconds = 0.0

    def save(self, step_seconds: float) -> None:
        """Pay in the share of a usual step."""
        self._seconds += self._share * step_seconds

    def affords(self, price: float) -> bool:
        """Return whether a look of so many extra seconds may be taken."""
        return self._seconds >= price

    def spend(self, price: float) -> None:
        """Pay for a look; one that had to be taken leaves no debt."""
        self._seconds = max(self._seconds - price, 0.0)

    def earn(self, seconds: float, price: float) -> None:
        """Pay in what a look of this price saved, up to a handful of looks; below 0 is a loss."""
        most = max(self._seconds, _MOST_LOOKS * price)
        self._seconds = max(min(self._seconds + seconds, most), 0.0)
