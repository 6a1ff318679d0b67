# SPDX-License-Identifier: Apache-2.0
"""The K/V pool and slot operations that SGLang 0.5.23 has only in Triton or CUDA, in torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

__all__ = ["CpuMHATokenToKVPool", "assign_req_to_token_pool", "extend_cache_locs"]


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """SGLang's K/V pool without its Triton copy kernel, and with cheaper row writes."""

    def _init_kv_copy_and_warmup(self) -> None:
        """Skip the Triton copy kernel's set-up; `move_kv_cache` needs none here."""
        self._kv_copy_config = None

    def _create_buffers_normal(self) -> None:
        """Make the pools of memory that the host hands out page by page, on first use.

        `torch.zeros` would write all of it at start-up: seconds, and memory that a small load
        never needs.

        Raises:
            ValueError: a layout only GPU kernels read.
        """
        if self.kv_cache_layout != "nhd":
            raise ValueError(
                f"K/V cache layout {self.kv_cache_layout}: the CPU platform reads nhd only; "
                "unset SGLANG_USE_HND_KVCACHE."
            )
        k_shape, v_shape = self._kv_buffer_shapes()
        self.k_buffer = [_lazy_zeros(k_shape, self.store_dtype) for _ in range(self.layer_num)]
        self.v_buffer = [_lazy_zeros(v_shape, self.store_dtype) for _ in range(self.layer_num)]

    def set_kv_buffer(
        self,
        layer: RadixAttention | None,
        loc_info: KVWriteLoc | torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        """Write the K and V rows of one layer.

        Args:
            layer: the layer, or None where `layer_id_override` says which.
            loc_info: [T] int slots, or SGLang's bundle of them.
            cache_k: [T, heads, dim] float.
            cache_v: [T, heads, v_dim] float.
            k_scale: scale of a quantised pool.
            v_scale: scale of a quantised pool.
            layer_id_override: layer of the model.
            dcp_kv_mask: unused; context parallelism is not served on a CPU.
        """
        if cache_k.dtype is not self.store_dtype:
            super().set_kv_buffer(
                layer, loc_info, cache_k, cache_v, k_scale, v_scale, layer_id_override, dcp_kv_mask
            )
            return
        loc = loc_info.loc if isinstance(loc_info, KVWriteLoc) else loc_info
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        self._store_kv_layer(layer_id - self.start_layer, loc, cache_k, cache_v)

    def _store_kv_layer(
        self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Write K and V rows of one layer.

        Args:
            layer_idx: layer of this pool.
            loc: [T] int slots.
            cache_k: [T, heads, dim] of the pool's dtype.
            cache_v: [T, heads, v_dim] of the pool's dtype.
        """
        loc = loc.long()
        for buffer, rows in (
            (self.k_buffer[layer_idx], cache_k),
            (self.v_buffer[layer_idx], cache_v),
        ):
            flat = buffer.view(buffer.shape[0], -1)
            flat.index_copy_(0, loc, rows.reshape(loc.shape[0], -1))

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy rows of every layer from one set of slots to another.

        Args:
            tgt_loc: [T] int slots.
            src_loc: [T] int slots; may overlap `tgt_loc`, the rows are read first.
        """
        target, source = tgt_loc.reshape(-1).long(), src_loc.reshape(-1).long()
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer.index_copy_(0, target, buffer.index_select(0, source))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of `shape` whose pages are not yet in memory (NumPy allocates with calloc)."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def _ragged_positions(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (request, position) of each token in the ranges start..end-1, in order."""
    counts = (end - start).long()
    request = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
    first_row = torch.cumsum(counts, 0) - counts
    position = torch.arange(request.shape[0]) - first_row[request] + start.long()[request]
    return request, position


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly reserved slots into the page table (replaces `assign_req_to_token_pool_func`).

    Args:
        req_pool_indices: [n] int page-table rows.
        req_to_token: [requests, context] int32 page table, written in place.
        start_offset: [n] int first position to write.
        end_offset: [n] int position after the last.
        out_cache_loc: [sum of end - start] int slots, request after request.
        batch_size: n.
    """
    request, position = _ragged_positions(start_offset[:batch_size], end_offset[:batch_size])
    rows = req_pool_indices.long()[request]
    slots = out_cache_loc[: request.shape[0]].to(req_to_token.dtype)
    req_to_token.index_put_((rows, position), slots)


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Return the slots of positions start..end-1 of each request.

    Args:
        req_pool_indices: [n] int page-table rows.
        req_to_token: [requests, context] int32 page table.
        start_offset: [n] int first position.
        end_offset: [n] int position after the last.
        batch_size: n.
        draft_token_num: rows per request the result is sized for.
        device: unused; the result lies where the page table does.

    Returns:
        [n * draft_token_num] int64; entries beyond the ranges' total are 0.
    """
    request, position = _ragged_positions(start_offset[:batch_size], end_offset[:batch_size])
    slots = req_to_token[req_pool_indices.long()[request], position].long()
    missing = batch_size * draft_token_num - slots.shape[0]
    return slots if missing == 0 else torch.nn.functional.pad(slots, (0, missing))
