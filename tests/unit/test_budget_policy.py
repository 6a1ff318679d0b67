# SPDX-License-Identifier: Apache-2.0
"""What the worker asks of the budget, step by step."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.controller import BudgetController, draft_widths
from sglang_dflash.budget.cost import CostModel, sweep_points
from sglang_dflash.budget.planner import Limits
from sglang_dflash.budget.policy import FixedWidth, FollowedWidths, MeasuredWidths, StepFacts
from sglang_dflash.verify.rows import Rows

BLOCK_SIZE, REQUESTS = 4, 8


def measured(row_seconds: float, **limits: int) -> MeasuredWidths:
    """A budget that was measured: 10 ms a step, 1 ms for a draft, and so much for each row."""
    cost = CostModel(REQUESTS, BLOCK_SIZE)
    for part, n, rows in sweep_points(REQUESTS, BLOCK_SIZE):
        seconds = 0.001 if part == "draft" else 0.01 + row_seconds * rows
        cost.observe(part, n, rows, 64 * n, seconds)
    bounds = Limits(BLOCK_SIZE, **limits)
    controller = BudgetController(cost, bounds, draft_widths=draft_widths(bounds))
    return MeasuredWidths(controller, Calibrator(BLOCK_SIZE))


@pytest.fixture(autouse=True)
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of these tests takes time, unless it says so: prices stay as measured."""
    monkeypatch.setattr("sglang_dflash.budget.policy.time.perf_counter", lambda: 100.0)


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
        width = policy.draft_width(facts(2 * step))  # a gap each time: these seconds mean nothing
        policy.draft_begins()
        asks = width > 1 and policy.judges
        widths = policy.widths(confidence[:, : width - 1] if asks else None, sampled)
        rows = Rows.of(widths, BLOCK_SIZE, "cpu")
        kept = torch.rand(confidence.shape, generator=generator) < acceptance
        num_accepted = kept.long().cumprod(1).sum(1).minimum(rows.widths - 1)
        policy.settle(rows, num_accepted)
        history.append(widths)
    return history


def test_a_fixed_width_is_for_all() -> None:
    policy = FixedWidth(3)
    assert policy.draft_width(facts(1, n=2)) == 3
    assert policy.widths(None, torch.zeros(2)) == [3, 3]


def test_rows_that_cost_nothing_and_are_accepted_are_verified() -> None:
    history = run(measured(row_seconds=0.0), 60, acceptance=0.9)
    assert history.count([BLOCK_SIZE] * REQUESTS) > 40, "all but a few that time plain decoding"


def judged_steps(policy: MeasuredWidths, steps: int, acceptance: float) -> int:
    """Serve steps and return how many of them judged their proposals."""
    count = 0
    for _ in range(steps):
        run(policy, 1, acceptance)
        count += policy.latest.judged is not None
    return count


def test_whole_blocks_are_seldom_judged_while_nothing_is_to_be_won() -> None:
    policy = measured(row_seconds=0.0)
    run(policy, 400, acceptance=0.9)
    assert 8 < judged_steps(policy, 40, acceptance=0.9) < 16
    kept = policy.controller.gains.kept
    assert 0.9 < kept < 1.1, "what was promised without judging is held against the same"


def test_rows_that_cost_something_are_judged_in_every_step() -> None:
    policy = measured(row_seconds=0.0005)
    run(policy, 400, acceptance=0.5)
    drafted = sum(max(widths) > 1 for widths in run(policy, 40, acceptance=0.5))
    assert drafted > 30
    assert judged_steps(policy, 40, acceptance=0.5) > 30


def test_whole_blocks_end_soon_where_proposals_stop_being_accepted() -> None:
    policy = measured(row_seconds=0.0005)
    assert run(policy, 60, acceptance=0.97)[-1] == [BLOCK_SIZE] * REQUESTS
    rows = [sum(widths) / REQUESTS for widths in run(policy, 60, acceptance=0.05)]
    assert sum(rows[20:]) / 40 < 0.6 * BLOCK_SIZE


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
    cost = policy.controller.cost
    width = policy.draft_width(facts(7))
    assert width > 1
    policy.draft_begins()
    now[0] += 0.003
    confidence = torch.full((REQUESTS, width - 1), 0.5)
    drafts_before = cost.samples("draft", REQUESTS, REQUESTS * width)
    widths = policy.widths(confidence, torch.zeros(REQUESTS, dtype=torch.bool))
    assert cost.samples("draft", REQUESTS, REQUESTS * width) > drafts_before
    before = cost.samples("target", REQUESTS, sum(widths))
    now[0] += 0.02
    policy.draft_width(facts(9 if gap == "a prefill" else 8, after_idle=gap == "idle"))
    after = cost.samples("target", REQUESTS, sum(widths))
    assert (after > before) == (gap == "")


def test_the_parts_of_a_step_add_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = [100.0], []
    monkeypatch.setattr("sglang_dflash.budget.policy.time.perf_counter", lambda: now[0])
    policy = measured(row_seconds=0.001)
    monkeypatch.setattr(policy.controller.cost, "observe", lambda *args: seen.append(args))
    width = policy.draft_width(facts(7))
    now[0] += 0.5  # what was late from steps before belongs to none of the parts
    policy.draft_begins()
    now[0] += 0.003
    confidence = torch.full((REQUESTS, width - 1), 0.5)
    widths = policy.widths(confidence, torch.zeros(REQUESTS, dtype=torch.bool))
    now[0] += 0.017
    policy.draft_width(facts(8))
    assert [part for part, *_ in seen] == ["draft", "target"]
    assert [rows for _, _, rows, *_ in seen] == [REQUESTS * width, sum(widths)]
    assert [seconds for *_, seconds in seen] == pytest.approx([0.003, 0.017])


def test_a_rank_that_follows_gives_as_many_numbers_as_the_first() -> None:
    """They are replaced one by one; a list of another length would stop the broadcast."""
    follower, first = FollowedWidths(), FixedWidth(BLOCK_SIZE)
    sampled = torch.zeros(3, dtype=torch.bool)
    for policy in (follower, first):
        policy.draft_width(facts(0, n=3))
    assert follower.wants_confidence
    assert len(follower.widths(None, sampled)) == len(first.widths(None, sampled)) == 3
