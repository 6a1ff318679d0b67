# SPDX-License-Identifier: Apache-2.0
"""The planner against brute force, and the properties that a plan must have."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.budget.gains import GainCurve
from sglang_dflash.budget.planner import (
    Limits,
    Plan,
    StepSeconds,
    plan_widths,
    widen,
)

many = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def case(seed: int, n: int, block_size: int) -> tuple[np.ndarray, StepSeconds]:
    """Return chances [n, B-1] and a random non-decreasing cost, stairs included."""
    rng = np.random.default_rng(seed)
    steps = rng.random(n * block_size + 1) * (rng.random(n * block_size + 1) < 0.6)
    times = 0.5 + 4 * rng.random() + rng.random() * steps.cumsum()
    return rng.random((n, block_size - 1)) ** rng.random(), lambda rows: times[rows]


def tokens_of(chances: np.ndarray, widths: np.ndarray) -> float:
    """Count expected tokens with plain loops."""
    total = 0.0
    for row, width in zip(chances, widths, strict=True):
        alive = 1.0
        total += 1
        for chance in row[: width - 1]:
            alive *= chance
            total += alive
    return total


def rate_of(chances: np.ndarray, widths: np.ndarray, seconds: StepSeconds) -> float:
    return tokens_of(chances, widths) / float(seconds(np.array([sum(widths)]))[0])


@many
@given(seed=seeds, n=st.integers(1, 3), block_size=st.integers(2, 4), least=st.integers(1, 2))
def test_equals_brute_force(seed: int, n: int, block_size: int, least: int) -> None:
    chances, seconds = case(seed, n, block_size)
    plan = plan_widths(chances, seconds, Limits(block_size, min_width=least))
    every = product(range(least, block_size + 1), repeat=n)
    best = max(rate_of(chances, np.array(widths), seconds) for widths in every)
    rate = plan.expected_tokens / plan.expected_seconds
    assert rate == pytest.approx(best)
    assert rate_of(chances, plan.widths, seconds) == pytest.approx(best)


@many
@given(seed=seeds, n=st.integers(1, 3), rate=st.floats(0.0, 3.0))
def test_at_a_long_run_rate_it_equals_brute_force(seed: int, n: int, rate: float) -> None:
    chances, seconds = case(seed, n, 4)
    plan = plan_widths(chances, seconds, Limits(4), rate)
    values = [
        tokens_of(chances, np.array(widths)) - rate * seconds(np.array([sum(widths)]))[0]
        for widths in product(range(1, 5), repeat=n)
    ]
    assert plan.expected_tokens - rate * plan.expected_seconds == pytest.approx(max(values))


@many
@given(seed=seeds, n=st.integers(1, 3), margin=st.floats(0, 0.5), rate=st.floats(0.1, 20))
def test_all_rows_are_verified_unless_fewer_are_ahead(
    seed: int, n: int, margin: float, rate: float
) -> None:
    chances, seconds = case(seed, n, 4)
    best = plan_widths(chances, seconds, Limits(4), rate)
    whole = plan_widths(chances, seconds, Limits(4, min_width=4), rate)
    values = [plan.expected_tokens - rate * plan.expected_seconds for plan in (best, whole)]
    near = values[0] - values[1] < margin * best.expected_tokens
    plan = plan_widths(chances, seconds, Limits(4), rate, margin)
    assert plan.widths.tolist() == (whole if near else best).widths.tolist()


@many
@given(seed=seeds, n=st.integers(1, 40), block_size=st.integers(2, 16))
def test_is_never_worse_than_one_width_for_all(seed: int, n: int, block_size: int) -> None:
    chances, seconds = case(seed, n, block_size)
    plan = plan_widths(chances, seconds, Limits(block_size))
    rate = plan.expected_tokens / plan.expected_seconds
    for width in range(1, block_size + 1):
        uniform = np.full(n, width)
        assert rate >= rate_of(chances, uniform, seconds) * (1 - 1e-12)
    assert plan.expected_tokens == pytest.approx(tokens_of(chances, plan.widths))
    assert plan.expected_seconds == seconds(np.array([plan.num_rows]))[0]


@many
@given(seed=seeds, n=st.integers(1, 20), dearer=st.floats(0.0, 5.0))
def test_dearer_rows_never_widen_a_plan(seed: int, n: int, dearer: float) -> None:
    """On any cost: tokens grow less than in proportion to the rows that are added to."""
    chances, cheap = case(seed, n, 8)

    def dear(rows: np.ndarray) -> np.ndarray:
        return cheap(rows) + dearer * (rows - n)

    for rate in (None, 0.5):
        before = plan_widths(chances, cheap, Limits(8), rate)
        after = plan_widths(chances, dear, Limits(8), rate)
        assert after.num_rows <= before.num_rows


@many
@given(seed=seeds, n=st.integers(2, 20))
def test_follows_a_permutation_of_requests(seed: int, n: int) -> None:
    chances, seconds = case(seed, n, 6)
    order = np.random.default_rng(seed).permutation(n)
    plan = plan_widths(chances, seconds, Limits(6))
    permuted = plan_widths(chances[order], seconds, Limits(6))
    assert permuted.widths.tolist() == plan.widths[order].tolist()


@many
@given(seed=seeds, n=st.integers(1, 20), bounds=st.tuples(st.integers(1, 8), st.integers(1, 8)))
def test_keeps_its_limits(seed: int, n: int, bounds: tuple[int, int]) -> None:
    chances, seconds = case(seed, n, 8)
    limits = Limits(8, min_width=min(bounds), max_width=max(bounds))
    plan = plan_widths(chances, seconds, limits)
    for widths in (plan.widths, widen(plan.widths, limits)):
        assert widths.min() >= limits.min_width
        assert widths.max() <= limits.widest
    assert (widen(plan.widths, limits) >= plan.widths).all()


def test_equal_lower_and_upper_width_is_a_fixed_block() -> None:
    chances, seconds = case(0, 5, 8)
    assert plan_widths(chances, seconds, Limits(8, 8, 8)).widths.tolist() == [8] * 5
    assert plan_widths(chances, seconds, Limits(8, 4, 4)).widths.tolist() == [4] * 5


@pytest.mark.parametrize("bounds", [(0, 4), (5, 4), (1, 9), (9, None)])
def test_impossible_limits_are_refused(bounds: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match="verify widths"):
        Limits(8, *bounds)


def test_equal_requests_share_rows_evenly() -> None:
    def seconds(rows: np.ndarray) -> np.ndarray:
        return np.where(rows <= 12, 1.0, 100.0)

    plan = plan_widths(np.ones((4, 7)), seconds, Limits(8))
    assert plan.widths.tolist() == [3, 3, 3, 3]


def test_rows_without_a_chance_are_not_verified_even_where_they_are_free() -> None:
    plan = plan_widths(np.zeros((3, 7)), lambda rows: np.ones(len(rows)), Limits(8))
    assert plan.widths.tolist() == [1, 1, 1]


def test_free_rows_are_all_verified() -> None:
    plan = plan_widths(np.full((3, 7), 0.5), lambda rows: np.ones(len(rows)), Limits(8))
    assert plan.widths.tolist() == [8, 8, 8]


def test_a_long_run_rate_beats_each_step_for_itself() -> None:
    """Steps are good or bad by turns; the renewal argument of `plan_widths`, in numbers."""
    steps = [np.full((1, 7), 0.95), np.full((1, 7), 0.3)]

    def seconds(rows: np.ndarray) -> np.ndarray:
        return 5.0 + 1.0 * rows

    def long_run(plans: list[Plan]) -> float:
        return sum(p.expected_tokens for p in plans) / sum(p.expected_seconds for p in plans)

    alone = long_run([plan_widths(chances, seconds, Limits(8)) for chances in steps])
    rate = alone
    for _ in range(5):  # Dinkelbach's iteration
        rate = long_run([plan_widths(chances, seconds, Limits(8), rate) for chances in steps])
    assert rate > 1.005 * alone


@many
@given(seed=seeds, n=st.integers(1, 20))
def test_the_gain_curve_is_the_best_plan_of_every_size(seed: int, n: int) -> None:
    chances, _ = case(seed, n, 8)
    curve = GainCurve(8, window=1e-9)  # the last step only
    curve.update(chances)
    # A row's survival is at most that of the row before: the best rows of any number are a plan.
    survival = np.sort(np.cumprod(chances, axis=1), axis=None)[::-1]
    for width in range(1, 9):
        expected = n + survival[: n * (width - 1)].sum()
        assert curve.tokens(n, np.array([n * width]))[0] == pytest.approx(expected)


def test_the_gain_curve_forgets() -> None:
    curve = GainCurve(8)
    rows = np.array([8])
    for chance in (0.0, 0.9):
        for _ in range(400):
            curve.update(np.full((1, 7), chance))
        expected = 1 + sum(chance**i for i in range(1, 8))
        assert curve.tokens(1, rows)[0] == pytest.approx(expected, rel=0.01)
