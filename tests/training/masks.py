# SPDX-License-Identifier: Apache-2.0
"""Blocks of two texts, the kinds of layers that draft them, and masks that are wrong."""

from __future__ import annotations

from typing import Any

import torch
from corpora import DFLASH2, HIDDEN, NUM_FEATURES

from sglang_dflash.hf import DraftContext, HFDraft
from sglang_dflash.training.anchors import visible_rows

__all__ = ["ANCHORS", "BLOCK", "CONFIGS", "LENGTH", "MUTANTS", "TOLERANCE", "by_decoding", "inputs"]

# Sums of different lengths group differently, so that the last bits may differ.
TOLERANCE = 1e-12
LENGTH, BLOCK = 30, 5
ANCHORS = torch.tensor(
    [[1, 4, 5, 9, 17, 18, 19, 20, 21, 22, 23, 24, 25, 29], [2, 7, 11, *[-1] * 11]]
)
_SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
CONFIGS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": _SLIDING,
    "sliding, bidirectional": _SLIDING | {"is_causal": False},
    "interleaved rope": {"rope_is_neox_style": False},
    "DFlash2": DFLASH2,
}


def inputs(anchors: torch.Tensor = ANCHORS, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random features [2, T, K*H] and embeddings [2, A, B, H], float64.

    Args:
        anchors: [2, A] int64.
        seed: Of both.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (2, LENGTH, NUM_FEATURES * HIDDEN)
    features = torch.randn(shape, dtype=torch.float64, generator=generator)
    shape = (*anchors.shape, BLOCK, HIDDEN)
    return features, torch.randn(shape, dtype=torch.float64, generator=generator)


def _shows_the_anchors_features(anchors: torch.Tensor, *sizes: int, **kind: Any) -> torch.Tensor:
    shifted = torch.where(anchors >= 0, anchors + 1, anchors)
    return visible_rows(shifted, *sizes, **kind)


def _hides_the_last_context_token(anchors: torch.Tensor, *sizes: int, **kind: Any) -> torch.Tensor:
    return visible_rows(anchors - 1, *sizes, **kind)


def _hides_the_first_token(anchors: torch.Tensor, *sizes: int, **kind: Any) -> torch.Tensor:
    mask = visible_rows(anchors, *sizes, **kind)
    mask[..., 0] = False
    return mask


def _hides_the_last_row(
    anchors: torch.Tensor, context_len: int, block_size: int, **kind: Any
) -> torch.Tensor:
    mask = visible_rows(anchors, context_len, block_size, **kind)
    mask[..., context_len + block_size - 1 :: block_size] = False
    return mask


def _lets_blocks_see_each_other(
    anchors: torch.Tensor, context_len: int, block_size: int, **kind: Any
) -> torch.Tensor:
    mask = visible_rows(anchors, context_len, block_size, **kind)
    mask[..., context_len:] = True
    return mask


def _is_causal_in_the_block(
    anchors: torch.Tensor, context_len: int, block_size: int, **kind: Any
) -> torch.Tensor:
    return visible_rows(anchors, context_len, block_size, **kind | {"causal": True})


MUTANTS = {
    "shows the anchor's features": _shows_the_anchors_features,
    "hides the last context token": _hides_the_last_context_token,
    "hides the first token": _hides_the_first_token,
    "hides each block's last row": _hides_the_last_row,
    "lets blocks see each other": _lets_blocks_see_each_other,
    "is causal in the block": _is_causal_in_the_block,
}


def by_decoding(
    draft: HFDraft, features: torch.Tensor, embeddings: torch.Tensor, anchor: int
) -> torch.Tensor:
    """Return a block's states as a decoder makes them, its context injected in two pieces."""
    context: DraftContext | None = None
    for first, last in ((0, anchor // 2), (anchor // 2, anchor)):
        if first == last:
            continue
        piece = draft.inject(features[:, first:last], torch.arange(first, last))
        context = piece if context is None else context.extended(piece)
    assert context is not None
    return draft(embeddings, torch.arange(anchor, anchor + BLOCK), context)
