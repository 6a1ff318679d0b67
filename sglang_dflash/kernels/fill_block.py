# SPDX-License-Identifier: Apache-2.0
"""The block's anchors, positions and slots, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels import has_kernels

__all__ = ["fill_block", "fill_block_reference"]


def fill_block(
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
) -> None:
    """Write what stands in the block after each request's prefix.

    Args:
        anchors: [n] int64.
        prefix_lens: [n] int64.
        req_pool_indices: [n] int64, rows of `req_to_token`.
        req_to_token: [rows, width] int32, the slot of each position.
        ids: [n, B] int64, its first column is written.
        positions: [n, B] int64, written: prefix length + 0..B-1.
        locs: [n, B] int64, written: the slot of each.
    """
    if not has_kernels(anchors):
        fill_block_reference(
            anchors, prefix_lens, req_pool_indices, req_to_token, ids, positions, locs
        )
        return
    n, block_size = ids.shape
    assert all(out.is_contiguous() for out in (ids, positions, locs))
    _fill_block_kernel[(n,)](
        anchors,
        prefix_lens,
        req_pool_indices,
        req_to_token,
        ids,
        positions,
        locs,
        req_to_token.stride(0),
        BLOCK_SIZE=block_size,
        COLUMNS=triton.next_power_of_2(block_size),
    )


def fill_block_reference(
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
) -> None:
    """See `fill_block`."""
    ids[:, 0] = anchors
    offsets = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
    torch.add(prefix_lens.unsqueeze(1), offsets, out=positions)
    locs.copy_(req_to_token[req_pool_indices.unsqueeze(1), positions])


@triton.jit
def _fill_block_kernel(
    anchors,  # [n]
    prefix_lens,  # [n]
    req_pool_indices,  # [n]
    req_to_token,  # [rows, table_stride]
    ids,  # [n, B]
    positions,  # [n, B]
    locs,  # [n, B]
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a request."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < BLOCK_SIZE
    first = request * BLOCK_SIZE
    tl.store(ids + first, tl.load(anchors + request))
    place = tl.load(prefix_lens + request).to(tl.int64) + column
    tl.store(positions + first + column, place, mask=inside)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    slot = tl.load(req_to_token + row * table_stride + place, mask=inside)
    tl.store(locs + first + column, slot.to(tl.int64), mask=inside)
