# SPDX-License-Identifier: Apache-2.0
"""One measured surface: seconds of a step over (requests, verified rows per request)."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.budget.monotone import isotonic_surface

__all__ = ["TimeSurface", "half_octaves"]

Array = NDArray[np.float64]

_YOUNG = 8.0  # samples; below, a step that is much faster is believed
_BEYOND_CLIP = 0.9  # in log-seconds, where nothing as large was measured; twice the rows is 0.7
_LEAST_SHARE = 0.1  # of the sample, at a node beside it
_LEAST_CLIP = 0.1  # in log-seconds
_CLIP_SPREADS = 3.0
_SPREAD_GAIN = 0.1
_REFRESH = 8  # samples between two smoothings
_FILLED_WEIGHT = 1e-3  # of a node without samples, against one sample


class _Place(NamedTuple):
    """The nodes around a point, four at most, and how much of each (above 0)."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    shares: Array


class TimeSurface:
    """Step time on a grid, bilinear between nodes: exact where time is a + b n + c n w.

    A sample moves the nodes around it by its residual, so a step that lies between nodes does not
    bias them. A residual is clipped at three times the usual spread: a delayed step (another
    process, a page fault) moves little, while a lasting change widens the spread and gets through.

    Args:
        requests: [R] ascending nodes of n.
        widths: [W] ascending nodes of w = rows / n, from 1.
        window: effective number of samples that a node remembers.
    """

    def __init__(self, requests: Array, widths: Array, window: float) -> None:
        self.requests, self.widths, self._window = requests, widths, window
        shape = (len(requests), len(widths))
        self.values, self.evidence = np.zeros(shape), np.zeros(shape)
        self.context = np.zeros(shape)  # mean context tokens of a node's samples
        self._spread = 0.0
        self._smooth = self.values
        self._stale = 0

    @property
    def has_samples(self) -> bool:
        """Whether anything was ever measured."""
        return bool(self.evidence.any())

    def observe(self, n: int, width: float, seconds: float, context_tokens: float) -> float:
        """Take in one sample; return its clipped residual in seconds."""
        place = self._place(n, width)
        nodes = (place.rows, place.columns)
        fresh = self.evidence[nodes] == 0
        if fresh.any():  # start where the smoothed surface stands
            new = place.rows[fresh], place.columns[fresh]
            self.values[new] = self._surface()[new] if self.has_samples else seconds
            self.context[new] = context_tokens
        expected = float(place.shares @ self.values[nodes])
        evidence = float(place.shares @ self.evidence[nodes])
        beyond = not self.evidence[place.rows.max() :, place.columns.max() :].any()
        residual, gain = self._believed(seconds, expected, evidence, beyond=beyond)
        move = gain * place.shares / (place.shares @ place.shares)
        moved = self.values[nodes] + move * residual
        self.values[nodes] = np.maximum(moved, _LEAST_SHARE * seconds)
        self.context[nodes] += move * (context_tokens - place.shares @ self.context[nodes])
        self.evidence[nodes] = np.minimum(self.evidence[nodes] + place.shares, self._window)
        self._stale = _REFRESH if fresh.any() or evidence < _YOUNG else self._stale + 1
        return residual

    def seconds(self, n: int, widths: Array) -> Array:
        """Return the smoothed time for n requests at each of [k] widths."""
        return np.interp(widths, self.widths, self._along_requests(self._surface(), n))

    def context_at(self, n: int, widths: Array) -> Array:
        """Return the context tokens that the times of `seconds` stand for, [k]."""
        known = self.evidence > 0
        mean = self.context[known].mean() if known.any() else 0.0
        filled = np.where(known, self.context, mean)
        return np.interp(widths, self.widths, self._along_requests(filled, n))

    def samples_at(self, n: int, width: float) -> float:
        """Return how many samples back an estimate, forgotten ones not counted."""
        place = self._place(n, width)
        return float(place.shares @ self.evidence[place.rows, place.columns])

    def _believed(
        self, seconds: float, expected: float, evidence: float, *, beyond: bool
    ) -> tuple[float, float]:
        """Return the clipped residual and the gain of a sample; learn how large residuals are."""
        gain = 1 / min(evidence + 1, self._window)
        log_ratio = float(np.log(seconds / expected))
        limit = max(_LEAST_CLIP, _CLIP_SPREADS * self._spread)
        if beyond:
            limit = max(limit, _BEYOND_CLIP)
        else:
            self._spread += _SPREAD_GAIN * (min(abs(log_ratio), limit) - self._spread)
        if log_ratio < -limit and evidence < _YOUNG:
            # Delays happen, haste does not: what came before was a delay.
            return seconds - expected, max(gain, 0.5)
        return expected * float(np.expm1(min(max(log_ratio, -limit), limit))), gain

    def _place(self, n: int, width: float) -> _Place:
        row, down = _between(self.requests, n)
        column, right = _between(self.widths, width)
        rows = np.array([row, row, row + 1, row + 1])
        columns = np.array([column, column + 1, column, column + 1])
        shares = np.array(
            [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right]
        )
        real = shares > 0  # a grid of one node along an axis has no neighbour there
        return _Place(rows[real], columns[real], shares[real])

    def _along_requests(self, nodes: Array, n: int) -> Array:
        row, down = _between(self.requests, n)
        below = nodes[min(row + 1, len(nodes) - 1)]
        return (1 - down) * nodes[row] + down * below

    def _surface(self) -> Array:
        """Return the [R, W] surface, filled and monotone; renewed every few samples."""
        if self._stale >= _REFRESH:
            known = self.evidence > 0
            weights = np.where(known, self.evidence, _FILLED_WEIGHT)
            filled = np.where(known, self.values, self._filled(known))
            self._smooth = isotonic_surface(filled, weights)
            self._stale = 0
        return self._smooth

    def _filled(self, known: NDArray[np.bool_]) -> Array:
        """Return a value for every node from those that have samples.

        The least squares (in relative error) of a + b n + c n w with a, b, c >= 0, times the ratio
        of measured to fitted at the nearest node.
        """
        if known.all():
            return self.values
        n, width = np.meshgrid(self.requests, self.widths, indexing="ij")
        features = np.stack([np.ones_like(n), n, n * width], axis=-1)  # [R, W, 3]
        fitted = features @ _non_negative_fit(features[known], self.values[known])
        rows, columns = np.nonzero(known)
        r, c = np.indices(known.shape)
        distance = np.abs(r[..., None] - rows) + np.abs(c[..., None] - columns)  # [R, W, known]
        nearest = distance.argmin(axis=-1)
        ratio = self.values[known] / fitted[known]
        return fitted * ratio[nearest]


def half_octaves(last: int) -> Array:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to and with `last`."""
    powers = [2**i for i in range(last.bit_length() + 1)]
    nodes = {*powers, *(3 * power for power in powers)}
    return np.array([*sorted(node for node in nodes if node < last), last], dtype=np.float64)


def _between(nodes: Array, value: float) -> tuple[int, float]:
    """Return the node at or below a value, and how far it is towards the next (0..1)."""
    if len(nodes) == 1:
        return 0, 0.0
    index = int(np.clip(np.searchsorted(nodes, value, side="right") - 1, 0, len(nodes) - 2))
    share = (value - nodes[index]) / (nodes[index + 1] - nodes[index])
    return index, float(np.clip(share, 0.0, 1.0))


def _non_negative_fit(features: Array, values: Array) -> Array:
    """Return [3] coefficients >= 0 of the best relative least squares over all subsets."""
    scaled = features / values[:, None]
    best, least = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(values)), rcond=None)[0]
            error = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return best
