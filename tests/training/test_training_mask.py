# SPDX-License-Identifier: Apache-2.0
"""What a block sees in training is what it sees in decoding, to the last digits of float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from corpora import HIDDEN, NUM_FEATURES, config_of, random_draft

import sglang_dflash.training.model
from sglang_dflash.hf import DraftContext, HFDraft
from sglang_dflash.training.anchors import visible_rows
from sglang_dflash.training.model import BlockDraft

# Sums of different lengths group differently, so that the last bits may differ.
TOLERANCE = 1e-12
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
CONFIGS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": SLIDING,
    "sliding, bidirectional": SLIDING | {"is_causal": False},
    "interleaved rope": {"rope_is_neox_style": False},
}
LENGTH, BLOCK = 30, 5
ANCHORS = torch.tensor(
    [[1, 4, 5, 9, 17, 18, 19, 20, 21, 22, 23, 24, 25, 29], [2, 7, 11, *[-1] * 11]]
)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and rotations compute in float32; here they shall not hide what the mask does."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(sglang_dflash.training.model, "_GROUP_ROWS", 15)


def inputs(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [2, T, K*H] and embeddings [2, A, B, H]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, LENGTH, NUM_FEATURES * HIDDEN)
    features = torch.randn(shape, dtype=torch.float64, generator=generator)
    shape = (*ANCHORS.shape, BLOCK, HIDDEN)
    return features, torch.randn(shape, dtype=torch.float64, generator=generator)


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


@torch.no_grad()
def greatest_difference(draft: BlockDraft) -> float:
    features, embeddings = inputs()
    trained = draft.forward_blocks(embeddings, ANCHORS, features)
    worst = 0.0
    for text, block in (ANCHORS >= 0).nonzero().tolist():
        one = slice(text, text + 1)
        decoded = by_decoding(
            draft, features[one], embeddings[one, block], int(ANCHORS[text, block])
        )
        worst = max(worst, float((trained[one, block] - decoded).abs().max()))
    return worst


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_blocks_side_by_side_equal_decoding_one_by_one(changes: dict[str, Any]) -> None:
    assert greatest_difference(random_draft(config_of(**changes)).double()) <= TOLERANCE


def shows_the_anchors_features(anchors: torch.Tensor, *sizes: int, **kind: Any) -> torch.Tensor:
    shifted = torch.where(anchors >= 0, anchors + 1, anchors)
    return visible_rows(shifted, *sizes, **kind)


def hides_the_last_context_token(anchors: torch.Tensor, *sizes: int, **kind: Any) -> torch.Tensor:
    return visible_rows(anchors - 1, *sizes, **kind)


def lets_blocks_see_each_other(
    anchors: torch.Tensor, context_len: int, block_size: int, **kind: Any
) -> torch.Tensor:
    mask = visible_rows(anchors, context_len, block_size, **kind)
    mask[..., context_len:] = True
    return mask


def is_causal_in_the_block(
    anchors: torch.Tensor, context_len: int, block_size: int, **kind: Any
) -> torch.Tensor:
    return visible_rows(anchors, context_len, block_size, **kind | {"causal": True})


MUTANTS = [
    shows_the_anchors_features,
    hides_the_last_context_token,
    lets_blocks_see_each_other,
    is_causal_in_the_block,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_sees_a_wrong_mask(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_dflash.training.model, "visible_rows", mutant)
    assert greatest_difference(random_draft(config_of()).double()) > 1e-3


def test_padding_blocks_give_numbers_and_no_gradient_to_others() -> None:
    draft = random_draft(config_of()).double()
    features, embeddings = inputs()
    embeddings.requires_grad_()
    states = draft.forward_blocks(embeddings, ANCHORS, features)
    assert bool(torch.isfinite(states).all())
    states[ANCHORS >= 0].sum().backward()
    assert embeddings.grad is not None
    assert not embeddings.grad[ANCHORS < 0].any()


def test_a_block_learns_nothing_from_later_text_or_other_blocks() -> None:
    draft = random_draft(config_of()).double()
    features, embeddings = inputs()
    features.requires_grad_()
    embeddings.requires_grad_()
    block, anchor = 3, int(ANCHORS[0, 3])
    draft.forward_blocks(embeddings, ANCHORS, features)[0, block].square().sum().backward()
    assert features.grad is not None
    assert embeddings.grad is not None
    read = features.grad[0].abs().sum(-1) > 0
    assert read.tolist() == [position < anchor for position in range(LENGTH)]
    assert not features.grad[1].any()
    others = torch.arange(ANCHORS.shape[1]) != block
    assert not embeddings.grad[0, others].any()
