# SPDX-License-Identifier: Apache-2.0
"""Who decides the verify width, and how long steps take here: a few of each size at start-up."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_observability, get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.controller import BudgetController, draft_widths
from sglang_dflash.budget.cost import CostModel, SweepPoint, sweep_points
from sglang_dflash.budget.planner import Limits
from sglang_dflash.budget.policy import FixedWidth, MeasuredWidths, WidthPolicy
from sglang_dflash.cpu.attention import CpuAttentionBackend
from sglang_dflash.draft.block import Block
from sglang_dflash.draft.forward import DraftForward, VerifyRows, verify_batch
from sglang_dflash.metrics import CountedWidths
from sglang_dflash.options import Options
from sglang_dflash.trace import TracedWidths
from sglang_dflash.verify.forward import ragged_layout
from sglang_dflash.verify.rows import Rows

__all__ = ["measure_steps", "width_policy"]

logger = logging.getLogger(__name__)

_CONTEXT = 64  # tokens of each request; what comes in shifts the estimate
_REPEATS = 3
_MAX_REQUESTS = 32  # beyond, times are scaled in proportion until steps are seen
_SECONDS = 6.0  # how long the sweep may take; larger points are then left out


def width_policy(
    options: Options,
    runner: ModelRunner,
    draft: DraftForward,
    agree: Callable[[torch.Tensor], torch.Tensor],
    *,
    block_size: int,
    max_requests: int,
) -> WidthPolicy:
    """Return who decides how many rows of each block are verified.

    Args:
        options: what the user asks for.
        runner: the target's.
        draft: the draft.
        agree: broadcasts a tensor from the first rank, whose clock decides for all.
        block_size: B.
        max_requests: most requests that run together.
    """
    if options.budget == "fixed":
        return FixedWidth(block_size)
    limits = Limits(block_size, options.min_width, options.max_width)
    if not isinstance(runner.attn_backend, CpuAttentionBackend):
        logger.info(
            "DFLASH verifies whole blocks: unequal widths are tested on the CPU's attention alone"
        )
        if options.trace is not None:
            logger.warning("SGLANG_DFLASH_TRACE: nothing is written, for no width is chosen")
        if (limits.min_width, limits.widest) != (1, block_size):
            logger.warning("SGLANG_DFLASH_MIN_WIDTH and MAX_WIDTH have no effect here")
        return FixedWidth(block_size)
    cost = measure_steps(runner, draft, limits, max_requests, agree)
    parts = (
        BudgetController(cost, limits, options.pacing, draft_widths(limits)),
        Calibrator(block_size, device=runner.device),
    )
    counted = get_observability().enable_metrics and get_parallel().tp_rank == 0
    policy = CountedWidths(*parts) if counted else MeasuredWidths(*parts)
    if options.trace is not None and get_parallel().tp_rank == 0:
        return TracedWidths(policy, options.trace, block_size)
    return policy


def measure_steps(
    runner: ModelRunner,
    draft: DraftForward,
    limits: Limits,
    max_requests: int,
    agree: Callable[[torch.Tensor], torch.Tensor],
) -> CostModel:
    """Return the times of both parts of steps of every size up to a time limit, cheapest first.

    The requests are made up: they read and write the pool's padding slot, which belongs to nobody.

    Args:
        runner: the target's.
        draft: the draft.
        limits: bounds on the widths; wider steps are not measured.
        max_requests: most requests that run together.
        agree: broadcasts a tensor from the first rank, so that all measure the same points.
    """
    block_size = limits.block_size
    cost = CostModel(max_requests, block_size)
    began = time.perf_counter()
    points = sweep_points(min(max_requests, _MAX_REQUESTS), max(2, limits.widest))
    num_measured = 0
    for point in points:
        known = cost.knows("target") and cost.knows("draft")
        goes_on = torch.tensor(time.perf_counter() - began < _SECONDS, dtype=torch.int64)
        if known and not bool(agree(goes_on)):
            break
        seconds = [_seconds(runner, draft, block_size, point) for _ in range(_REPEATS)]
        usual = torch.tensor(statistics.median(seconds), dtype=torch.float64)
        cost.observe(
            point.part,
            point.num_requests,
            point.num_rows,
            _CONTEXT * point.num_requests,
            float(agree(usual)),
        )
        num_measured += 1
    logger.info(
        "DFLASH verifies what pays: %d of %d sizes of pass were measured in %.1f s",
        num_measured,
        len(points),
        time.perf_counter() - began,
    )
    return cost


class _Made(NamedTuple):
    """As much of a scheduler's batch as a forward over blocks reads."""

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    can_run_decode_cuda_graph: bool = False


def _seconds(runner: ModelRunner, draft: DraftForward, block_size: int, point: SweepPoint) -> float:
    """Return how long a part of a step takes: the draft, or the target and injection."""
    n = point.num_requests
    rows = Rows.of([point.num_rows // n] * n, block_size, runner.device)
    started = time.perf_counter()
    with torch.inference_mode():
        batch, block, plan = _made_up(runner, n, block_size)
        if point.part == "draft":
            draft.propose(batch, block, rows, plan, None, with_confidence=True)
        else:
            _verify(runner, draft, batch, block, rows, plan)
    return time.perf_counter() - started


def _verify(
    runner: ModelRunner,
    draft: DraftForward,
    batch: _Made,
    block: Block,
    rows: Rows,
    plan: KVLocPlan,
) -> None:
    spec_info = DFlashVerifyInput(
        draft_token=rows.take(block.ids),
        positions=rows.take(block.positions),
        draft_token_num=rows.block_size,
        kv_loc_plan=plan,
        kv_loc_cols=rows.columns,
        ragged_verify_layout=ragged_layout(rows),
    )
    taken = VerifyRows(*(rows.take(values) for values in block))
    forward = verify_batch(runner, batch, taken, spec_info, plan, rows.columns)
    output = runner.forward(forward).logits_output
    output.next_token_logits.argmax(dim=-1)
    draft.inject(output.hidden_states, taken.positions, plan, rows.columns)


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
