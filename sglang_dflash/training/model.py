# SPDX-License-Identifier: Apache-2.0
"""The reference draft, run on many blocks of a text at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflash.draft.grouped_conv import convolved
from sglang_dflash.hf.draft import HFDraft
from sglang_dflash.hf.rope import rotate
from sglang_dflash.training.anchors import visible_rows

if TYPE_CHECKING:
    from sglang_dflash.hf.draft import Attention

__all__ = ["BlockDraft"]

# Rows of one attention call: enough to fill the matrix units, few enough that a group's rows do
# not pay for each other or for context that only the last of them sees.
_GROUP_ROWS = 64


class _Group(NamedTuple):
    """Some blocks that attend together.

    Attributes:
        rows: Their rows, of all A*B.
        seen: Per kind of layer (causal, window) the context tokens that any of them sees.
        masks: Per kind of layer the mask, [n, 1, rows, tokens seen + rows] bool.
    """

    rows: slice
    seen: dict[tuple[bool, int | None], slice]
    masks: dict[tuple[bool, int | None], torch.Tensor]


class BlockDraft(HFDraft):
    """`HFDraft` with a forward over many blocks that share one injected context.

    It has the reference's modules and parameters; what differs is that rows of several blocks run
    side by side, each under the mask of `visible_rows`.
    """

    def forward_blocks(
        self, embeddings: torch.Tensor, anchors: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """Return the final hidden states of all blocks' rows.

        Args:
            embeddings: [n, A, B, H], the target's embeddings of anchor, mask, mask, ...
            anchors: [n, A] int64, each block's anchor, rising, padded with -1.
            features: [n, C, K*H], the captured layers' outputs at positions 0..C-1.

        Returns:
            [n, A, B, H].
        """
        num_blocks, block_size = embeddings.shape[1:3]
        context = self.inject(features, torch.arange(features.shape[1], device=features.device))
        positions = anchors[..., None] + torch.arange(block_size, device=anchors.device)
        tables = [
            table.view(len(anchors), 1, num_blocks * block_size, -1)  # one angle for all heads
            for table in self._tables(positions.flatten())
        ]
        groups = self._groups(anchors, features.shape[1], block_size)
        x = embeddings.flatten(1, 2)
        for i, layer in enumerate(self._decoder_layers()):
            attend = partial(
                _attend,
                layer.self_attn,
                tables=(tables[0], tables[1]),
                context=(context.keys[i], context.values[i]),
                groups=groups,
            )
            rows = layer.input_layernorm(x)
            x = x + convolved(rows, attend, layer.attention_conv, block_size)
            rows = layer.post_attention_layernorm(x)
            x = x + convolved(rows, layer.mlp, layer.mlp_conv, block_size)
        return self.norm(x).unflatten(1, (num_blocks, block_size))

    def _groups(self, anchors: torch.Tensor, context_len: int, block_size: int) -> list[_Group]:
        """Cut the blocks to groups by rising anchor, each with its masks."""
        kinds = {
            (bool(c), w)
            for c, w in zip(self.config.causal, self.config.sliding_windows, strict=True)
        }
        size = max(1, _GROUP_ROWS // block_size)
        groups = []
        for start in range(0, anchors.shape[1], size):
            part = anchors[:, start : start + size]
            last = min(context_len, max(int(part.max()), 0))
            seen = {(c, window): slice(_first_seen(part, window), last) for c, window in kinds}
            masks = {
                kind: visible_rows(part, last, block_size, causal=kind[0], window=kind[1])[
                    :, None, :, seen[kind].start :
                ]
                for kind in kinds
            }
            rows = slice(start * block_size, (start + part.shape[1]) * block_size)
            groups.append(_Group(rows, seen, masks))
        return groups


def _first_seen(anchors: torch.Tensor, window: int | None) -> int:
    """Return the first context token that a block's row sees; anchors are padded with -1."""
    real = anchors[anchors >= 0]
    if window is None or not len(real):
        return 0
    return max(int(real.min()) - window + 1, 0)


def _attend(
    attention: Attention,
    x: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    context: tuple[torch.Tensor, torch.Tensor],
    groups: list[_Group],
) -> torch.Tensor:
    """Return one layer's attention output for all rows, [n, A*B, H].

    Args:
        attention: The layer's.
        x: [n, A*B, H], normed rows.
        tables: Cosine and sine, [n, 1, A*B, rotary_dim / 2] each.
        context: Keys and values, [n, num_kv_heads, C, head_dim] each.
        groups: Which rows attend together, and to what.
    """
    queries = attention.q_proj(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    queries = rotate(attention.q_norm(queries), *tables, neox_style=attention.neox_style)
    keys, values = attention.keys_values(x, *tables)
    context_keys, context_values = (part.to(values.dtype) for part in context)
    # Norms and rotation leave float32 under autocast; the products run in the values' type.
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)
    kind = (bool(attention.causal), attention.window)
    outs = [
        F.scaled_dot_product_attention(
            queries[:, :, rows],
            torch.cat((context_keys[:, :, seen[kind]], keys[:, :, rows]), dim=2),
            torch.cat((context_values[:, :, seen[kind]], values[:, :, rows]), dim=2),
            attn_mask=masks[kind],
            enable_gqa=True,
        )
        for rows, seen, masks in groups
    ]
    return attention.o_proj(torch.cat(outs, dim=2).transpose(1, 2).flatten(2))
