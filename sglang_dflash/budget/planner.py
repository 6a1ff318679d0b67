# SPDX-License-Identifier: Apache-2.0
"""How many rows of each request to verify, from chances and costs. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Limits",
    "Plan",
    "StepSeconds",
    "expected_tokens",
    "most_likely_widths",
    "plan_widths",
    "widen",
]

Array = NDArray[np.float64]
StepSeconds = Callable[[NDArray[np.int64]], Array]
"""Seconds of a step with the draft, for [k] numbers of verified rows in all. Non-decreasing; a
staircase over captured graph sizes is as good (a plan then ends on top of a stair)."""


@dataclass(frozen=True)
class Limits:
    """Bounds on the verify width, in rows of a request, anchor included.

    Attributes:
        block_size: B.
        min_width: at least 1. `min_width == max_width` is the fixed mode.
        max_width: at most B; None is B.
    """

    block_size: int
    min_width: int = 1
    max_width: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that no plan can keep."""
        if not 1 <= self.min_width <= self.widest <= self.block_size:
            raise ValueError(
                f"verify widths {self.min_width}..{self.widest} are not within 1..{self.block_size}"
                " (the block size): set 1 <= min_width <= max_width <= block_size"
            )

    @property
    def widest(self) -> int:
        """The largest width allowed."""
        return self.block_size if self.max_width is None else self.max_width


class Plan(NamedTuple):
    """What to verify.

    Attributes:
        widths: [n] int64, rows of each request.
        expected_tokens: committed by the step, all requests together.
        expected_seconds: of the whole step, the draft pass included.
    """

    widths: NDArray[np.int64]
    expected_tokens: float
    expected_seconds: float

    @property
    def num_rows(self) -> int:
        """M, verified rows in all."""
        return int(self.widths.sum())


def plan_widths(
    chances: Array,
    seconds: StepSeconds,
    limits: Limits,
    rate: float | None = None,
    margin: float = 0.0,
) -> Plan:
    """Return the widths that commit the most expected tokens per second.

    A row is worth its survival, the chance that it and all rows before it in its request are
    accepted. Survival does not grow along a request, so the M rows of highest survival form a valid
    ragged plan, and no plan of M rows commits more; what is left is to try every M.

    Fairness: every request has its anchor row in every step, so it advances at least one token a
    step, at the pace of all others: waiting is impossible, and a request with poor proposals loses
    only the extra rows that would have been wasted on it. What it can lose against plain decoding
    is the step's length; the controller drafts only where the batch gains, and `min_width` buys a
    floor. Rows of equal survival go to the request with fewer rows.

    Args:
        chances: [n, B-1], calibrated, each given that all before are accepted.
        seconds: of a step with the draft, whose cost is sunk but counts in the rate.
        limits: bounds on the widths.
        rate: tokens per second of the steps at large. Given it, the plan maximises
            `tokens - rate * seconds`: a step with poor proposals is kept short and one with good
            ones stretched, which is what maximises the *long-run* rate (renewal reward; Dinkelbach
            1967). Without it, the step's own rate, as if all steps were like it.
        margin: all rows are verified unless fewer are ahead by more than this share, 0..1.
    """
    n = len(chances)
    order, tokens = _by_worth(chances, limits)
    rows = n * limits.min_width + np.arange(len(tokens))
    times = seconds(rows)
    score = tokens / times if rate is None else tokens - rate * times
    best = int(score.argmax())
    ahead = score[best] - score[-1]
    if ahead < margin * (score[best] if rate is None else tokens[best]):
        best = len(score) - 1
    return Plan(_widths(order[:best], n, limits), float(tokens[best]), float(times[best]))


def most_likely_widths(chances: Array, num_rows: int, limits: Limits) -> NDArray[np.int64]:
    """Return the widths [n] of so many rows that commit the most expected tokens.

    Args:
        chances: [n, B-1], calibrated.
        num_rows: of all requests together, within the limits.
        limits: bounds on the widths.
    """
    order, _ = _by_worth(chances, limits)
    return _widths(order[: num_rows - len(chances) * limits.min_width], len(chances), limits)


def expected_tokens(chances: Array, widths: NDArray[np.int64]) -> float:
    """Return the tokens that a step of some widths commits, all requests together.

    Args:
        chances: [n, w-1], calibrated.
        widths: [n] in 1..w.
    """
    verified = np.arange(2, chances.shape[1] + 2) <= widths[:, None]
    return len(chances) + float((np.cumprod(chances, axis=1) * verified).sum())


def _by_worth(chances: Array, limits: Limits) -> tuple[NDArray[np.int64], Array]:
    """Return the optional rows, the best first, and the tokens of 0, 1, ... of them."""
    survival = np.cumprod(chances, axis=1)
    optional = survival[:, limits.min_width - 1 : limits.widest - 1]
    # Column-major and stable: among equals the shallower row first, so that prefixes stay whole.
    order = np.argsort(-optional.T.ravel(), kind="stable")
    least = len(chances) + survival[:, : limits.min_width - 1].sum()
    return order, least + np.concatenate([[0.0], optional.T.ravel()[order].cumsum()])


def _widths(chosen: NDArray[np.int64], n: int, limits: Limits) -> NDArray[np.int64]:
    """Return the widths [n] with these optional rows, numbered column by column."""
    return limits.min_width + np.bincount(chosen % n, minlength=n)


def widen(widths: NDArray[np.int64], limits: Limits) -> NDArray[np.int64]:
    """Return the widths of an exploring step: doubled, within the limits.

    Doubling reaches any depth in log2(B) probes and costs at most as many rows again.

    Args:
        widths: [n] as planned.
        limits: bounds on the widths.
    """
    return np.minimum(2 * widths, limits.widest)
