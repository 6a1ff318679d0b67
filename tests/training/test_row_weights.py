# SPDX-License-Identifier: Apache-2.0
"""Weights of a block's rows against loops, and what they are for."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash.training.row_weights import decay_weights, dpace_weights
from sglang_dflash.training.settings import LoopSettings


@pytest.mark.parametrize(("block_size", "decay"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_fixed_weights_fall_as_published(block_size: int, decay: float) -> None:
    assert LoopSettings().decay_of(block_size) == decay
    weights = decay_weights(block_size, decay)
    expected = [math.exp(-(k - 1) / decay) for k in range(1, block_size)]
    assert weights.tolist() == pytest.approx(expected)


def by_loops(confidences: list[float], alpha: float) -> list[float]:
    """Return the weights of one block's labelled rows, term by term."""
    weights = []
    for j in range(len(confidences)):
        total = 0.0
        for m in range(j, len(confidences)):
            product = 1.0
            for q in confidences[: m + 1]:
                product *= (1 - alpha) * q + alpha
            total += product
        weights.append(total)
    return weights


@pytest.mark.parametrize("seed", range(8))
def test_weights_of_whole_and_cut_blocks_are_those_of_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    texts, blocks, rows = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(3))
    shape, alpha = (texts, blocks, rows), float(torch.rand((), generator=generator))
    confidences = torch.rand(shape, generator=generator, dtype=torch.float64)
    labelled = torch.randint(rows + 1, shape[:2], generator=generator)
    known = torch.arange(rows) < labelled[..., None]
    weights = dpace_weights(confidences, known, alpha)
    assert weights.dtype == torch.float64
    for text in range(texts):
        for block in range(blocks):
            count = int(labelled[text, block])
            expected = by_loops(confidences[text, block, :count].tolist(), alpha)
            found = weights[text, block].tolist()
            assert found == pytest.approx([*expected, *[0.0] * (rows - count)], rel=1e-12)


def test_alpha_one_gives_straight_weights_whatever_the_draft_knows() -> None:
    confidences = torch.rand((5, 7), generator=torch.Generator().manual_seed(0))
    known = torch.ones((5, 7), dtype=torch.bool)
    known[1, 4:] = False
    weights = dpace_weights(confidences, known, 1.0)
    assert weights[0].tolist() == [7, 6, 5, 4, 3, 2, 1]
    assert weights[1].tolist() == [4, 3, 2, 1, 0, 0, 0]


def test_weights_are_the_gradient_of_the_expected_length() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand((4, 7), generator=generator, dtype=torch.float64)
    log_probs.requires_grad_()
    length = log_probs.exp().cumprod(dim=-1).sum()
    (expected,) = torch.autograd.grad(length, log_probs)
    known = torch.ones((4, 7), dtype=torch.bool)
    weights = dpace_weights(log_probs.detach().exp(), known, 0.0)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


def test_weights_have_no_gradient() -> None:
    confidences = torch.full((2, 3), 0.5, requires_grad=True)
    known = torch.ones((2, 3), dtype=torch.bool)
    assert not dpace_weights(confidences, known, 0.5).requires_grad
