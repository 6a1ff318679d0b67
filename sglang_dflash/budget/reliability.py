# SPDX-License-Identifier: Apache-2.0
"""How far estimated chances are from what happened."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Reliability", "reliability"]


class Reliability(NamedTuple):
    """A reliability diagram. Sums, so that diagrams of several steps add up.

    Attributes:
        counts: [bins] float64, observations whose chance lies in the bin.
        chances: [bins] float64, the sum of their estimated chances.
        accepted: [bins] float64, how many of them were accepted.
    """

    counts: torch.Tensor
    chances: torch.Tensor
    accepted: torch.Tensor

    def expected_calibration_error(self) -> torch.Tensor:
        """Return the mean over observations of |mean chance - accepted share| of their bin.

        A scalar float64 tensor in 0..1 (no sync); 0 where nothing was observed.
        """
        gap = (self.chances - self.accepted).abs().sum()
        return gap / self.counts.sum().clamp_min(1)


def reliability(
    chances: torch.Tensor, seen: torch.Tensor, accepted: torch.Tensor, num_bins: int = 10
) -> Reliability:
    """Return the reliability diagram of one or more steps.

    Args:
        chances: [n, B-1] float in 0..1, as estimated before verify.
        seen: [n, B-1] bool, which proposals were observed (`calibration.observed`).
        accepted: [n, B-1] bool, which of them were accepted.
        num_bins: bins of equal width over 0..1.
    """
    bins = (chances * num_bins).long().clamp(0, num_bins - 1).flatten()
    columns = (seen.double(), chances.double() * seen, (accepted & seen).double())
    empty = torch.zeros(num_bins, dtype=torch.float64, device=chances.device)
    return Reliability(*(empty.scatter_add(0, bins, column.flatten()) for column in columns))
