# SPDX-License-Identifier: Apache-2.0
"""What the worker asks of the budget, step by step."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.controller import BudgetController
from sglang_dflash.budget.cost import CostModel, sweep_points
from sglang_dflash.budget.planner import Limits
from sglang_dflash.budget.policy import FixedWidth, MeasuredWidths, StepFacts
from sglang_dflash.verify.rows import Rows

BLOCK_SIZE, REQUESTS = 4, 8


def measured(row_seconds: float, **limits: int) -> MeasuredWidths:
    """A budget that was measured: 10 ms a step, 1 ms for a draft, and so much for each row."""
    cost = CostModel(REQUESTS, BLOCK_SIZE)
    for kind, n, rows in sweep_points(REQUESTS, BLOCK_SIZE):
        seconds = 0.01 + row_seconds * rows + 0.001 * (kind == "draft")
        cost.observe(kind, n, rows, 64 * n, seconds)
    return MeasuredWidths(
        BudgetController(cost, Limits(BLOCK_SIZE, **limits)), Calibrator(BLOCK_SIZE)
    )


def facts(iteration: int, n: int = REQUESTS, *, after_idle: bool = False) -> StepFacts:
    """A step of n requests."""
    return StepFacts(n, 64 * n, iteration, after_idle)


def run(policy: MeasuredWidths, steps: int, acceptance: float) -> list[list[int]]:
    """Serve steps in which each proposal is as good as `acceptance`; return the widths."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.full((REQUESTS, BLOCK_SIZE - 1), 0.5)
    sampled = torch.zeros(REQUESTS, dtype=torch.bool)
    history = []
    for step in range(steps):
        drafts = policy.drafts(facts(2 * step))  # a gap each time: these seconds mean nothing
        widths = policy.widths(confidence if drafts else None, sampled)
        rows = Rows.of(widths, BLOCK_SIZE, "cpu")
        kept = torch.rand(confidence.shape, generator=generator) < acceptance
        num_accepted = kept.long().cumprod(1).sum(1).minimum(rows.widths - 1)
        policy.settle(rows, num_accepted)
        history.append(widths)
    return history


def test_a_fixed_width_is_for_all() -> None:
    policy = FixedWidth(3)
    assert policy.drafts(facts(1, n=2))
    assert policy.widths(None, torch.zeros(2)) == [3, 3]


def test_rows_that_cost_nothing_and_are_accepted_are_verified() -> None:
    assert run(measured(row_seconds=0.0), 60, acceptance=0.9)[-1] == [BLOCK_SIZE] * REQUESTS


def test_a_draft_that_never_helps_is_hardly_ever_run() -> None:
    history = run(measured(row_seconds=0.004), 300, acceptance=0.02)
    assert history[-1] == [1] * REQUESTS
    drafted = sum(max(widths) > 1 for widths in history[100:])
    assert 0 < drafted < 20, "it is tried again now and then"


def test_the_bounds_hold() -> None:
    cheap = run(measured(row_seconds=0.0, max_width=2), 60, acceptance=0.9)
    assert max(max(widths) for widths in cheap) == 2
    dear = run(measured(row_seconds=0.01, min_width=3), 60, acceptance=0.02)
    assert min(min(widths) for widths in dear) == 3


@pytest.mark.parametrize("gap", ["", "a prefill", "idle"])
def test_only_a_step_that_the_next_follows_at_once_is_timed(
    gap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("sglang_dflash.budget.policy.time.perf_counter", lambda: now[0])
    policy = measured(row_seconds=0.001)
    kind = "draft" if policy.drafts(facts(7)) else "plain"
    confidence = torch.full((REQUESTS, BLOCK_SIZE - 1), 0.5) if kind == "draft" else None
    widths = policy.widths(confidence, torch.zeros(REQUESTS, dtype=torch.bool))
    before = policy.controller.cost.samples(kind, REQUESTS, sum(widths))
    now[0] += 0.02
    policy.drafts(facts(9 if gap == "a prefill" else 8, after_idle=gap == "idle"))
    after = policy.controller.cost.samples(kind, REQUESTS, sum(widths))
    assert (after > before) == (gap == "")
