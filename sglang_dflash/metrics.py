# SPDX-License-Identifier: Apache-2.0
"""What the budget chose and what came of it, as counters in SGLang's /metrics."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.budget.calibration import observed
from sglang_dflash.budget.policy import MeasuredWidths
from sglang_dflash.budget.reliability import reliability
from sglang_dflash.verify.rows import Rows

__all__ = ["BINS", "CountedWidths", "StepCounters"]

BINS = 10  # of the calibration curve


class StepCounters:
    """Counts decode steps; for a server with --enable-metrics.

    Counters only, so that any two readings give the figures of the time between them:
    `sglang:dflash_steps`, `_request_steps`, `_drafted_rows`, `_verified_rows`, `_committed_tokens`
    and `_predicted_tokens` by kind of step; `_judged` and `_accepted` by position in the block;
    `_chances`, `_chance_judged` and `_chance_accepted` by bin of the predicted chance.
    """

    def __init__(self) -> None:
        by_kind = ("steps", "request_steps", "drafted_rows", "verified_rows", "committed_tokens")
        self._by_kind = {name: _counter(name, "kind") for name in (*by_kind, "predicted_tokens")}
        self._by_position = {name: _counter(name, "position") for name in ("judged", "accepted")}
        names = ("chance_judged", "chances", "chance_accepted")  # the order of Reliability
        self._by_bin = [_counter(name, "bin") for name in names]

    def count(
        self,
        widths: torch.Tensor,
        num_accepted: torch.Tensor,
        chances: torch.Tensor | None,
        expected_tokens: float,
    ) -> None:
        """Count a step.

        Args:
            widths: [n] int, verified rows of each request.
            num_accepted: [n] int.
            chances: [n, w-1] float, calibrated; None for a step without the draft.
            expected_tokens: of its plan, all requests together; unused without the draft.
        """
        n = len(widths)
        figures = {
            "steps": 1,
            "request_steps": n,
            "drafted_rows": 0 if chances is None else chances.numel() + n,
            "verified_rows": int(widths.sum()),
            "committed_tokens": n + int(num_accepted.sum()),
            "predicted_tokens": n if chances is None else expected_tokens,
        }
        for name, value in figures.items():
            self._by_kind[name].labels("plain" if chances is None else "draft").inc(value)
        if chances is not None:
            self._count_proposals(chances, widths, num_accepted)

    def _count_proposals(
        self, chances: torch.Tensor, widths: torch.Tensor, num_accepted: torch.Tensor
    ) -> None:
        seen, accepted = observed(chances.shape[1], widths, num_accepted)
        for name, which in (("judged", seen), ("accepted", accepted)):
            for position, count in enumerate(which.sum(0).tolist(), start=1):
                self._by_position[name].labels(position).inc(count)
        curve = reliability(chances, seen, accepted, BINS)
        for counter, values in zip(self._by_bin, curve, strict=True):
            for place, value in enumerate(values.tolist()):
                counter.labels(place).inc(value)


class CountedWidths(MeasuredWidths):
    """The measured policy, counting its steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = StepCounters()

    def settle(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """Count the step and learn from it; see `WidthPolicy`.

        Args:
            rows: the M verified rows.
            num_accepted: [n] int.
        """
        chances = None if self._judged is None else self._judged.chances
        self._counters.count(rows.widths, num_accepted, chances, self._expected_tokens)
        super().settle(rows, num_accepted)


def _counter(name: str, label: str) -> Any:
    from prometheus_client import Counter

    return Counter(f"sglang:dflash_{name}", f"DFLASH: {name.replace('_', ' ')}.", [label])
