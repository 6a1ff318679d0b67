# SPDX-License-Identifier: Apache-2.0
"""The verify pass: the target over the block, causal, in one forward."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_dflash.draft.block import Block
from sglang_dflash.verify.buckets import NO_BUCKETS, RowBuckets
from sglang_dflash.verify.rows import Rows

__all__ = ["Verified", "verify_block", "verify_input_of"]

_NOWHERE = -1  # SGLang's name for the slot that nobody owns, as a column of a plan


class Verified(NamedTuple):
    """What the target says about the first rows of n blocks.

    Attributes:
        rows: which rows they are.
        logits: [M, V] float32, the law of the token after each row.
        features: [M, K*H], context features of every row.
        result: SGLang's own record of the forward, features taken out.
    """

    rows: Rows
    logits: torch.Tensor
    features: torch.Tensor
    result: GenerationBatchResult


def verify_block(
    target_worker: TpModelWorker,
    batch: ScheduleBatch,
    block: Block,
    proposals: torch.Tensor,
    rows: Rows,
    plan: KVLocPlan,
    buckets: RowBuckets = NO_BUCKETS,
) -> Verified:
    """Run the target over the rows of [anchor, proposals] that are worth it.

    Args:
        target_worker: the target.
        batch: the scheduler's batch, whose input the forward replaces (the scheduler restores it).
        block: [n, B] rows; the proposals stand in for the masks.
        proposals: [n, B-1] int64.
        rows: the M rows to verify.
        plan: where the blocks' K/V goes.
        buckets: the sizes of the graphs; the rows are padded to one.
    """
    filled = block._replace(ids=torch.cat([block.ids[:, :1], proposals], dim=1))
    verify_input, batch.out_cache_loc = verify_input_of(filled, rows, plan, buckets)
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    result = target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )
    output = result.logits_output
    # The features are consumed in this step: left in, they would be copied to the host with it.
    features, output.hidden_states = output.hidden_states, None
    return Verified(rows, output.next_token_logits[: len(rows)], features[: len(rows)], result)


def verify_input_of(
    block: Block, rows: Rows, plan: KVLocPlan, buckets: RowBuckets
) -> tuple[DFlashVerifyInput, torch.Tensor]:
    """Return what SGLang's forward is told of M rows, and the slots [P] that it writes.

    Where a graph has more rows than are verified, the rest read token 0 at position 0 and write to
    the slot that nobody owns.

    Args:
        block: [n, B] tokens, positions and slots.
        rows: the M rows.
        plan: where the blocks' K/V goes.
        buckets: the sizes of the graphs.
    """
    size = buckets.padded(len(rows.widths), len(rows))
    empty = (0, size - len(rows))
    columns = rows.columns
    if size > len(rows):
        columns = F.pad(rows.columns_of_all, empty, value=_NOWHERE)
    verify_input = DFlashVerifyInput(
        draft_token=_filled(rows.take(block.ids), empty),
        positions=_filled(rows.take(block.positions), empty),
        draft_token_num=rows.block_size,
        kv_loc_plan=plan,
        kv_loc_cols=columns,
        ragged_verify_layout=_ragged_layout(rows, size, buckets),
    )
    return verify_input, _filled(rows.take(block.locs), empty)


def _filled(values: torch.Tensor, empty: tuple[int, int]) -> torch.Tensor:
    return F.pad(values, empty) if any(empty) else values


def _ragged_layout(rows: Rows, size: int, buckets: RowBuckets) -> RaggedVerifyLayout | None:
    """Return SGLang's description of M rows in a forward of `size`.

    None for whole blocks that have no graph: an eager forward described so would wait for the
    device. Graphs by the number of rows want whole blocks described too.

    Args:
        rows: the M rows.
        size: rows of the forward, M or more.
        buckets: the sizes of the graphs.
    """
    if rows.are_whole_blocks and (not buckets.counts or len(rows.widths) > buckets.most_requests):
        return None
    make = _layout if rows.known_widths is None else _kept_layout  # the former is new each step
    return make(rows, buckets.layout_size(size))


def _layout(rows: Rows, size: int) -> RaggedVerifyLayout:
    ends = torch.cat([rows.starts, (rows.starts[-1:] + rows.widths[-1:])])
    known = rows.known_widths is not None
    return RaggedVerifyLayout(
        verify_lens=rows.widths.to(torch.int32),
        graph_num_tokens=size,
        extend_start_loc=rows.starts.to(torch.int32),
        qo_indptr_device=ends.to(torch.int32),
        verify_lens_cpu=list(rows.widths_cpu) if known else None,
        total_verify_tokens=len(rows),
        max_q_len=rows.widest,
    )


_kept_layout = lru_cache(maxsize=256)(_layout)  # as many as rows are kept
