# SPDX-License-Identifier: Apache-2.0
"""The prefix of each block that the target's own choices confirm, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels import has_kernels
from sglang_dflash.verify.accept import Verdict, accept_equal

__all__ = ["confirm", "confirm_reference"]


def confirm(
    proposals: torch.Tensor,
    choices: torch.Tensor,
    starts: torch.Tensor,
    widths: torch.Tensor,
) -> Verdict:
    """Return what `accept_equal` returns, of choices that lie row after row.

    Args:
        proposals: [n, B-1] int64.
        choices: [M] int64, the target's choice after each verified row.
        starts: [n] int64, the first row of each request.
        widths: [n] int64 in 1..B, verified rows of each; they follow each other.
    """
    if not has_kernels(proposals):
        return confirm_reference(proposals, choices, starts, widths)
    n, num_proposals = proposals.shape
    block_size = num_proposals + 1
    tokens = proposals.new_empty(n, block_size)
    num_committed = torch.empty(n, dtype=torch.int32, device=proposals.device)
    next_anchor = proposals.new_empty(n)
    _confirm_kernel[(n,)](
        proposals,
        choices,
        starts,
        widths,
        tokens,
        num_committed,
        next_anchor,
        proposals.stride(0),
        proposals.stride(1),
        BLOCK_SIZE=block_size,
        COLUMNS=triton.next_power_of_2(block_size),
    )
    return Verdict(tokens, num_committed, next_anchor)


def confirm_reference(
    proposals: torch.Tensor,
    choices: torch.Tensor,
    starts: torch.Tensor,
    widths: torch.Tensor,
) -> Verdict:
    """See `confirm`."""
    columns = torch.arange(proposals.shape[1] + 1, device=proposals.device)
    verified = columns < widths.unsqueeze(1)
    rows = torch.where(verified, starts.unsqueeze(1) + columns, 0)
    target_tokens = choices[rows].masked_fill(~verified, 0)
    return accept_equal(proposals, target_tokens, widths)


# Any alignment: a request's rows start where others end.
@triton.jit(do_not_specialize_on_alignment=["choices", "starts", "widths"])
def _confirm_kernel(
    proposals,  # [n, B-1]
    choices,  # [M]
    starts,  # [n]
    widths,  # [n]
    tokens,  # [n, B]
    num_committed,  # [n]
    next_anchor,  # [n]
    request_stride,
    column_stride,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a request."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    width = tl.load(widths + request)
    start = tl.load(starts + request)
    choice = tl.load(choices + start + column, mask=column < width, other=0)
    compared = column < width - 1
    at = proposals + request * request_stride + column * column_stride
    proposal = tl.load(at, mask=compared, other=0)
    stands = compared & (proposal == choice)
    # The first that does not stand; the row behind the last proposal never does.
    accepted = tl.min(tl.where(stands, COLUMNS, column))
    tl.store(tokens + request * BLOCK_SIZE + column, choice, mask=column < BLOCK_SIZE)
    tl.store(num_committed + request, accepted + 1)
    tl.store(next_anchor + request, tl.sum(tl.where(column == accepted, choice, 0)))
