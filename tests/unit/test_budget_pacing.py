# SPDX-License-Identifier: Apache-2.0
"""When the budget turns, and how often it looks again."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dflash.budget.controller import BudgetController
from sglang_dflash.budget.cost import CostModel, sweep_points
from sglang_dflash.budget.pacing import DraftSwitch, LookPurse, Pacing
from sglang_dflash.budget.planner import Limits

BLOCK = 8


def controller(
    limits: Limits | None = None,
    *,
    draft: float = 3e-3,
    per_row: float = 1e-3,
    draft_widths: tuple[int, ...] | None = None,
) -> BudgetController:
    """Return a controller of a linear machine: 10 ms, the draft, and each verified row."""
    cost = CostModel(32, BLOCK)
    for point in sweep_points(32, BLOCK):
        seconds = draft if point.part == "draft" else 10e-3 + per_row * point.num_rows
        cost.observe(*point, 0.0, seconds)
    return BudgetController(cost, limits or Limits(BLOCK), draft_widths=draft_widths)


def run(budget: BudgetController, n: int, chance: float, steps: int) -> list[tuple[str, int]]:
    """Return (kind, rows) of steps whose proposals all have one chance, and luck by it."""
    taken, rng = [], np.random.default_rng(0)
    for _ in range(steps):
        step = budget.start(n)
        rows = n
        if step.drafts:
            proposals = (n, step.draft_width - 1)
            plan = budget.plan(np.full(proposals, chance))
            rows = plan.num_rows
            kept = (rng.random(proposals) < chance).cumprod(axis=1).sum(axis=1)
            budget.settle(np.minimum(kept, plan.widths - 1))
        taken.append(("draft" if step.drafts else "plain", rows))
    return taken


def test_the_switch_ignores_advantages_between_once_and_twice_the_margin() -> None:
    switch = DraftSwitch(Pacing(margin=0.05))
    wavering = [1.09, 1.06, 1.08, 1.07] * 20
    assert all(switch.turn(advantage) for advantage in wavering)
    switch = DraftSwitch(Pacing(margin=0.05), drafting=False)
    assert not any(switch.turn(advantage) for advantage in wavering)


@pytest.mark.parametrize("drafting", [False, True])
def test_a_draft_that_breaks_even_is_not_worth_it(drafting: bool) -> None:
    switch = DraftSwitch(Pacing(margin=0.02), drafting=drafting)
    assert not [switch.turn(advantage) for advantage in [1.01, 0.99, 1.015] * 10][-1]


def test_without_a_margin_the_same_advantages_make_it_flap() -> None:
    """The mutant that the margin is there for."""
    switch = DraftSwitch(Pacing(margin=0.0, min_steps=0))
    assert len({switch.turn(advantage) for advantage in [1.04, 0.97] * 5}) == 2


@pytest.mark.parametrize("min_steps", [1, 4, 9])
def test_the_switch_keeps_a_way_for_a_while(min_steps: int) -> None:
    switch = DraftSwitch(Pacing(min_steps=min_steps))
    ways = [switch.turn(0.5 if switch.drafting else 2.0) for _ in range(60)]
    turns = [i for i in range(1, 60) if ways[i] != ways[i - 1]]
    assert len(turns) > 3
    assert set(np.diff(turns)) == {min_steps}


def looks_in(purse: LookPurse, steps: int, price: float, earns: float) -> int:
    """Return how many looks of a price a purse pays for, at one second a step."""
    looks = 0
    for _ in range(steps):
        purse.save(1.0)
        if purse.affords(price):
            purse.spend(price)
            purse.earn(earns, price)
            looks += 1
    return looks


def test_looks_that_earn_nothing_take_the_share_that_was_allowed() -> None:
    pacing = Pacing(exploration=0.01)
    assert looks_in(LookPurse(pacing), 1000, price=1.0, earns=0.0) in (9, 10)
    assert looks_in(LookPurse(pacing), 1000, price=0.5, earns=0.0) in (19, 20)


def test_looks_that_earn_half_their_price_come_twice_as_often() -> None:
    assert looks_in(LookPurse(Pacing(exploration=0.01)), 1000, price=1.0, earns=0.5) in (18, 19, 20)


def test_looks_that_pay_for_themselves_follow_one_another() -> None:
    assert looks_in(LookPurse(Pacing(exploration=0.01)), 1000, price=1.0, earns=1.0) >= 900


def test_when_luck_ends_a_handful_of_looks_is_wasted() -> None:
    purse = LookPurse(Pacing(exploration=0.01))
    looks_in(purse, 1000, price=1.0, earns=2.0)
    assert looks_in(purse, 50, price=1.0, earns=0.0) <= 4


def test_looking_while_plain_costs_what_was_allowed() -> None:
    """Of proposals that are never right: a right one pays for a further look."""
    budget = controller()
    run(budget, 8, 1e-6, 1000)
    taken = run(budget, 8, 1e-6, 2000)
    plain = budget.cost.seconds("target", 8, 8)
    draft = budget.cost.seconds("draft", 8, 8 * BLOCK)
    looks = [rows for kind, rows in taken if kind == "draft"]
    assert looks
    assert set(looks) == {16}  # two rows a request: the first position is observed
    extra = sum(budget.cost.seconds("target", 8, rows) + draft - plain for rows in looks)
    assert extra <= 0.0105 * plain * len(taken)


def test_while_drafting_it_sometimes_looks_twice_as_deep() -> None:
    budget = controller()
    run(budget, 4, 0.65, 500)
    taken = run(budget, 4, 0.65, 1000)
    usual = int(np.median([rows for _, rows in taken]))
    wide = [rows for _, rows in taken if rows > usual]
    assert set(wide) == {2 * usual}
    draft = budget.cost.seconds("draft", 4, 4 * BLOCK)
    seconds = [draft + budget.cost.seconds("target", 4, rows) for rows in (usual, 2 * usual)]
    tokens = [4 * (0.65 ** np.arange(rows // 4)).sum() for rows in (usual, 2 * usual)]
    saved = (tokens[1] - tokens[0]) * seconds[0] / tokens[0]
    lost = seconds[1] - seconds[0] - saved
    assert lost > 0
    assert len(wide) * lost <= 0.0105 * seconds[0] * len(taken)


def test_a_draft_that_becomes_good_is_found_again() -> None:
    budget = controller()
    run(budget, 8, 0.02, 300)
    taken = run(budget, 8, 0.9, 250)
    first = next(i for i, (kind, _) in enumerate(taken) if kind == "draft")
    assert np.mean([kind == "draft" for kind, _ in taken[first:]]) > 0.9


def lost_to_plain_steps(budget: BudgetController) -> float:
    """Return the share of the time that drafting would not have needed for what they decoded."""
    run(budget, 4, 0.65, 500)
    taken = run(budget, 4, 0.65, 1000)
    usual = int(np.median([rows for _, rows in taken]))
    drafted = budget.cost.seconds("draft", 4, 4 * BLOCK) + 14e-3 + (usual - 4) * 1e-3
    rate = 4 * (0.65 ** np.arange(usual // 4)).sum() / drafted
    num_plain = sum(kind == "plain" for kind, _ in taken)
    return num_plain * (14e-3 - 4 / rate) / (len(taken) * drafted)


def test_while_drafting_it_sometimes_times_plain_decoding() -> None:
    assert 0 < lost_to_plain_steps(controller()) <= 0.0105


def test_with_a_larger_purse_that_would_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: five times the share, and no pause."""
    monkeypatch.setattr("sglang_dflash.budget.controller._PLAIN_PAUSE", 4)
    budget = controller()
    budget._plain_purse = LookPurse(Pacing(exploration=0.05))
    assert lost_to_plain_steps(budget) > 0.0105


def test_the_further_plain_decoding_is_behind_the_less_is_spent_on_timing_it() -> None:
    spent = []
    for chance in (0.5, 0.9):
        budget = controller(per_row=1e-5)
        run(budget, 1, chance, 500)
        taken = run(budget, 1, chance, 3000)
        lost = 10e-3 - (13e-3 / (chance ** np.arange(BLOCK)).sum())
        seconds = sum(10e-3 if kind == "plain" else 13e-3 for kind, _ in taken)
        spent.append(sum(kind == "plain" for kind, _ in taken) * lost / seconds)
    near, far = spent  # 1.5 and 4.4 times as fast
    assert 0 < far < 0.25 * near < 0.0025


def test_a_price_of_plain_decoding_that_is_too_high_heals() -> None:
    cost = CostModel(32, BLOCK)
    for point in sweep_points(32, BLOCK):  # something else ran while one request a row was swept
        delay = 1.6 if point.num_rows == point.num_requests else 1.0
        cost.observe(
            *point, 0.0, 3e-3 if point.part == "draft" else delay * (10 + 4 * point.num_rows) / 1e3
        )
    budget = BudgetController(cost, Limits(BLOCK))
    assert {kind for kind, _ in run(budget, 8, 0.4, 4)} == {"draft"}
    for _ in range(400):
        step = budget.start(8)
        rows = 8
        if step.drafts:
            rows = budget.plan(np.full((8, step.draft_width - 1), 0.4)).num_rows
        budget.cost.observe("target", 8, rows, 0.0, 10e-3 + 4e-3 * rows)
    assert np.mean([kind == "plain" for kind, _ in run(budget, 8, 0.4, 50)]) > 0.9


def test_rows_fall_as_requests_come() -> None:
    budget = controller()
    widths = [run(budget, n, 0.7, 60)[-1][1] / n for n in (1, 8, 32)]
    assert widths[0] > widths[1] > widths[2]


def test_a_fixed_block_always_drafts_and_never_looks() -> None:
    budget = controller(Limits(BLOCK, BLOCK, BLOCK), draft=1.0)
    assert set(run(budget, 4, 0.0, 300)) == {("draft", 4 * BLOCK)}


def test_a_lower_width_bars_plain_decoding() -> None:
    budget = controller(Limits(BLOCK, min_width=2), draft=1.0)
    assert {kind for kind, _ in run(budget, 4, 0.0, 300)} == {"draft"}
