# SPDX-License-Identifier: Apache-2.0
"""The verify pass: the target over the block, causal, in one forward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dflash.draft.block import Block

__all__ = ["Verified", "verify_block"]


class Verified(NamedTuple):
    """What the target says about the rows of n blocks.

    Attributes:
        logits: [n, B, V] float32; row j is the law of the token after block row j.
        features: [n * B, K*H], context features of every row.
        result: SGLang's own record of the forward, features taken out.
    """

    logits: torch.Tensor
    features: torch.Tensor
    result: GenerationBatchResult


def verify_block(
    target_worker: TpModelWorker,
    batch: ScheduleBatch,
    block: Block,
    proposals: torch.Tensor,
    plan: KVLocPlan,
) -> Verified:
    """Run the target over [anchor, proposals] of each request.

    Args:
        target_worker: the target.
        batch: the scheduler's batch, whose input the forward replaces (the scheduler restores it).
        block: [n, B] rows; the proposals stand in for the masks.
        proposals: [n, B-1] int64.
        plan: where the rows' K/V goes.
    """
    n, block_size = block.ids.shape
    tokens = torch.cat([block.ids[:, :1], proposals], dim=1).flatten()
    verify_input = DFlashVerifyInput(
        draft_token=tokens,
        positions=block.positions.flatten(),
        draft_token_num=block_size,
        kv_loc_plan=plan,
    )
    batch.out_cache_loc = block.locs.flatten()
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    result = target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )
    output = result.logits_output
    # The features are consumed in this step: left in, they would be copied to the host with it.
    features, output.hidden_states = output.hidden_states, None
    logits = output.next_token_logits.view(n, block_size, -1)
    return Verified(logits, features, result)
