# SPDX-License-Identifier: Apache-2.0
"""What the draft has been worth lately, whatever the number of requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["GainCurve"]

Array = NDArray[np.float64]

_POINTS_PER_ROW = 4
_PRIOR_WEIGHT = 4.0  # request-steps


class GainCurve:
    """Expected tokens per request as a function of verified rows per request, best plan.

    The host plans from it when it must not wait for the device, and decides from it whether to run
    the draft at all. Per request, so that what is learnt at one load serves at another. It is the
    mean over steps of the curve "sum of the M highest survivals": concave, 1 at one row.

    Requests that share rows gain more than a request alone does, since rows go to the best of all;
    after a change of load the curve is a little off until new steps have come in.

    Args:
        block_size: B.
        chance: of every proposal, before anything was seen.
        window: effective number of request-steps that it remembers.
    """

    def __init__(self, block_size: int, chance: float = 0.6, window: float = 64.0) -> None:
        self._points = np.linspace(1, block_size, _POINTS_PER_ROW * (block_size - 1) + 1)
        start = np.concatenate([[0.0], np.cumsum(chance ** np.arange(1, block_size))])
        self._tokens = 1 + np.interp(self._points, np.arange(1, block_size + 1), start)
        self._window = window
        self._weight = _PRIOR_WEIGHT

    def update(self, chances: Array) -> None:
        """Take in [n, B-1] calibrated chances of one step, of verified rows or not."""
        n = len(chances)
        survival = np.sort(np.cumprod(chances, axis=1), axis=None)[::-1]
        tokens = np.concatenate([[0.0], survival.cumsum()]) / n
        rows = 1 + np.arange(len(tokens)) / n
        self._weight = min(self._weight + n, self._window)
        share = min(1.0, n / self._weight)
        self._tokens += share * (1 + np.interp(self._points, rows, tokens) - self._tokens)

    def tokens(self, n: int, rows: NDArray[np.int64]) -> Array:
        """Return the expected committed tokens of n requests for each of [k] numbers of rows."""
        return n * np.interp(np.asarray(rows) / n, self._points, self._tokens)
