# SPDX-License-Identifier: Apache-2.0
"""The verify pass: the target over the block, causal, in one forward."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_dflash.draft.block import Block
from sglang_dflash.verify.rows import Rows

__all__ = ["Verified", "ragged_layout", "verify_block"]


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
) -> Verified:
    """Run the target over the rows of [anchor, proposals] that are worth it.

    Args:
        target_worker: the target.
        batch: the scheduler's batch, whose input the forward replaces (the scheduler restores it).
        block: [n, B] rows; the proposals stand in for the masks.
        proposals: [n, B-1] int64.
        rows: the M rows to verify.
        plan: where the blocks' K/V goes.
    """
    verify_input = DFlashVerifyInput(
        draft_token=rows.take(torch.cat([block.ids[:, :1], proposals], dim=1)),
        positions=rows.take(block.positions),
        draft_token_num=rows.block_size,
        kv_loc_plan=plan,
        kv_loc_cols=rows.columns,
        ragged_verify_layout=ragged_layout(rows),
    )
    batch.out_cache_loc = rows.take(block.locs)
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    result = target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )
    output = result.logits_output
    # The features are consumed in this step: left in, they would be copied to the host with it.
    features, output.hidden_states = output.hidden_states, None
    return Verified(rows, output.next_token_logits, features, result)


@lru_cache(maxsize=256)  # as many as rows are kept
def ragged_layout(rows: Rows) -> RaggedVerifyLayout | None:
    """Return SGLang's description of rows that are not whole blocks; None for whole ones."""
    if rows.are_whole_blocks:
        return None
    ends = torch.cat([rows.starts, (rows.starts[-1:] + rows.widths[-1:])])
    return RaggedVerifyLayout(
        verify_lens=rows.widths.to(torch.int32),
        graph_num_tokens=len(rows),
        extend_start_loc=rows.starts.to(torch.int32),
        qo_indptr_device=ends.to(torch.int32),
        verify_lens_cpu=list(rows.widths_cpu),
        total_verify_tokens=len(rows),
        max_q_len=max(rows.widths_cpu),
    )
