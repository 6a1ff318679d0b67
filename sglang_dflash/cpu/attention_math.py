# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of one attention call on the CPU, and the buffers it reuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["Fold", "HeadLayout", "Workspace", "attend_each_row", "attend_rows", "attend_tile"]


class HeadLayout(NamedTuple):
    """What a layer adds to plain attention.

    Attributes:
        scale: factor on q·k.
        softcap: scores become softcap * tanh(scores / softcap); 0 means none.
        sinks: [q_heads] float, a logit per head that takes probability and gives nothing; or None.
    """

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class Workspace:
    """Buffers for gathered keys and values, grown on demand and used again by every layer.

    Fresh buffers of this size would be mapped and unmapped by the allocator at each call, which
    costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, torch.Tensor] = {}

    def gather(self, name: str, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of `cache` at `slots`; valid until the next call with this name.

        Args:
            name: "k" or "v".
            cache: [slots, heads, dim], contiguous.
            slots: [k] int64.

        Returns:
            [k, heads, dim] of the cache's dtype.
        """
        flat = cache.view(cache.shape[0], -1)
        key = (name, cache.dtype, flat.shape[1])
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < slots.shape[0]:
            rows = max(256, 1 << (slots.shape[0] - 1).bit_length())
            buffer = self._buffers[key] = flat.new_empty((rows, flat.shape[1]))
        out = buffer[: slots.shape[0]]
        torch.index_select(flat, 0, slots, out=out)
        return out.view(-1, cache.shape[1], cache.shape[2])


class Fold(NamedTuple):
    """Where the query heads of m requests of unequal widths lie, those of a K/V head as rows.

    Padding and folding are one gather of (row, head) pairs, pair = row * q_heads + head, and one
    gather undoes both, so that an unequal batch takes as many operators as an equal one.

    Attributes:
        pairs: [m * kv_heads * groups * width] int64, in this order.
        places: [k * q_heads] int64, where the pairs of the k rows that are no padding are in
            [m, groups * width, kv_heads], the order in which the CPU kernel writes.
    """

    pairs: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, valid: torch.Tensor, q_heads: int, kv_heads: int) -> Fold:
        """Return the fold of [m, width] query rows, `valid` those that are no padding."""
        m, width = rows.shape
        pairs = rows[:, None, :] * q_heads + torch.arange(q_heads)[:, None]  # [m, q_heads, width]
        places = torch.arange(pairs.numel()).view(m, -1, width, kv_heads).permute(0, 2, 3, 1)
        return cls(pairs.flatten(), places.reshape(m, width, -1)[valid].flatten())


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, int, int],
    mask: torch.Tensor | None,
    heads: HeadLayout,
    fold: Fold | None = None,
) -> torch.Tensor:
    """Return attention of m padded requests, the query heads of a K/V head folded into rows.

    Args:
        q: [rows, q_heads, dim] float.
        keys: [m * length, kv_heads, dim] of q's dtype.
        values: [m * length, kv_heads, v_dim] of q's dtype.
        shape: (m, width, length).
        mask: [m, 1, groups * width, length] additive, rows in (group, width) order; None for all.
        heads: scale, soft cap and sinks.
        fold: which rows of q are whose; None where they are m times `width`, in order.

    Returns:
        [k, q_heads, v_dim] of q's dtype, the rows that are no padding.
    """
    m, width, length = shape
    q_heads, kv_heads, dim = q.shape[1], keys.shape[1], q.shape[2]
    groups = q_heads // kv_heads
    if fold is None:
        folded = q.reshape(m, width, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
    else:
        folded = q.reshape(-1, dim).index_select(0, fold.pairs)
    out = _attention(
        folded.reshape(m, kv_heads, groups * width, dim),
        keys.view(m, length, kv_heads, -1).transpose(1, 2),
        values.view(m, length, kv_heads, -1).transpose(1, 2),
        mask,
        heads,
        None
        if heads.sinks is None
        else heads.sinks.view(1, kv_heads, groups, 1).repeat_interleave(width, 2),
    )
    if fold is None:
        out = out.view(m, kv_heads, groups, width, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(m * width, q_heads, -1)
    written = out.transpose(1, 2).reshape(-1, out.shape[-1])
    return written.index_select(0, fold.places).view(-1, q_heads, out.shape[-1])


def attend_tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    heads: HeadLayout,
) -> torch.Tensor:
    """Return attention of one tile of one request.

    The query heads of a K/V head become the batch, over which keys are broadcast without a copy.

    Args:
        q: [rows, q_heads, dim] float.
        keys: [length, kv_heads, dim] of q's dtype.
        values: [length, kv_heads, v_dim] of q's dtype.
        mask: [rows, length] additive, or None.
        heads: scale, soft cap and sinks.

    Returns:
        [rows, q_heads, v_dim] of q's dtype.
    """
    rows, q_heads, kv_heads = q.shape[0], q.shape[1], keys.shape[1]
    groups = q_heads // kv_heads
    out = _attention(
        q.view(rows, kv_heads, groups, -1).permute(2, 1, 0, 3),
        keys.transpose(0, 1).expand(groups, -1, -1, -1),
        values.transpose(0, 1).expand(groups, -1, -1, -1),
        None if mask is None else mask.expand(1, 1, -1, -1),
        heads,
        None if heads.sinks is None else heads.sinks.view(kv_heads, groups).t()[:, :, None, None],
    )
    return out.permute(2, 1, 0, 3).reshape(rows, q_heads, -1)


def attend_each_row(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    heads: HeadLayout,
) -> torch.Tensor:
    """Return attention of one request's rows, a call a row, each over its own keys alone.

    Args:
        q: [rows, q_heads, dim] float.
        keys: [length, kv_heads, dim] of q's dtype.
        values: [length, kv_heads, v_dim] of q's dtype.
        spans: per row, the first key it sees and the one after the last.
        heads: scale, soft cap and sinks.

    Returns:
        [rows, q_heads, v_dim] of q's dtype.
    """
    rows, q_heads, kv_heads = q.shape[0], q.shape[1], keys.shape[1]
    folded = q.reshape(rows, 1, kv_heads, q_heads // kv_heads, -1)
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    sinks = None if heads.sinks is None else heads.sinks.view(1, kv_heads, -1, 1)
    each = [
        _attention(row, k[:, :, lo:hi], v[:, :, lo:hi], None, heads, sinks)
        for row, (lo, hi) in zip(folded.unbind(0), spans, strict=True)
    ]
    return torch.cat(each).view(rows, q_heads, -1)


def _attention(q, k, v, mask, heads, sinks):
    """Attend [b, h, rows, dim] over [b, h, keys, dim]; sinks broadcast to [b, h, rows, 1]."""
    if heads.softcap == 0 and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=heads.scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * heads.scale
    if heads.softcap:
        scores = torch.tanh(scores / heads.softcap) * heads.softcap
    if mask is not None:
        scores = scores + mask.float()
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., : k.shape[-2]]
    return torch.matmul(probs, v.float()).to(q.dtype)
