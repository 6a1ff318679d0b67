# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a text are trained on, and what their rows may see.

A block at anchor a has the rows a, a+1, ..., a+B-1: the token at a, then masks. Its rows see the
context at positions before a and the rows of their own block, nothing else; row k learns the
token at a+k. That is what one decode step sees after a tokens were committed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Labels", "block_labels", "draw_anchors", "every_anchor", "visible_rows"]


class Labels(NamedTuple):
    """What the proposing rows of blocks must say.

    Attributes:
        positions: [n, A, B-1] int64, the label's own position, held inside the text.
        known: [n, A, B-1] bool, False where the block hangs over the text's end or is padding.
    """

    positions: torch.Tensor
    known: torch.Tensor


def draw_anchors(
    starts: torch.Tensor, lengths: torch.Tensor, num_anchors: int, generator: torch.Generator
) -> torch.Tensor:
    """Return random anchors of each text, rising, none twice.

    An anchor is a token of the answer that is followed by another: token a and a+1 are both the
    target's own. A text with fewer such tokens gives all of them.

    Args:
        starts: [n] int64, the position of each answer's first token.
        lengths: [n] int64, tokens of each text.
        num_anchors: A, most anchors of a text.
        generator: Source of randomness.

    Returns:
        [n, A'] int64 with A' <= A, padded with -1 at the end of a row.
    """
    most = int((lengths - 1 - starts).max().clamp(min=1))
    keys = torch.rand((len(starts), most), generator=generator)
    positions = starts[:, None] + torch.arange(most)
    beyond = positions >= lengths[:, None] - 1
    chosen = keys.masked_fill(beyond, -1.0).topk(min(num_anchors, most), dim=1).indices
    # Padding sorts to the end, and becomes -1 there.
    large = torch.iinfo(torch.int64).max
    anchors = positions.masked_fill(beyond, large).gather(1, chosen).sort(dim=1).values
    return anchors.masked_fill(anchors == large, -1)


def every_anchor(start: int, length: int) -> torch.Tensor:
    """Return all anchors of one text, [A] int64."""
    return torch.arange(start, length - 1)


def block_labels(anchors: torch.Tensor, lengths: torch.Tensor, block_size: int) -> Labels:
    """Return where the labels of each block are.

    Args:
        anchors: [n, A] int64, padded with -1.
        lengths: [n] int64, tokens of each text.
        block_size: B.
    """
    offsets = torch.arange(1, block_size, device=anchors.device)
    positions = anchors[..., None] + offsets
    last = lengths[:, None, None] - 1
    known = (positions <= last) & (anchors[..., None] >= 0)
    return Labels(torch.minimum(positions, last).clamp(min=0), known)


def visible_rows(
    anchors: torch.Tensor,
    context_len: int,
    block_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    """Return what each row of some blocks may attend to, over [context | rows of these blocks].

    A padding block sees its own rows alone, so that its softmax has something to sum.

    Args:
        anchors: [n, A] int64, padded with -1.
        context_len: C; context token j is at position j.
        block_size: B.
        causal: Whether a row sees no later row of its block.
        window: Tokens that a row sees back from its own position, itself included.

    Returns:
        [n, A*B, C + A*B] bool.
    """
    num_blocks, device = anchors.shape[1], anchors.device
    offsets = torch.arange(block_size, device=device)
    context = torch.arange(context_len, device=device)
    before = context < anchors[..., None, None]  # [n, A, 1, C]
    before = before.expand(-1, -1, block_size, -1)
    distance = offsets[:, None] - offsets[None, :]
    inside = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        inside &= distance >= 0
    if window is not None:
        rows = anchors[..., None, None] + offsets[:, None]
        before = before & (rows - context < window)
        inside &= distance < window
    own = torch.block_diag(*[inside] * num_blocks)  # [A*B, A*B]
    return torch.cat((before.flatten(1, 2), own.expand(len(anchors), -1, -1)), dim=-1)
