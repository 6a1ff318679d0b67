# SPDX-License-Identifier: Apache-2.0
"""The budget of a device that works behind the host."""

from __future__ import annotations

from collections import deque
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
    DecodeCudaGraphRunner as Graphs,
)

from sglang_dflash.budget import planner
from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.cost import CostModel, sweep_points
from sglang_dflash.budget.late import Host, LateWidths, most_likely_rows
from sglang_dflash.budget.late_controller import LateController
from sglang_dflash.budget.planner import Limits
from sglang_dflash.budget.policy import Lessons, StepFacts
from sglang_dflash.verify.buckets import NO_BUCKETS, RowBuckets
from sglang_dflash.verify.forward import _ragged_layout
from sglang_dflash.verify.rows import Rows

BLOCK_SIZE, REQUESTS = 4, 8


class LaggingClock:
    """A device that is some marks behind the host; its work takes what `advance` says."""

    def __init__(self, lag: int) -> None:
        self._lag, self._marks, self.now = lag, 0, 0.0
        self.asked_too_early = False

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> tuple[int, float]:
        self._marks += 1
        return self._marks, self.now

    def passed(self, mark: tuple[int, float]) -> bool:
        return self._marks - mark[0] >= self._lag

    def wait(self, mark: tuple[int, float]) -> None:
        raise AssertionError("the host waited")

    def seconds(self, first: tuple[int, float], last: tuple[int, float]) -> float:
        self.asked_too_early |= not (self.passed(first) and self.passed(last))
        return last[1] - first[1]


def late(
    row_seconds: float,
    *,
    lag: int = 7,
    buckets: RowBuckets = NO_BUCKETS,
    counted: list[Any] | None = None,
    **limits: int,
) -> tuple[LateWidths, LaggingClock]:
    """A budget that was measured: 10 ms a step, 1 ms for a draft, and so much for each row."""
    cost = CostModel(REQUESTS, BLOCK_SIZE)
    for part, n, rows in sweep_points(REQUESTS, BLOCK_SIZE):
        cost.observe(part, n, rows, 64 * n, seconds_of(part, buckets.padded(n, rows), row_seconds))
    clock = LaggingClock(lag)
    host = Host(clock, lambda values: values, lambda numbers: numbers, lambda values: values)
    controller = LateController(cost, Limits(BLOCK_SIZE, **limits), buckets)
    count = None if counted is None else lambda *step: counted.append(step)
    return LateWidths(controller, Calibrator(BLOCK_SIZE), host, count), clock


def seconds_of(part: str, rows: int, row_seconds: float) -> float:
    return 0.001 if part == "draft" else 0.01 + row_seconds * rows


def run(
    policy: LateWidths,
    clock: LaggingClock,
    steps: int,
    acceptance: float,
    *,
    row_seconds: float = 0.0,
    n: int = REQUESTS,
) -> list[Rows]:
    """Serve steps in which each proposal is as good as `acceptance`; return their rows."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.full((n, BLOCK_SIZE - 1), 0.5)
    sampled = torch.zeros(n, dtype=torch.bool)
    history = []
    for step in range(steps):
        width = policy.draft_width(StepFacts(n, 64 * n, step, after_idle=False))
        if width > 1:
            policy.draft_begins()
            clock.advance(0.001)
        chosen = policy.widths(confidence[:, : width - 1] if width > 1 else None, sampled)
        rows = chosen if isinstance(chosen, Rows) else Rows.of(chosen, BLOCK_SIZE, "cpu")
        clock.advance(seconds_of("target", len(rows), row_seconds))
        kept = torch.rand(confidence.shape, generator=generator) < acceptance
        policy.settle(rows, kept.long().cumprod(1).sum(1).minimum(rows.widths - 1))
        history.append(rows)
    return history


@given(st.integers(1, 6), st.integers(2, 8), st.integers(1, 3), st.floats(0, 1), st.randoms())
def test_the_device_chooses_what_the_planner_would(
    n: int, block_size: int, least: int, share: float, random: Any
) -> None:
    limits = Limits(block_size, min(least, block_size))
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    # Few values: ties are frequent, and broken in the same way.
    chances = torch.randint(1, 5, (n, block_size - 1), generator=generator) / 4
    num_rows = n * limits.min_width + round(share * n * (block_size - limits.min_width))
    found = most_likely_rows(chances, num_rows, limits)
    expected = planner.most_likely_widths(chances.double().numpy(), num_rows, limits)
    assert found.tolist() == expected.tolist()
    assert found.sum() == num_rows


@pytest.mark.parametrize("lag", [1, 7, 20])
def test_a_good_draft_is_used_and_a_bad_one_left_however_late_the_host_hears(lag: int) -> None:
    policy, clock = late(row_seconds=0.0, lag=lag)
    history = run(policy, clock, 80, acceptance=0.9)
    assert sum(rows.are_whole_blocks for rows in history) > 50
    policy, clock = late(row_seconds=0.004, lag=lag)
    history = run(policy, clock, 300, acceptance=0.02, row_seconds=0.004)
    drafted = sum(len(rows) > REQUESTS for rows in history[150:])
    assert 0 < drafted < 20, "it is tried again now and then"
    assert not clock.asked_too_early


@pytest.mark.parametrize("n", [1, 2])
def test_a_draft_that_becomes_bad_is_soon_left(n: int) -> None:
    """Its confidence is what it was, and few requests teach the calibrator slowly."""
    policy, clock = late(row_seconds=0.002)
    good = run(policy, clock, 300, acceptance=0.9, row_seconds=0.002, n=n)
    assert sum(len(rows) > n for rows in good[-50:]) > 40
    run(policy, clock, 150, acceptance=0.02, row_seconds=0.002, n=n)
    bad = run(policy, clock, 50, acceptance=0.02, row_seconds=0.002, n=n)
    assert sum(len(rows) > n for rows in bad) < 10


def test_every_step_is_heard_of_once_and_in_order() -> None:
    counted: list[Any] = []
    policy, clock = late(row_seconds=0.001, counted=counted)
    history = run(policy, clock, 50, acceptance=0.5, row_seconds=0.001)
    assert 40 < len(counted) < 50, "the last few are not over yet"
    for rows, (widths, *_) in zip(history, counted, strict=False):
        assert torch.equal(rows.widths, widths)


def test_prices_follow_the_device_and_not_the_host() -> None:
    policy, clock = late(row_seconds=0.001)
    run(policy, clock, 400, acceptance=0.9, row_seconds=0.005)
    cost = policy.controller.cost
    seen = cost.seconds("target", REQUESTS, REQUESTS) - 0.01
    assert seen == pytest.approx(0.005 * REQUESTS, rel=0.15)
    assert cost.seconds("draft", REQUESTS, REQUESTS * BLOCK_SIZE) == pytest.approx(0.001, rel=0.05)


def test_a_step_that_another_one_follows_late_is_not_timed() -> None:
    policy, clock = late(row_seconds=0.001, lag=0)
    cost = policy.controller.cost
    sampled = torch.zeros(REQUESTS, dtype=torch.bool)
    seen: list[str] = []
    cost.observe = lambda part, *_: seen.append(part)  # type: ignore[method-assign]
    for iteration in (1, 2, 5):  # a prefill came between the last two
        width = policy.draft_width(StepFacts(REQUESTS, 512, iteration, after_idle=False))
        policy.draft_begins()
        rows = policy.widths(torch.full((REQUESTS, width - 1), 0.5), sampled)
        clock.advance(0.02)
        policy.settle(rows, torch.zeros(REQUESTS, dtype=torch.int64))
    policy.draft_width(StepFacts(REQUESTS, 512, 6, after_idle=False))
    assert seen == ["draft", "target", "draft", "draft", "target"]


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
def test_a_step_fills_its_graph(acceptance: float) -> None:
    buckets = RowBuckets((4, 8, 16, 24, 48), 16)
    policy, clock = late(row_seconds=0.0005, buckets=buckets)
    history = run(policy, clock, 150, acceptance, row_seconds=0.0005)
    sizes = {len(rows) for rows in history}
    assert sizes <= {8, 16, 24, 32}, "a graph's size, or all there are"
    assert len(sizes) > 1


def test_the_bounds_hold() -> None:
    policy, clock = late(row_seconds=0.0, max_width=2)
    rows = run(policy, clock, 60, acceptance=0.9)
    assert max(int(each.widths.max()) for each in rows) == 2
    policy, clock = late(row_seconds=0.01, min_width=3)
    rows = run(policy, clock, 60, acceptance=0.02, row_seconds=0.01)
    assert min(int(each.widths.min()) for each in rows) == 3


def test_ranks_take_the_numbers_of_the_first() -> None:
    policy, _ = late(row_seconds=0.0)
    policy._host = policy._host._replace(agree=lambda numbers: [3, 2 * REQUESTS])
    policy.draft_width(StepFacts(REQUESTS, 512, 1, after_idle=False))
    policy.draft_begins()
    confidence = torch.full((REQUESTS, 2), 0.5)
    rows = policy.widths(confidence, torch.zeros(REQUESTS, dtype=torch.bool))
    assert len(rows) == 2 * REQUESTS


def test_device_rows_are_those_of_the_same_widths_on_the_host() -> None:
    widths = [3, 1, 4, 2]
    known = Rows.of(widths, BLOCK_SIZE, "cpu")
    found = Rows.chosen_on_device(torch.tensor(widths), sum(widths), BLOCK_SIZE)
    for name in ("starts", "request", "offset", "columns", "widths_cpu"):
        one, other = getattr(known, name), getattr(found, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert (known.widest, found.widest) == (4, BLOCK_SIZE)
    whole = Rows.chosen_on_device(torch.tensor([4, 4]), 8, BLOCK_SIZE)
    assert whole.are_whole_blocks
    assert whole.columns is None


@given(st.lists(st.integers(1, 60), unique=True), st.integers(1, 10), st.integers(1, 8))
def test_a_step_is_filled_up_to_its_graph(counts: list[int], n: int, width: int) -> None:
    buckets = RowBuckets(tuple(sorted(counts)), 8)
    limits = Limits(9, 1)
    controller = LateController(CostModel(10, 9), limits, buckets)
    rows = np.arange(n, n * width + 1)
    allowed = controller._numbers_of_rows(n, rows)
    for place, number in enumerate(rows.tolist()):
        larger = [count for count in sorted(counts) if count >= number and n <= 8]
        filled = buckets.filled(n, number, n * width)
        assert filled == min(larger[0] if larger else number, n * width)
        assert allowed is None or bool(allowed[place]) == (filled == number)


@given(st.integers(2, 16), st.integers(1, 48), st.integers(1, 60), st.data())
def test_sglang_runs_the_graph_that_was_meant_or_none(
    block_size: int, most: int, n: int, data: Any
) -> None:
    """SGLang's own choice of a graph, for the layouts of all kinds of steps."""
    captured = sorted({*range(1, most + 1, data.draw(st.integers(1, 8))), most})
    buckets = RowBuckets(tuple(bs * block_size for bs in captured), most)
    runner = SimpleNamespace(
        capture_num_tokens=list(buckets.counts),
        max_bs=most,
        attn_backend=SimpleNamespace(supports_ragged_verify_graph=True),
        require_mlp_sync=False,
        is_encoder_decoder=False,
        captured_req_width=block_size,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    runner._ragged_capture_slots = MethodType(Graphs._ragged_capture_slots, runner)
    num_rows = data.draw(st.integers(n, n * block_size))
    size = buckets.padded(n, num_rows)
    named = buckets.layout_size(size)
    forward = SimpleNamespace(batch_size=n, capture_hidden_mode=CaptureHiddenMode.FULL)
    runs = Graphs._can_run_ragged_verify_graph(
        runner, forward, SimpleNamespace(graph_num_tokens=named)
    )
    if runs:
        assert Graphs._ragged_graph_num_tokens(runner, named) == named == size
        assert n < most or size == num_rows, "a full graph has no empty request for empty rows"
    else:
        assert size == num_rows


def test_a_graph_without_empty_requests_is_filled_or_not_used() -> None:
    buckets = RowBuckets((8, 16), most_requests=6)
    assert [buckets.padded(5, rows) for rows in (5, 8, 9, 16, 17)] == [8, 8, 16, 16, 17]
    assert [buckets.padded(6, rows) for rows in (6, 8, 9, 16, 17)] == [6, 8, 9, 16, 17]
    assert [buckets.padded(7, rows) for rows in (7, 8, 9)] == [7, 8, 9], "no room for seven"
    assert buckets.filled(6, 9, most=24) == 16


@given(st.integers(2, 16), st.integers(1, 200), st.integers(1, 8), st.data())
def test_a_plain_step_has_a_graph_where_its_requests_fit_one(
    block_size: int, most: int, apart: int, data: Any
) -> None:
    captured = sorted({*range(1, most + 1, apart), most})
    buckets = RowBuckets(tuple(bs * block_size for bs in captured), most)
    widest = data.draw(st.integers(1, block_size))
    limits = Limits(block_size, max_width=widest)
    controller = LateController(CostModel(most, block_size), limits, buckets)
    n = data.draw(st.sampled_from([most, data.draw(st.integers(1, most))]))
    widths = controller.plain_widths(n)
    assert len(widths) == n
    assert set(widths) <= set(range(1, widest + 1))
    assert widths == [1] * n or n == most
    size = buckets.padded(n, sum(widths))
    has_graph = buckets.layout_size(size) == size in buckets.counts
    smallest = next(count for count in buckets.counts if count >= n)
    assert has_graph or (n == most and smallest > n * widest)


def test_whole_blocks_beyond_the_graphs_are_not_described() -> None:
    """SGLang would plan an eager forward of described rows with a look at the device."""
    buckets = RowBuckets((8, 16), most_requests=4)
    for n, described in ((4, True), (5, False)):
        rows = Rows.of([4] * n, 4, "cpu")
        assert (_ragged_layout(rows, 4 * n, buckets) is not None) == described
    assert _ragged_layout(Rows.of([4, 3, 4, 4, 4], 4, "cpu"), 19, buckets) is not None


def test_what_is_learnt_waits_for_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrator = Calibrator(BLOCK_SIZE)
    learnt: list[int] = []
    monkeypatch.setattr(calibrator, "update", lambda probs, *_: learnt.append(len(probs)))
    lessons = Lessons(calibrator, min_steps=3)
    rows = Rows.of([2] * 20, BLOCK_SIZE, "cpu")
    step = torch.full((20, BLOCK_SIZE - 1), 0.5), torch.zeros(20).bool(), rows, torch.ones(20)
    for _ in range(7):
        lessons.add(*step)
    assert learnt == [60, 60]


def test_a_bounded_width_leaves_the_draft_whole() -> None:
    policy, _ = late(row_seconds=0.0, max_width=2)
    assert policy.draft_width(StepFacts(REQUESTS, 512, 1, after_idle=False)) == BLOCK_SIZE
    policy.draft_begins()
    confidence = torch.full((REQUESTS, BLOCK_SIZE - 1), 0.9)
    rows = policy.widths(confidence, torch.zeros(REQUESTS, dtype=torch.bool))
    assert int(rows.widths.max()) == 2


def test_the_queue_of_unheard_steps_stays_short() -> None:
    policy, clock = late(row_seconds=0.001, lag=7)
    run(policy, clock, 200, acceptance=0.5)
    assert isinstance(policy._unheard, deque)
    assert len(policy._unheard) < 8
