# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged K/V pool in stock torch: plan once a forward, attend per layer.

A forward serves n requests. Request i owns a contiguous run of query rows, its last
`q_lens[i]` tokens, and sees keys 0..`kv_lens[i]`-1 through the page table. Two shapes of work:

* **blocks**: requests with few rows (decode, verify, short prompts) are padded together to
  [m, width] queries over [m, length] keys, one attention call for all. The query heads of one
  K/V head become rows, because that reads each key once (4x to 8x faster in bfloat16 than
  `enable_gqa` on the CPU kernel).
* **tiles**: a long run of rows is cut into tiles, each over the keys up to its own end. Causal
  and window masks of all tiles are slices of one band matrix, since they depend only on the
  distance of key and query.

A plan made `by_row` attends one row after the other instead, each over the keys it sees: the same
calls on the same shapes whatever else the forward holds, hence the same bits.

Nothing here knows SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sglang_dflash.cpu.attention_math import (
    Fold,
    HeadLayout,
    Workspace,
    attend_each_row,
    attend_rows,
    attend_tile,
)

__all__ = ["AttentionPlan", "PagedRows"]

BLOCK_MAX_ROWS = 64  # a request with more query rows is tiled
TILE_ROWS = 256  # query rows of one tile
GROUP_MAX_TOKENS = 1 << 15  # gathered keys of one block: bounds the workspace
SPLIT_SAVING_TOKENS = 1024  # padded keys a further block must save, about its fixed cost


@dataclass(frozen=True)
class PagedRows:
    """The rows of one forward, before any window is applied.

    Attributes:
        req_to_token: [slots of requests, context] int32 page table, one K/V slot per token.
        req_pool_indices: [n] int64, the page-table row of each request.
        q_lens: n query row counts; rows lie request after request. Of none: an empty prompt, which
            SGLang lets in.
        kv_lens: n key counts, each >= the request's `q_lens`; the queries are its last tokens.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    q_lens: Sequence[int]
    kv_lens: Sequence[int]


class _Block(NamedTuple):
    """Requests padded to one shape: m requests, `width` queries and `length` keys each."""

    slots: torch.Tensor  # [m * length] int64
    q_rows: torch.Tensor  # [m, width] int64 (padding repeats the last)
    valid: torch.Tensor | None  # [m, width] bool, no padding; None where rows have this shape
    own_rows: torch.Tensor  # [k] int64, the rows that are no padding
    q_pos: torch.Tensor  # [m, width] int64, absolute positions (padding repeats the last)
    first_key: torch.Tensor  # [m] int64, absolute position of key column 0
    kv_lens: torch.Tensor  # [m] int64
    num: int
    width: int
    length: int


class _Tiles(NamedTuple):
    """One request with many rows."""

    slots: torch.Tensor  # [length] int64
    row: int  # its first query row
    num_rows: int
    first_key: int  # absolute position of key column 0
    kv_len: int


@dataclass
class AttentionPlan:
    """Where every key of a forward lies, for one window; masks are made on first use and kept.

    `window` < 0 means none; otherwise query p sees keys p-window..p (and up to p+window where
    attention is bidirectional), the meaning of SGLang's `layer.sliding_window_size`.
    """

    blocks: list[_Block]
    tiles: list[_Tiles]
    num_rows: int
    window: int
    by_row: bool = False
    _masks: dict[tuple, torch.Tensor | None] = field(default_factory=dict)
    _folds: dict[tuple[int, int, int], Fold] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        rows: PagedRows,
        window: int = -1,
        translate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        by_row: bool = False,
    ) -> AttentionPlan:
        """Return the plan of one forward.

        Args:
            rows: the requests.
            window: sliding window, or -1.
            translate: maps [k] int64 slots of the page table to slots of the pool that is read
                (a hybrid model's sliding-window pool); None where they are the same.
            by_row: whether a row's result must not depend on the rest of the forward.
        """
        longest_block = 0 if by_row else BLOCK_MAX_ROWS
        starts = _first_keys(rows, window)
        row_starts, total = _prefix_sums(rows.q_lens)
        short = [i for i, w in enumerate(rows.q_lens) if 0 < w <= longest_block]
        groups = _group(short, [rows.kv_lens[i] - starts[i] for i in range(len(starts))])
        in_order = len(groups) == 1 and len(short) == len(rows.q_lens)
        blocks = [
            _make_block(rows, members, starts, row_starts, in_order, translate)
            for members in groups
        ]
        tiles = [
            _make_tiles(rows, i, starts[i], row_starts[i], translate)
            for i, w in enumerate(rows.q_lens)
            if w > longest_block
        ]
        return cls(blocks, tiles, total, window, by_row)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        heads: HeadLayout,
        workspace: Workspace,
        *,
        causal: bool,
    ) -> torch.Tensor:
        """Return the attention output of every query row.

        Args:
            q: [rows, q_heads, head_dim] float; rows beyond the plan's are padding.
            k_cache: [slots, kv_heads, head_dim] of q's dtype, this layer's key pool.
            v_cache: [slots, kv_heads, v_head_dim] of q's dtype.
            heads: scale, soft cap and sinks of the layer.
            workspace: buffers that are reused from call to call.
            causal: False lets a request's rows see each other in both directions.

        Returns:
            [rows, q_heads, v_head_dim] of q's dtype; padding rows are zero.
        """
        given = (q, k_cache, v_cache, heads, workspace, causal)
        if len(self.blocks) == 1 and not self.tiles and q.shape[0] == self.num_rows:
            return self._attend_block(self.blocks[0], *given)
        out = q.new_zeros((q.shape[0], q.shape[1], v_cache.shape[-1]))
        for block in self.blocks:
            out.index_copy_(0, block.own_rows, self._attend_block(block, *given))
        for run in self.tiles:
            self._attend_tiles(run, q, k_cache, v_cache, heads, workspace, causal, out)
        return out

    def _attend_block(self, block, q, k_cache, v_cache, heads, workspace, causal):
        """Return [k, q_heads, v_dim], the block's own rows of q in its order."""
        groups = q.shape[1] // k_cache.shape[1]
        mask = self._block_mask(block, groups, causal, q.dtype)
        fold = None if block.valid is None else self._fold(block, q.shape[1], k_cache.shape[1])
        if fold is None:
            q = q[: self.num_rows]
        keys = workspace.gather("k", k_cache, block.slots)
        values = workspace.gather("v", v_cache, block.slots)
        shape = (block.num, block.width, block.length)
        return attend_rows(q, keys, values, shape, mask, heads, fold)

    def _fold(self, block, q_heads, kv_heads):
        key = (id(block), q_heads, kv_heads)
        if key not in self._folds:
            self._folds[key] = Fold.of(block.q_rows, block.valid, q_heads, kv_heads)
        return self._folds[key]

    def _attend_tiles(self, run, q, k_cache, v_cache, heads, workspace, causal, out):
        """Attend one request, tile by tile or row by row, into its rows of `out`."""
        keys = workspace.gather("k", k_cache, run.slots)
        values = workspace.gather("v", v_cache, run.slots)
        if self.by_row:
            spans = [
                (lo - run.first_key, hi - run.first_key)
                for _, lo, hi in (
                    _tile_span(run, row, row + 1, self.window, causal)
                    for row in range(run.num_rows)
                )
            ]
            own = slice(run.row, run.row + run.num_rows)
            out[own] = attend_each_row(q[own], keys, values, spans, heads)
            return
        band, origin = self._band(causal, q.dtype)
        for start in range(0, run.num_rows, TILE_ROWS):
            stop = min(start + TILE_ROWS, run.num_rows)
            first, lo, hi = _tile_span(run, start, stop, self.window, causal)
            mask = None
            if band is not None:
                left = origin - (first - lo)
                mask = band[: stop - start, left : left + hi - lo]
            span = slice(lo - run.first_key, hi - run.first_key)
            tile = slice(run.row + start, run.row + stop)
            out[tile] = attend_tile(q[tile], keys[span], values[span], mask, heads)

    def _block_mask(self, block, groups, causal, dtype):
        """Return the additive mask [m, 1, groups * width, length], or None where all is visible."""
        key = (id(block), groups, causal, dtype)
        if key not in self._masks:
            seen = _visible(block, self.window, causal)
            mask = None
            if not bool(seen.all()):
                mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
                mask = (
                    mask[:, None].expand(-1, groups, -1, -1).reshape(block.num, 1, -1, block.length)
                )
            self._masks[key] = mask
        return self._masks[key]

    def _band(self, causal, dtype):
        """Return the band matrix all tile masks are slices of, and the column of distance 0."""
        if self.window < 0 and not causal:
            return None, 0
        key = ("band", causal, dtype)
        if key not in self._masks:
            spans = [
                _tile_span(run, start, min(start + TILE_ROWS, run.num_rows), self.window, causal)
                for run in self.tiles
                for start in range(0, run.num_rows, TILE_ROWS)
            ]
            left = max(first - lo for first, lo, _ in spans)
            right = max(hi - first for first, _, hi in spans)
            self._masks[key] = (_band_matrix(left, right, self.window, causal, dtype), left)
        return self._masks[key]


def _first_keys(rows: PagedRows, window: int) -> list[int]:
    """Return, per request, the first key any of its queries can see."""
    if window < 0:
        return [0] * len(rows.q_lens)
    return [max(0, kv - w - window) for w, kv in zip(rows.q_lens, rows.kv_lens, strict=True)]


def _prefix_sums(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the exclusive prefix sums and the total."""
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    return starts, total


def _group(members: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return the blocks: neighbours in length, as few as padding and the workspace allow.

    One group keeps the given order, so that its rows need no permutation.
    """
    if not members:
        return []
    if len(members) * max(lengths[i] for i in members) <= SPLIT_SAVING_TOKENS:
        return [members]
    order = sorted(members, key=lambda i: -lengths[i])
    groups, current = [], [order[0]]
    for place, i in enumerate(order[1:], start=1):
        longest = lengths[current[0]]
        saving = (longest - lengths[i]) * (len(order) - place)
        if (saving > SPLIT_SAVING_TOKENS and 2 * lengths[i] < longest) or (
            len(current) + 1
        ) * longest > GROUP_MAX_TOKENS:
            groups.append(current)
            current = [i]
        else:
            current.append(i)
    groups.append(current)
    return [members] if len(groups) == 1 else groups


def _make_block(rows, members, starts, row_starts, in_order, translate) -> _Block:
    """Return the padded block of `members` (request numbers, in the block's order)."""
    widths = torch.tensor([rows.q_lens[i] for i in members])
    kv_lens = torch.tensor([rows.kv_lens[i] for i in members])
    first_key = torch.tensor([starts[i] for i in members])
    width, length = int(widths.max()), int((kv_lens - first_key).max())
    reqs = rows.req_pool_indices if in_order else rows.req_pool_indices[torch.tensor(members)]
    # A padding key repeats the request's own last one: masked, and never another request's.
    key_pos = torch.minimum(first_key[:, None] + torch.arange(length), (kv_lens - 1)[:, None])
    slots = rows.req_to_token[reqs[:, None].long(), key_pos].long().reshape(-1)
    offset = torch.minimum(torch.arange(width)[None, :], (widths - 1)[:, None])
    begin = torch.tensor([row_starts[i] for i in members])
    q_rows, valid = begin[:, None] + offset, None
    if not (in_order and bool((widths == width).all())):
        valid = torch.arange(width) < widths[:, None]
    return _Block(
        slots if translate is None else translate(slots),
        q_rows,
        valid,
        q_rows.flatten() if valid is None else q_rows[valid],
        (kv_lens - widths)[:, None] + offset,
        first_key,
        kv_lens,
        len(members),
        width,
        length,
    )


def _make_tiles(rows, i, first_key, row_start, translate) -> _Tiles:
    """Return the tiled run of request `i`."""
    kv_len = rows.kv_lens[i]
    slots = rows.req_to_token[rows.req_pool_indices[i], first_key:kv_len].long()
    if translate is not None:
        slots = translate(slots)
    return _Tiles(slots, row_start, rows.q_lens[i], first_key, kv_len)


def _tile_span(run, start, stop, window, causal) -> tuple[int, int, int]:
    """Return the tile's first query position and the keys [lo, hi) it can see."""
    first = run.kv_len - run.num_rows + start
    last = run.kv_len - run.num_rows + stop - 1
    lo = run.first_key if window < 0 else max(run.first_key, first - window)
    hi = run.kv_len if not causal else last + 1
    if window >= 0 and not causal:
        hi = min(hi, last + window + 1)
    return first, lo, hi


def _visible(block: _Block, window: int, causal: bool) -> torch.Tensor:
    """Return [m, width, length] bool: which key each query sees."""
    key = (block.first_key[:, None] + torch.arange(block.length))[:, None, :]
    query = block.q_pos[:, :, None]
    seen = (key <= query) if causal else (key < block.kv_lens[:, None, None])
    seen = seen.expand(-1, block.width, -1)
    if window >= 0:
        seen = seen & (key >= query - window)
        if not causal:
            seen = seen & (key <= query + window)
    return seen


def _band_matrix(left, right, window, causal, dtype) -> torch.Tensor:
    """Return [TILE_ROWS, left + right] additive: row i, column c is a key at distance c-left-i."""
    distance = torch.arange(-left, right)[None, :] - torch.arange(TILE_ROWS)[:, None]
    hidden = distance > 0 if causal else distance > window
    if window >= 0:
        hidden = hidden | (distance < -window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
