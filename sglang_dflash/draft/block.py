# SPDX-License-Identifier: Apache-2.0
"""The block: one anchor and B-1 masks, where it stands and where its K/V goes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_dflash.kernels.fill_block import fill_block

__all__ = ["Block", "BlockBuilder"]


class Block(NamedTuple):
    """The rows that draft and target work on in one step, of n requests.

    Attributes:
        ids: [n, B] int64, the anchor and B-1 mask tokens.
        positions: [n, B] int64, prefix length + 0..B-1.
        locs: [n, B] int64, the KV slot of each row.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    locs: torch.Tensor


class BlockBuilder:
    """Fills the same buffers each step; the forward stream orders their reuse."""

    def __init__(
        self, block_size: int, mask_token_id: int, max_requests: int, device: torch.device | str
    ) -> None:
        self.max_requests = max_requests
        shape = (max_requests, block_size)
        self._ids = torch.full(shape, mask_token_id, dtype=torch.int64, device=device)
        self._positions = torch.empty(shape, dtype=torch.int64, device=device)

    def build(
        self,
        anchors: torch.Tensor,
        prefix_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> Block:
        """Return the block after each request's committed prefix.

        Args:
            anchors: [n] int64, the last committed token, whose K/V the target has not computed.
            prefix_lens: [n] int64, tokens whose K/V is in the pool.
            req_pool_indices: [n] int64, rows of `req_to_token`.
            req_to_token: [rows, width] int32, the slot of each position; B positions after each
                prefix are reserved already.

        Returns:
            Views into kept buffers, valid until the next call; `locs` is new.
        """
        n = anchors.shape[0]
        block = Block(self._ids[:n], self._positions[:n], torch.empty_like(self._ids[:n]))
        fill_block(anchors, prefix_lens, req_pool_indices, req_to_token, *block)
        return block
