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
    `_chances`, `_chance_judged` and `_chance_accepted` by bin of the predicted chance. The last
    five are of steps that looked at their proposals: whole blocks hardly do while they pay best.
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
        draft_width: int | None = None,
    ) -> None:
        """Count a step.

        Args:
            widths: [n] int, verified rows of each request.
            num_accepted: [n] int.
            chances: [n, w-1] float, calibrated; None for a step that did not judge its proposals.
            expected_tokens: of its plan, all requests together; unused without the draft.
            draft_width: w, 1 without the draft; None where only steps without it are not judged.
        """
        n = len(widths)
        if draft_width is None:
            draft_width = 1 if chances is None else chances.shape[1] + 1
        drafts = draft_width > 1
        figures = {
            "steps": 1,
            "request_steps": n,
            "drafted_rows": n * draft_width if drafts else 0,
            "verified_rows": int(widths.sum()),
            "committed_tokens": n + int(num_accepted.sum()),
            "predicted_tokens": expected_tokens if drafts else n,
        }
        for name, value in figures.items():
            self._by_kind[name].labels("draft" if drafts else "plain").inc(value)
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
        width, _, expected, judged = self.latest
        chances = None if judged is None else judged.chances
        self._counters.count(rows.widths, num_accepted, chances, expected, width)
        super().settle(rows, num_accepted)


def _counter(name: str, label: str) -> Any:
    from prometheus_client import Counter

    return Counter(f"sglang:dflash_{name}", f"DFLASH: {name.replace('_', ' ')}.", [label])
