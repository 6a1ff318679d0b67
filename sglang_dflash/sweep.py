# SPDX-License-Identifier: Apache-2.0
"""Who decides the verify width, and how long steps take here: a few of each size at start-up."""

from __future__ import annotations

import logging
import statistics
import time
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_observability
from sglang.srt.utils.common import async_d2h

from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.clock import clock_of
from sglang_dflash.budget.controller import BudgetController, draft_widths
from sglang_dflash.budget.cost import CostModel, SweepPoint, sweep_points
from sglang_dflash.budget.late import Host, LateWidths
from sglang_dflash.budget.late_controller import LateController
from sglang_dflash.budget.planner import Limits
from sglang_dflash.budget.policy import FixedWidth, FollowedWidths, MeasuredWidths, WidthPolicy
from sglang_dflash.draft.block import Block
from sglang_dflash.draft.forward import DraftForward, VerifyRows, verify_batch
from sglang_dflash.metrics import CountedWidths, StepCounters
from sglang_dflash.options import Options
from sglang_dflash.trace import TracedWidths
from sglang_dflash.verify.first_rank import FirstRank
from sglang_dflash.verify.forward import verify_input_of
from sglang_dflash.verify.graphs import host_waits, row_buckets, takes_ragged_graphs
from sglang_dflash.verify.rows import Rows

__all__ = ["measure_steps", "width_policy"]

logger = logging.getLogger(__name__)

_CONTEXT = 64  # tokens of each request; what comes in shifts the estimate
_REPEATS = 3
_MAX_REQUESTS = 32  # beyond, times are those of the fitted surface until steps are seen
_NO_TRACE = "nothing is written; unset it, or trace on a CPU"
_SECONDS = 20.0  # how long the sweep may take; points between others are then left out


def width_policy(
    options: Options,
    runner: ModelRunner,
    draft: DraftForward,
    first_rank: FirstRank,
    *,
    block_size: int,
    max_requests: int,
) -> WidthPolicy:
    """Return who decides how many rows of each block are verified.

    Args:
        options: what the user asks for.
        runner: the target's.
        draft: the draft.
        first_rank: whose clock decides for all.
        block_size: B.
        max_requests: most requests that run together.
    """
    if options.budget == "fixed":
        return FixedWidth(block_size)
    limits = Limits(block_size, options.min_width, options.max_width)
    late = not host_waits(runner)
    if (reason := _against_widths(options, runner)) is not None:
        _tell_whole_blocks(reason, options, limits)
        return FixedWidth(block_size)
    widths = (limits.widest,) if late else draft_widths(limits)  # the draft has one graph a batch
    sizes = _Sizes(block_size, limits.widest, min(max_requests, _MAX_REQUESTS), widths)
    cost = CostModel(max_requests, block_size)
    measure_steps(cost, runner, draft, sizes, first_rank)
    calibrator = Calibrator(block_size, device=runner.device)
    counted = first_rank.is_this and get_observability().enable_metrics
    if late:
        if options.trace is not None:
            logger.warning(f"SGLANG_DFLASH_TRACE: {_NO_TRACE}, as its host does not wait for steps")
        host = Host(clock_of(runner.device), async_d2h, first_rank.numbers, first_rank.tensor)
        controller = LateController(cost, limits, row_buckets(runner), options.pacing)
        return LateWidths(controller, calibrator, host, StepCounters().count if counted else None)
    if not first_rank.is_this:
        return FollowedWidths()
    parts = (BudgetController(cost, limits, options.pacing, widths), calibrator)
    policy = CountedWidths(*parts) if counted else MeasuredWidths(*parts)
    if options.trace is not None:
        return TracedWidths(policy, options.trace, block_size)
    return policy


def _against_widths(options: Options, runner: ModelRunner) -> str | None:
    """Return why steps cannot have unequal widths here, or None."""
    if runner.model_config.model_is_mrope:
        # SGLang works out their positions for requests of equal widths.
        return "the target has rotary positions of several axes"
    if host_waits(runner) or takes_ragged_graphs(runner):
        return None
    if options.budget == "auto":
        return "the budget was measured on CPUs alone; SGLANG_DFLASH_BUDGET=measured tries it"
    return "no verify graphs of unequal widths were captured"


def _tell_whole_blocks(reason: str, options: Options, limits: Limits) -> None:
    """Say that the budget is off, and what is without effect therefore."""
    logger.info("DFLASH verifies whole blocks: %s", reason)
    if options.trace is not None:
        logger.warning(f"SGLANG_DFLASH_TRACE: {_NO_TRACE}, as no width is chosen")
    if (limits.min_width, limits.widest) != (1, limits.block_size):
        logger.warning("SGLANG_DFLASH_MIN_WIDTH and MAX_WIDTH have no effect here")


class _Sizes(NamedTuple):
    """Which steps are measured.

    Attributes:
        block_size: B.
        widest: rows of a request at most.
        max_requests: at most.
        draft_widths: that the draft may run over.
    """

    block_size: int
    widest: int
    max_requests: int
    draft_widths: tuple[int, ...]

    def points(self) -> list[SweepPoint]:
        """Return them in the order to measure them in."""
        return [
            point
            for point in sweep_points(self.max_requests, max(2, self.widest))
            if point.part == "target" or point.num_rows // point.num_requests in self.draft_widths
        ]


def measure_steps(
    cost: CostModel,
    runner: ModelRunner,
    draft: DraftForward,
    sizes: _Sizes,
    first_rank: FirstRank,
) -> None:
    """Take the times of both parts of steps of every size, as many as a time limit allows.

    The requests are made up: they read and write the pool's padding slot, which belongs to nobody.

    Args:
        cost: takes them.
        runner: the target's.
        draft: the draft.
        sizes: of the steps.
        first_rank: says when to stop, so that all measure the same points, and what was seen.
    """
    began = time.perf_counter()
    points = sizes.points()
    num_measured = 0
    parts = {point.part for point in points}
    for point in points:
        known = all(map(cost.knows, parts))
        in_time = time.perf_counter() - began < _SECONDS
        if known and not first_rank.numbers([int(in_time)])[0]:
            break
        seconds = [_seconds(runner, draft, sizes, point) for _ in range(_REPEATS)]
        (usual,) = first_rank.numbers([round(statistics.median(seconds) * 1e9)])
        context = (_CONTEXT + sizes.block_size) * point.num_requests
        cost.observe(point.part, point.num_requests, point.num_rows, context, usual / 1e9)
        num_measured += 1
    if not host_waits(runner):
        # A graph leaves it for the next batch of the scheduler, which these were not.
        runner.shared_read_done_event = None
    logger.info(
        "DFLASH verifies what pays: %d of %d sizes of pass were measured in %.1f s",
        num_measured,
        len(points),
        time.perf_counter() - began,
    )


class _Made(NamedTuple):
    """As much of a scheduler's batch as a forward over blocks reads."""

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    can_run_decode_cuda_graph: bool = False


def _seconds(runner: ModelRunner, draft: DraftForward, sizes: _Sizes, point: SweepPoint) -> float:
    """Return how long a part of a step takes: the draft, or the target and injection."""
    n, block_size = point.num_requests, sizes.block_size
    widths = [point.num_rows // n] * n
    if point.part == "draft" and not host_waits(runner):
        widths = [block_size] * n  # the draft's graph has one width
    elif point.num_rows == n:
        widths = row_buckets(runner).plain_widths(n, sizes.widest)
    rows = Rows.of(widths, block_size, runner.device)
    clock = clock_of(runner.device)
    started = clock.mark()
    with torch.inference_mode():
        batch, block, plan = _made_up(runner, n, block_size)
        if point.part == "draft":
            draft.propose(batch, block, rows, plan, None, with_confidence=True)
        else:
            _verify(runner, draft, batch, block, rows, plan)
    ended = clock.mark()
    clock.wait(ended)
    return clock.seconds(started, ended)


def _verify(
    runner: ModelRunner,
    draft: DraftForward,
    batch: _Made,
    block: Block,
    rows: Rows,
    plan: KVLocPlan,
) -> None:
    spec_info, locs = verify_input_of(block, rows, plan, row_buckets(runner))
    taken = VerifyRows(spec_info.draft_token, spec_info.positions, locs)
    forward = verify_batch(runner, batch, taken, spec_info, plan, spec_info.kv_loc_cols)
    output = runner.forward(forward).logits_output
    output.next_token_logits[: len(rows)].argmax(dim=-1)
    draft.inject(output.hidden_states, rows.take(block.positions), plan, rows.columns)


def _made_up(runner: ModelRunner, n: int, block_size: int) -> tuple[_Made, Block, KVLocPlan]:
    device = runner.device
    rows = torch.zeros(n, dtype=torch.int64, device=device)
    lens = torch.full_like(rows, _CONTEXT)
    lens_cpu = torch.full((n,), _CONTEXT, dtype=torch.int64)
    steps = torch.arange(block_size, device=device)
    nothing = torch.zeros(n, block_size, dtype=torch.int64, device=device)
    block = Block(nothing, lens.unsqueeze(1) + steps, nothing)
    plan = runner.kv_index_translator.plan(
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens_cpu,
        write_virtual=nothing.flatten(),
        read_extent=block_size,
    )
    ends = lens_cpu + block_size
    return _Made(rows, lens, ends, int(ends.sum())), block, plan
