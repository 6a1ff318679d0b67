# SPDX-License-Identifier: Apache-2.0
"""What the draft has been worth lately, whatever the number of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["GainCurve"]

Array = NDArray[np.float64]

_POINTS_PER_ROW = 4
_PRIOR_WEIGHT = 4.0  # request-steps
_KEPT_WINDOW = 32.0  # request-steps
_PRIOR_KEPT = 4.0  # tokens, promised and accepted: chances are believed where little was seen
_MOST_KEPT = 1.5


class GainCurve:
    """Expected tokens per request as a function of verified rows per request, best plan.

    The controller decides from it over how many rows of each block the draft runs, if at all. Per
    request, so that what is learnt at one load serves at another. For every draft width it is the
    running mean of the curve "sum of the M highest survivals" over some request-steps that share M
    rows: concave, 1 at one row. A request alone shares them with itself over time, as plans by the
    long-run rate do. What a narrow draft did not propose is taken to be accepted as such proposals
    were before.

    Chances are learnt slowly where few requests run. What steps committed beyond their anchors,
    over what their chances promised, is known sooner, and scales the curve.

    Args:
        block_size: B.
        draft_widths: rows of a block that the draft may run over, each 2..B; None is B alone.
        chance: of every proposal, before anything was seen.
        window: effective number of request-steps that it remembers.
    """

    def __init__(
        self,
        block_size: int,
        draft_widths: Sequence[int] | None = None,
        chance: float = 0.6,
        window: float = 64.0,
    ) -> None:
        self._points = np.linspace(1, block_size, _POINTS_PER_ROW * (block_size - 1) + 1)
        self._usual = np.full(block_size - 1, chance)
        self._window = window
        self._weight = _PRIOR_WEIGHT
        self._promised = self._accepted = 0.0
        self._tokens = {
            width: self._curve(np.cumprod(self._usual)[None], width)
            for width in draft_widths or (block_size,)
        }

    def update(self, chances: Array) -> None:
        """Take in calibrated chances of one step or several, of verified rows or not.

        Args:
            chances: [n, w-1], w the rows of each block that the draft ran over.
        """
        n, seen = chances.shape
        self._weight = min(self._weight + n, self._window)
        share = min(1.0, n / self._weight)
        self._usual[:seen] += share * (chances.mean(axis=0) - self._usual[:seen])
        unseen = np.broadcast_to(self._usual[seen:], (n, len(self._usual) - seen))
        survival = np.cumprod(np.concatenate([chances, unseen], axis=1), axis=1)
        for width, known in self._tokens.items():
            self._tokens[width] = known + share * (self._curve(survival, width) - known)

    @property
    def kept(self) -> float:
        """How much of what chances promised was accepted lately; 1 where they are right."""
        kept = (self._accepted + _PRIOR_KEPT) / (self._promised + _PRIOR_KEPT)
        return min(kept, _MOST_KEPT)

    def settle(self, n: int, promised: float, accepted: int) -> None:
        """Take in what became of the proposals that a step verified.

        Args:
            n: its requests.
            promised: accepted proposals of all together, by their chances.
            accepted: how many were.
        """
        keep = float(np.exp(-n / _KEPT_WINDOW))
        self._promised = keep * self._promised + promised
        self._accepted = keep * self._accepted + accepted

    def tokens(self, n: int, rows: NDArray[np.int64], draft_width: int | None = None) -> Array:
        """Return the expected committed tokens of n requests for each of [k] numbers of rows.

        Args:
            n: requests.
            rows: [k] verified rows in all, n..n*draft_width.
            draft_width: rows of each block that the draft runs over; None is the widest.
        """
        curve = self._tokens[draft_width or max(self._tokens)]
        own = np.asarray(rows) / n
        each = 1 + self.kept * (np.interp(own, self._points, curve) - 1)
        return n * np.minimum(each, own)

    def _curve(self, survival: Array, width: int) -> Array:
        """Return the tokens per request of [n, B-1] survivals at `_points`, cut to a width."""
        n = len(survival)
        best = np.sort(survival[:, : width - 1], axis=None)[::-1]
        tokens = np.concatenate([[0.0], best.cumsum()]) / n
        return 1 + np.interp(self._points, 1 + np.arange(len(tokens)) / n, tokens)
