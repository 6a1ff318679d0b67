# SPDX-License-Identifier: Apache-2.0
"""Does a sample follow a law? One chi-squared test, strict enough to run every day."""

from __future__ import annotations

import torch

__all__ = ["assert_follows", "chi_squared_p_value"]

_SMALLEST_BIN = 5.0  # expected counts below this are merged


def chi_squared_p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Return how probable counts at least this far from a law are.

    Args:
        counts: [bins] int64, how often each outcome came.
        law: [bins] float64, its probabilities; sums to 1.
    """
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    counts, law = counts[law > 0].double(), law[law > 0].double()
    expected = law * counts.sum()
    order = expected.argsort(descending=True)
    expected, counts = expected[order], counts[order]
    num_large = int((expected >= _SMALLEST_BIN).sum())
    bins = [(counts[i], expected[i]) for i in range(num_large)]
    if num_large < len(expected):
        rest = (counts[num_large:].sum(), expected[num_large:].sum())
        if rest[1] < _SMALLEST_BIN and bins:  # too small even together
            last = bins.pop()
            rest = (rest[0] + last[0], rest[1] + last[1])
        bins.append(rest)
    statistic = sum(float((c - e) ** 2 / e) for c, e in bins)
    degrees = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    assert degrees > 0, "the law has one bin: nothing to test"
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, half))


def assert_follows(counts: torch.Tensor, law: torch.Tensor, alpha: float = 1e-8) -> None:
    """Fail where counts are too far from a law to have come from it.

    Args:
        counts: [bins] int64, how often each outcome came.
        law: [bins] float64, its probabilities; sums to 1.
        alpha: How often a right rule may fail.
    """
    p_value = chi_squared_p_value(counts, law)
    assert p_value >= alpha, f"p = {p_value:.3g} for {int(counts.sum())} samples"
