# SPDX-License-Identifier: Apache-2.0
"""The cost model on timings of machines whose law is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.budget.cost import CostModel, sweep_points
from sglang_dflash.budget.monotone import isotonic_rows, isotonic_surface

BLOCK = 8
MAX_REQUESTS = 32
Law = Callable[[str, int, float], float]


def cpu_law(part: str, n: int, rows: float) -> float:
    """Every row costs."""
    if part == "draft":
        return 2e-3 + 0.3e-3 * n + 0.1e-3 * rows
    return 8e-3 + 0.4e-3 * n + 0.6e-3 * rows


def gpu_law(part: str, n: int, rows: float) -> float:
    """Memory-bound, then compute-bound."""
    if part == "draft":
        return 0.6e-3 + 2e-6 * rows
    return 1e-3 + max(3e-3, 20e-6 * rows)


def swept(law: Law) -> CostModel:
    cost = CostModel(MAX_REQUESTS, BLOCK)
    for point in sweep_points(MAX_REQUESTS, BLOCK):
        cost.observe(*point, 0.0, law(*point))
    return cost


def all_rows(n: int) -> np.ndarray:
    return np.arange(n, n * BLOCK + 1)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13, 24, 31, 32])
def test_a_sweep_of_a_linear_machine_is_reproduced_everywhere(n: int) -> None:
    cost = swept(cpu_law)
    for part, rows in (("target", all_rows(n)), ("draft", all_rows(n)[n:])):
        expected = [cpu_law(part, n, count) for count in rows]
        np.testing.assert_allclose(cost.curve(part, n, rows), expected, rtol=0.02)


def test_a_kinked_machine_is_followed_within_a_few_percent() -> None:
    cost = swept(gpu_law)
    for n in (1, 4, 16, 32):
        expected = np.array([gpu_law("target", n, rows) for rows in all_rows(n)])
        assert np.abs(cost.curve("target", n, all_rows(n)) / expected - 1).max() < 0.12


def test_more_requests_than_swept_are_extrapolated_upwards() -> None:
    cost = swept(cpu_law)
    times = [cost.seconds("target", n, n) for n in (32, 48, 64)]
    assert times[0] < times[1] < times[2]


def test_more_requests_than_swept_have_their_usual_contexts() -> None:
    cost = CostModel(8, BLOCK)
    for n in (1, 2, 4, 8) * 3:
        for context in (100 * n, 300 * n):
            cost.observe("target", n, n, context, 1e-3 + 1e-4 * n + 1e-6 * context)
    for n in (8, 16, 32):
        usual = cost.seconds("target", n, n)
        assert usual == pytest.approx(cost.seconds("target", n, n, 200 * n), rel=0.02)


def test_samples_in_flight_replace_the_sweep() -> None:
    rng = np.random.default_rng(0)
    cost = swept(cpu_law)
    for _ in range(300):
        n = int(rng.integers(20, 33))
        rows = int(rng.integers(n, n * BLOCK + 1))
        seconds = 1.5 * cpu_law("target", n, rows) * np.exp(rng.normal(0, 0.05))
        cost.observe("target", n, rows, 0.0, float(seconds))
    for rows in (40, 100, 200):
        expected = 1.5 * cpu_law("target", 28, rows)
        assert cost.seconds("target", 28, rows) == pytest.approx(expected, rel=0.06)


def test_delayed_steps_hardly_move_it() -> None:
    rng = np.random.default_rng(1)
    cost = swept(cpu_law)
    for _ in range(400):
        delay = 6.0 if rng.random() < 0.1 else 1.0
        seconds = cpu_law("target", 16, 64) * np.exp(rng.normal(0, 0.02)) * delay
        cost.observe("target", 16, 64, 0.0, float(seconds))
    # Their plain mean would be 1.5 times as long.
    assert cost.seconds("target", 16, 64) == pytest.approx(cpu_law("target", 16, 64), rel=0.04)


@pytest.mark.parametrize(("n", "width"), [(16, 4), (20, 5)])
def test_a_pause_of_the_whole_machine_moves_no_price(n: int, width: int) -> None:
    """Seen at a node of the surface, and in the middle of four."""
    cost, rows = swept(cpu_law), n * width
    for _ in range(100):
        cost.observe("target", n, rows, 0.0, cpu_law("target", n, rows))
    cost.observe("target", n, rows, 0.0, 1000 * cpu_law("target", n, rows))
    for each in (n, rows, n * BLOCK):
        expected = cpu_law("target", n, each)
        assert cost.seconds("target", n, each) == pytest.approx(expected, rel=0.15)


def test_a_lasting_change_gets_through() -> None:
    cost = swept(cpu_law)
    for _ in range(100):
        cost.observe("target", 8, 8, 0.0, cpu_law("target", 8, 8))
    for _ in range(150):
        cost.observe("target", 8, 8, 0.0, 3 * cpu_law("target", 8, 8))
    # Larger steps, measured once long ago, hold it back a little: time does not fall with rows.
    assert cost.seconds("target", 8, 8) == pytest.approx(3 * cpu_law("target", 8, 8), rel=0.1)


def test_a_delayed_first_sample_heals() -> None:
    cost = CostModel(MAX_REQUESTS, BLOCK)
    cost.observe("target", 4, 4, 0.0, 10 * cpu_law("target", 4, 4))
    for _ in range(16):
        cost.observe("target", 4, 4, 0.0, cpu_law("target", 4, 4))
    assert cost.seconds("target", 4, 4) == pytest.approx(cpu_law("target", 4, 4), rel=0.1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 60))
def test_time_never_falls_with_rows_or_requests(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    cost = CostModel(MAX_REQUESTS, BLOCK)
    for _ in range(count):
        n = int(rng.integers(1, MAX_REQUESTS + 1))
        cost.observe("target", n, n * int(rng.integers(1, BLOCK + 1)), 0.0, float(rng.random()))
    curves = [cost.curve("target", n, np.arange(1, BLOCK + 1) * n) for n in range(1, 40)]
    assert (np.diff(curves, axis=0) >= -1e-12).all()
    for n in (1, 7, 32):
        assert (np.diff(cost.curve("target", n, all_rows(n), 500.0)) >= -1e-12).all()


def test_longer_contexts_cost_more_where_they_do() -> None:
    rng = np.random.default_rng(2)
    cost = swept(cpu_law)
    per_token = 2e-6
    for _ in range(600):
        tokens = float(rng.integers(0, 8000))
        seconds = cpu_law("target", 8, 8) + per_token * tokens
        cost.observe("target", 8, 8, tokens, seconds * float(np.exp(rng.normal(0, 0.02))))
    for tokens in (1000.0, 7000.0):
        expected = cpu_law("target", 8, 8) + per_token * tokens
        assert cost.seconds("target", 8, 8, tokens) == pytest.approx(expected, rel=0.1)


def context_law(part: str, n: int, rows: float, context_tokens: float) -> float:
    """A CPU on which a token of context costs a hundredth of a row."""
    return cpu_law(part, n, rows) + 6e-6 * context_tokens


@pytest.mark.parametrize("prompts", [(1200,), (1200, 100), (1200, 100, 1200)])
def test_prices_follow_prompts_that_grow_and_shrink(prompts: tuple[int, ...]) -> None:
    """Those of steps that were not taken, too: other widths, and other numbers of requests."""
    rng = np.random.default_rng(3)
    cost = CostModel(MAX_REQUESTS, BLOCK)
    for point in sweep_points(MAX_REQUESTS, BLOCK):
        tokens = 64.0 * point.num_requests
        cost.observe(*point, tokens, context_law(*point, tokens))
    for prompt in prompts:
        for step in range(160):
            rows, tokens = 8 if step % 16 == 15 else 24, 8 * (prompt + 64 * rng.random())
            noise = float(np.exp(rng.normal(0, 0.02)))
            cost.observe("target", 8, rows, tokens, noise * context_law("target", 8, rows, tokens))
    for n in (4, 6, 8, 16):
        rows, tokens = n * np.arange(1, BLOCK + 1), n * (prompts[-1] + 32.0)
        found = cost.curve("target", n, rows, tokens)
        expected = [context_law("target", n, count, tokens) for count in rows]
        np.testing.assert_allclose(found, expected, rtol=0.12)


def test_a_step_that_context_costs_less_than_others_is_not_priced_by_their_slope() -> None:
    """Many rows read a context more dearly than one: their slope says too much of plain steps."""
    cost = swept(cpu_law)
    plain, tokens = 1.05 * cpu_law("target", 8, 8), 8 * 8000.0
    for step in range(320):
        long = tokens * (step % 7 + 1) / 7
        cost.observe("target", 8, 64, long, cpu_law("target", 8, 64) + 4e-6 * long)
        if step % 8 == 0:
            cost.observe("target", 8, 8, tokens, plain)
    assert cost.seconds("target", 8, 8, tokens) == pytest.approx(plain, rel=0.5)


def test_says_how_many_samples_back_an_estimate() -> None:
    cost = CostModel(MAX_REQUESTS, BLOCK)
    assert cost.samples("target", 8, 16) == 0
    for _ in range(3):
        cost.observe("target", 8, 16, 0.0, 0.01)
    assert cost.samples("target", 8, 16) == 3
    assert cost.samples("target", 8, 64) == 0
    assert not cost.knows("draft")


def test_impossible_times_are_ignored() -> None:
    cost = CostModel(MAX_REQUESTS, BLOCK)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        cost.observe("target", 1, 1, 0.0, seconds)
    assert not cost.knows("target")
    with pytest.raises(ValueError, match="no target pass was measured"):
        cost.seconds("target", 1, 1)


@pytest.mark.parametrize(("max_requests", "block_size"), [(1, 2), (5, 3), (32, 8), (48, 16)])
def test_the_sweep_reaches_the_corners(max_requests: int, block_size: int) -> None:
    points = sweep_points(max_requests, block_size)
    assert len(points) == len(set(points))
    assert ("target", 1, 1) in points
    assert ("draft", 1, 2) in points
    for part in ("draft", "target"):
        assert (part, max_requests, max_requests * block_size) in points
    assert all(n <= rows <= n * block_size for _, n, rows in points)


@pytest.mark.parametrize("measured", [30, 40, 56, 66])
def test_a_sweep_cut_short_prices_the_largest_step_right(measured: int) -> None:
    """Rows get cheaper by the dozen; a line through the smaller steps is half as much again."""

    def law(part: str, n: int, rows: int) -> float:
        if part == "draft":
            return 0.004 + 0.00012 * rows
        return 0.03 + 0.0008 * n + 0.0009 * min(rows, 96) + 0.0003 * max(0, rows - 96)

    cost = CostModel(32, 8)
    points = sweep_points(32, 8)
    assert len(points) == 66
    for point in points[:measured]:
        cost.observe(*point, 0.0, law(*point))
    for part, n, rows in points:
        assert cost.seconds(part, n, rows) == pytest.approx(law(part, n, rows), rel=0.12)


def test_one_request_and_the_smallest_block_work() -> None:
    cost = CostModel(1, 2)
    for point in sweep_points(1, 2):
        cost.observe(*point, 0.0, cpu_law(*point))
    assert cost.seconds("target", 1, 2) == pytest.approx(cpu_law("target", 1, 2))


def test_isotonic_rows_equal_pooling_by_hand() -> None:
    values = np.array([[1.0, 3.0, 2.0, 4.0], [4.0, 1.0, 1.0, 6.0]])
    weights = np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0]])
    expected = [[1.0, 2.5, 2.5, 4.0], [1.75, 1.75, 1.75, 6.0]]
    np.testing.assert_allclose(isotonic_rows(values, weights), expected)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_isotonic_surface_is_monotone_and_keeps_what_is_monotone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((6, 5)) + 0.01
    surface = isotonic_surface(rng.random((6, 5)), weights)
    assert (np.diff(surface, axis=0) >= 0).all()
    assert (np.diff(surface, axis=1) >= 0).all()
    np.testing.assert_allclose(isotonic_surface(surface, weights), surface, atol=1e-12)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_doubt_is_the_error_of_a_difference_of_two_means(noise: float) -> None:
    rng = np.random.default_rng(0)
    cost = CostModel(1, 8, window=32)
    for _ in range(2000):
        cost.observe("target", 1, 1, 100, float(np.exp(rng.normal(0, noise))))
    assert cost.doubt == pytest.approx(noise * (2 / 32) ** 0.5, rel=0.6, abs=1e-3)
