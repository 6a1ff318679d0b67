# SPDX-License-Identifier: Apache-2.0
"""What a block sees in training is what it sees in decoding, to the last digits of float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from corpora import config_of, random_draft
from masks import ANCHORS, CONFIGS, LENGTH, MUTANTS, TOLERANCE, by_decoding, inputs

import sglang_dflash.training.model
from sglang_dflash.training.model import BlockDraft


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and rotations compute in float32; here they shall not hide what the mask does."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(sglang_dflash.training.model, "_GROUP_ROWS", 15)


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


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
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
