# SPDX-License-Identifier: Apache-2.0
"""The device's half of a plan: which rows, once the host has said how many."""

from __future__ import annotations

import torch

from sglang_dflash.budget.planner import Limits

__all__ = ["pick_widths"]


def pick_widths(survival: torch.Tensor, num_rows: int, limits: Limits) -> torch.Tensor:
    """Return the widths of the best ragged plan of exactly `num_rows` rows.

    The same plan as `planner.plan_widths` finds for that number of rows, in a few launches without
    a sync: every later shape depends on `num_rows` only, which the host knows.

    Args:
        survival: [n, B-1] float, non-increasing along a request.
        num_rows: M, between n * min_width and n * max_width.
        limits: bounds on the widths.

    Returns:
        [n] int64, summing to `num_rows`.

    Raises:
        ValueError: no plan within the limits has `num_rows` rows.
    """
    n = len(survival)
    extra = num_rows - n * limits.min_width
    optional = survival[:, limits.min_width - 1 : limits.widest - 1]
    if not 0 <= extra <= optional.numel():
        raise ValueError(
            f"{num_rows} rows for {n} requests: widths {limits.min_width}..{limits.widest} allow "
            f"{n * limits.min_width}..{n * limits.widest}"
        )
    order = optional.T.flatten().argsort(descending=True, stable=True)  # shallower first
    owner = order[:extra] % n
    widths = torch.full((n,), limits.min_width, dtype=torch.int64, device=survival.device)
    return widths.scatter_add(0, owner, torch.ones_like(owner))
