# SPDX-License-Identifier: Apache-2.0
"""The budget where a step's proposals are not seen before it is verified."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.budget.controller import BudgetController, Look
from sglang_dflash.budget.cost import CostModel
from sglang_dflash.budget.pacing import Pacing
from sglang_dflash.budget.planner import Limits, expected_tokens, most_likely_widths
from sglang_dflash.verify.buckets import RowBuckets

__all__ = ["LateController", "StepPlan"]

Array = NDArray[np.float64]


class StepPlan(NamedTuple):
    """How many rows a step verifies, and what it is held against when it is heard of.

    Attributes:
        num_rows: M, of all requests together.
        expected_tokens: committed by the step, by past steps.
        usual_rows: had the step not looked; None for a step that does not.
        seconds_per_token: what a token is worth.
        extra_seconds: of the step beyond a usual one and the look's price.
    """

    num_rows: int
    expected_tokens: float
    usual_rows: int | None = None
    seconds_per_token: float = 0.0
    extra_seconds: float = 0.0


class LateController(BudgetController):
    """Decides the number of rows by the steps before, and learns from each when it has ended.

    A step is `start` -> `choose_rows` -> draft, verify -> (later) `hear`.

    Args:
        cost: measured times.
        limits: bounds on the widths.
        buckets: the sizes of verify graphs: a step with the draft has as many rows as its graph, or
            all there are.
        pacing: hysteresis and exploration.
    """

    def __init__(
        self,
        cost: CostModel,
        limits: Limits,
        buckets: RowBuckets,
        pacing: Pacing | None = None,
    ) -> None:
        super().__init__(cost, limits, pacing)
        self._buckets = buckets

    def choose_rows(self, n: int) -> StepPlan:
        """Return how many rows the step that `start` decided on verifies.

        Args:
            n: its requests.
        """
        if not self._step.drafts:
            return StepPlan(n, float(n))
        drafting = self._switch.drafting
        ahead = self._prices.outlooks[self._step.draft_width]
        index = ahead.best
        if self._step.explores:
            index = ahead.wider(index) if drafting else max(index, ahead.wider(0))
        most = int(ahead.rows[-1])
        num_rows = self._buckets.filled(n, int(ahead.rows[index]), most)
        place = num_rows - int(ahead.rows[0])
        plan = StepPlan(num_rows, float(ahead.tokens[place]))
        if not self._step.explores:
            return plan
        best = self._prices.best
        usual_rows = int(best.rows[best.best]) if drafting else n
        extra = float(ahead.seconds[place]) - self._usual_seconds(drafting)
        return plan._replace(
            usual_rows=usual_rows,
            seconds_per_token=1 / best.best_rate if drafting else self._prices.plain / n,
            extra_seconds=extra - self._look_price(drafting),
        )

    def plain_widths(self, n: int) -> list[int]:
        """Return the widths of a step without the draft; see `RowBuckets.plain_widths`."""
        return self._buckets.plain_widths(n, self.limits.widest)

    def hear(self, plan: StepPlan, chances: Array, num_accepted: NDArray[np.int64]) -> None:
        """Learn from a step with the draft that has ended.

        Args:
            plan: of the step.
            chances: [n, w-1], calibrated.
            num_accepted: [n], accepted proposals.
        """
        self._learn(chances)
        limits, n = self._limits_of(chances), len(chances)
        widths = most_likely_widths(chances, plan.num_rows, limits)
        promised = expected_tokens(chances, widths) - n
        self.gains.settle(n, promised, int(num_accepted.sum()))
        if plan.usual_rows is None:
            return
        usual = most_likely_widths(chances, plan.usual_rows, limits)
        self._earn(Look(usual, plan.seconds_per_token, plan.extra_seconds), num_accepted)

    def _numbers_of_rows(self, n: int, rows: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        counts, most_requests = self._buckets
        if not counts or n > most_requests:
            return None
        return np.isin(rows, counts) | (rows == rows[-1]) | (rows > counts[-1])
