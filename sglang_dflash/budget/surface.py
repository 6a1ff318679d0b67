# SPDX-License-Identifier: Apache-2.0
"""One measured surface: seconds of a step over (requests, verified rows per request)."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.budget.monotone import isotonic_surface

__all__ = ["TimeSurface", "half_octaves"]

Array = NDArray[np.float64]

_YOUNG = 8.0  # samples; below, a step that is much faster is believed
_BEYOND_CLIP = 0.9  # in log-seconds, where nothing as large was measured; twice the rows is 0.7
_LEAST_SHARE = 0.1  # of the sample as it is believed, at a node beside it
_LEAST_BARE = 0.01  # of a time, without its context
_LEAST_CLIP = 0.1  # in log-seconds
_CLIP_SPREADS = 3.0
_SPREAD_GAIN = 0.1
_DEVIATION = 1.25  # standard deviations a mean absolute one
_REFRESH = 8  # samples between two smoothings
_FILLED_WEIGHT = 1e-3  # of a node without samples, against one sample
_CONTEXT_KEEP = 0.98
_CONTEXT_RIDGE = 2.0 * 256**2  # tokens^2: less variation than this says nothing


class _Place(NamedTuple):
    """The nodes around a point, four at most, and how much of each (above 0).

    Plain numbers: on so few, arrays take twice as long, in every step.
    """

    nodes: list[tuple[int, int]]
    shares: list[float]

    def mean(self, grid: Array) -> float:
        """Return the interpolated value of a grid."""
        return sum(s * grid.item(node) for node, s in zip(self.nodes, self.shares, strict=True))


class _ContextSlope:
    """Seconds per context token at or above 0: a ridge regression that forgets."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._squares = 0.0
        self._products = 0.0

    def observe(self, deviation: float, seconds: float) -> None:
        self._squares = _CONTEXT_KEEP * self._squares + deviation**2
        self._products = _CONTEXT_KEEP * self._products + deviation * seconds
        self.seconds_per_token = max(0.0, self._products / (self._squares + _CONTEXT_RIDGE))


class TimeSurface:
    """Step time on a grid, bilinear between nodes: exact where time is a + b n + c n w + d tokens.

    A sample moves the nodes around it by its residual, so a step that lies between nodes does not
    bias them. A residual is clipped at three times the usual spread: a delayed step (another
    process, a page fault) moves little, while a lasting change widens the spread and gets through.

    A node's time is at the mean context of its samples, and moves along with it. Nodes are smoothed
    and filled without their contexts' share, for each was last seen at another load.

    Args:
        requests: [R] ascending nodes of n.
        widths: [W] ascending nodes of w = rows / n, from 1.
        window: effective number of samples that a node remembers.
    """

    def __init__(self, requests: Array, widths: Array, window: float) -> None:
        self.requests, self.widths, self._window = requests, widths, window
        shape = (len(requests), len(widths))
        self.values, self.evidence = np.zeros(shape), np.zeros(shape)
        self.context = np.zeros(shape)  # tokens of all requests together, that the values are at
        self._slope = _ContextSlope()
        self._spread = 0.0
        self._smooth, self._smooth_slope = self.values, 0.0
        self._stale = 0

    @property
    def has_samples(self) -> bool:
        """Whether anything was ever measured."""
        return bool(self.evidence.any())

    def observe(self, n: int, width: float, seconds: float, context_tokens: float) -> None:
        """Take in one sample; its context tokens are those of all requests together."""
        place = self._place(n, width)
        fresh = [node for node in place.nodes if not self.evidence.item(node)]
        if fresh:  # start where the smoothed surface stands
            stand = self._at(context_tokens) if self.has_samples else None
            for node in fresh:
                self.values[node] = seconds if stand is None else stand[node]
                self.context[node] = context_tokens
        deviation = context_tokens - place.mean(self.context)
        usual = place.mean(self.values)
        shift = max(self._slope.seconds_per_token * deviation, (_LEAST_BARE - 1) * usual)
        expected = usual + shift
        evidence = place.mean(self.evidence)
        row, column = place.nodes[-1]
        beyond = not self.evidence[row:, column:].any()
        residual, gain = self._believed(seconds, expected, evidence, beyond=beyond)
        least, squares = _LEAST_SHARE * (expected + residual), sum(s * s for s in place.shares)
        for node, share in zip(place.nodes, place.shares, strict=True):
            move = gain * share / squares
            self.values[node] = max(self.values.item(node) + move * (residual + shift), least)
            self.context[node] += move * deviation
            self.evidence[node] = min(self.evidence.item(node) + share, self._window)
        self._slope.observe(deviation, shift + residual)
        self._stale = _REFRESH if fresh or evidence < _YOUNG else self._stale + 1

    def seconds(self, n: int, widths: Array, context_tokens: float | None = None) -> Array:
        """Return the smoothed time for n requests at each of [k] widths.

        Args:
            n: requests.
            widths: [k].
            context_tokens: of all requests together; None is what was usual for so many.
        """
        if context_tokens is None:
            context_tokens = min(n, self.requests[-1]) * self._usual_context()
        return np.interp(widths, self.widths, self._along_requests(self._at(context_tokens), n))

    def samples_at(self, n: int, width: float) -> float:
        """Return how many samples back an estimate, forgotten ones not counted."""
        return self._place(n, width).mean(self.evidence)

    @property
    def doubt(self) -> float:
        """The standard error of two nodes' difference, as a share of a time, at full memory."""
        return _DEVIATION * self._spread * math.sqrt(2 / self._window)

    def _believed(
        self, seconds: float, expected: float, evidence: float, *, beyond: bool
    ) -> tuple[float, float]:
        """Return the clipped residual and the gain of a sample; learn how large residuals are."""
        gain = 1 / min(evidence + 1, self._window)
        log_ratio = math.log(seconds / expected)
        limit = max(_LEAST_CLIP, _CLIP_SPREADS * self._spread)
        if beyond:
            limit = max(limit, _BEYOND_CLIP)
        else:
            self._spread += _SPREAD_GAIN * (min(abs(log_ratio), limit) - self._spread)
        if log_ratio < -limit and evidence < _YOUNG:
            # Delays happen, haste does not: what came before was a delay.
            return seconds - expected, max(gain, 0.5)
        return expected * math.expm1(min(max(log_ratio, -limit), limit)), gain

    def _place(self, n: int, width: float) -> _Place:
        row, down = _between(self.requests, n)
        column, right = _between(self.widths, width)
        corners = [
            ((row, column), (1 - down) * (1 - right)),
            ((row, column + 1), (1 - down) * right),
            ((row + 1, column), down * (1 - right)),
            ((row + 1, column + 1), down * right),
        ]
        # A grid of one node along an axis has no neighbour there.
        nodes, shares = zip(*(corner for corner in corners if corner[1] > 0), strict=True)
        return _Place(list(nodes), list(shares))

    def _along_requests(self, nodes: Array, n: int) -> Array:
        row, down = _between(self.requests, n)
        below = nodes[min(row + 1, len(nodes) - 1)]
        return (1 - down) * nodes[row] + down * below

    def _usual_context(self) -> float:
        """Return the mean context tokens of a request."""
        known = self.evidence > 0
        return float((self.context / self.requests[:, None])[known].mean())

    def _at(self, context_tokens: float) -> Array:
        """Return the [R, W] surface at a context, filled and monotone; renewed every few samples.

        What was taken from the nodes is given back at the same slope, however it moves between.
        """
        if self._stale >= _REFRESH:
            known = self.evidence > 0
            weights = np.where(known, self.evidence, _FILLED_WEIGHT)
            # No time is its context's alone: a slope that says so was believed too high.
            most = (1 - _LEAST_BARE) * self.values[known] / np.maximum(self.context[known], 1.0)
            self._smooth_slope = min(self._slope.seconds_per_token, float(most.min()))
            bare = self.values - self._smooth_slope * self.context
            self._smooth = isotonic_surface(self._filled(bare, known), weights)
            self._stale = 0
        return self._smooth + self._smooth_slope * context_tokens

    def _filled(self, values: Array, known: NDArray[np.bool_]) -> Array:
        """Return [R, W] values with those of the known nodes for every other one, too.

        The least squares (in relative error) of a + b n + c n w with a, b, c >= 0, times the ratio
        of measured to fitted at the nearest node.
        """
        if known.all():
            return values
        n, width = np.meshgrid(self.requests, self.widths, indexing="ij")
        features = np.stack([np.ones_like(n), n, n * width], axis=-1)  # [R, W, 3]
        fitted = features @ _non_negative_fit(features[known], values[known])
        rows, columns = np.nonzero(known)
        r, c = np.indices(known.shape)
        distance = np.abs(r[..., None] - rows) + np.abs(c[..., None] - columns)  # [R, W, known]
        nearest = distance.argmin(axis=-1)
        ratio = values[known] / fitted[known]
        return np.where(known, values, fitted * ratio[nearest])


def half_octaves(last: int) -> Array:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to and with `last`."""
    powers = [2**i for i in range(last.bit_length() + 1)]
    nodes = {*powers, *(3 * power for power in powers)}
    return np.array([*sorted(node for node in nodes if node < last), last], dtype=np.float64)


def _between(nodes: Array, value: float) -> tuple[int, float]:
    """Return the node at or below a value, and how far it is towards the next (0..1)."""
    if len(nodes) == 1:
        return 0, 0.0
    index = min(max(bisect_right(nodes, value) - 1, 0), len(nodes) - 2)
    below, above = nodes.item(index), nodes.item(index + 1)
    return index, min(max((value - below) / (above - below), 0.0), 1.0)


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
