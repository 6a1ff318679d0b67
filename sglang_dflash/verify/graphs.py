# SPDX-License-Identifier: Apache-2.0
"""SGLang's ragged verify graphs, and what else depends on whether the host waits."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.draft.block import Block
from sglang_dflash.verify.buckets import NO_BUCKETS, RowBuckets

__all__ = ["context_tokens", "host_waits", "row_buckets", "takes_ragged_graphs"]


def host_waits(runner: ModelRunner) -> bool:
    """Return whether the host does the work itself, and so has each step's results at once."""
    return torch.device(runner.device).type == "cpu"


def takes_ragged_graphs(runner: ModelRunner) -> bool:
    """Return whether verify steps of unequal widths may run as graphs."""
    graphs = runner.decode_cuda_graph_runner
    captured = graphs is not None and graphs.ragged_verify_mode
    return bool(captured and runner.attn_backend.supports_ragged_verify_graph)


def row_buckets(runner: ModelRunner) -> RowBuckets:
    """Return the sizes of the ragged verify graphs that were captured; none where there are none.

    A graph of R rows has room for R requests, `most_requests` at most.
    """
    if not takes_ragged_graphs(runner):
        return NO_BUCKETS
    graphs = runner.decode_cuda_graph_runner
    return RowBuckets(tuple(graphs.capture_num_tokens), graphs.max_bs)


def context_tokens(batch: ScheduleBatch, block: Block, *, host_waits: bool) -> int:
    """Return the positions of all requests together, the block's own included.

    Under overlap scheduling the scheduler's sum is of the positions reserved. Only a host that does
    the work itself may read lengths: elsewhere that would wait for the device.

    Args:
        batch: the n requests.
        block: theirs, [n, B].
        host_waits: what `host_waits` says of the target's runner.
    """
    if not host_waits:
        return batch.seq_lens_sum
    return int(batch.seq_lens.sum()) + block.ids.numel()
