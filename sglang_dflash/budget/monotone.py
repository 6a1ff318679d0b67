# SPDX-License-Identifier: Apache-2.0
"""Non-decreasing surfaces through noisy ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["isotonic_rows", "isotonic_surface"]

Array = NDArray[np.float64]


def isotonic_rows(values: Array, weights: Array) -> Array:
    """Return, row by row, the nearest non-decreasing sequence in weighted least squares.

    Args:
        values: [R, L].
        weights: [R, L], above 0.

    Source: the minimax form of isotonic regression (Robertson, Wright, Dykstra 1988, section 1.4),
    max over a <= i of min over b >= i of mean(a..b): L^2 numbers a row, but no Python loop.
    """
    length = values.shape[1]
    sums = _prefix_sums(values * weights)
    totals = _prefix_sums(weights)
    first, last = np.triu_indices(length)
    means = np.full((values.shape[0], length, length), np.inf)  # [R, first, last]
    means[:, first, last] = (sums[:, last + 1] - sums[:, first]) / (
        totals[:, last + 1] - totals[:, first]
    )
    least = np.minimum.accumulate(means[:, :, ::-1], axis=2)[:, :, ::-1]
    least[:, ~np.triu(np.ones((length, length), dtype=bool))] = -np.inf  # a > i
    return least.max(axis=1)


def isotonic_surface(values: Array, weights: Array, rounds: int = 6) -> Array:
    """Return a surface that is non-decreasing along both axes and near the given one.

    Dykstra's alternating projections, a few rounds, and a running maximum that closes what the
    rounds left open: exactly monotone, nearly the weighted least squares.

    Args:
        values: [R, L].
        weights: [R, L], above 0.
        rounds: of alternation.
    """
    surface = values
    row_correction = column_correction = np.zeros_like(values)
    for _ in range(rounds):
        shifted = surface + row_correction
        surface = isotonic_rows(shifted, weights)
        row_correction = shifted - surface
        shifted = surface + column_correction
        surface = isotonic_rows(shifted.T, weights.T).T
        column_correction = shifted - surface
    return np.maximum.accumulate(np.maximum.accumulate(surface, axis=0), axis=1)


def _prefix_sums(values: Array) -> Array:
    return np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)
