# SPDX-License-Identifier: Apache-2.0
"""Which weights each optimizer moves, and how."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang_dflash.training.optimizers import Optimizers
from sglang_dflash.training.settings import LoopSettings

RATE = 1e-2


def moves_of(
    optimizer: str, shapes: list[tuple[int, ...]], names: list[str] | None = None
) -> list[torch.Tensor]:
    """Return how far one step on random gradients moves each parameter."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    named = zip(names or ["weight"] * len(shapes), parameters, strict=True)
    found = Optimizers(named, LoopSettings(optimizer=optimizer, learning_rate=RATE))
    found.zero_grad()
    for each in parameters:
        each.grad = torch.randn(each.shape, generator=generator)
    found.set_rate(RATE)
    found.step()
    return [each.detach() for each in parameters]


def test_adamw_moves_everything_by_the_rate() -> None:
    for move in moves_of("adamw", [(8, 24), (8,)]):
        torch.testing.assert_close(move.abs(), torch.full_like(move, RATE))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_muon_moves_matrices_along_all_directions_alike(shape: tuple[int, int]) -> None:
    move, norm = moves_of("muon", [shape, (8,)])
    # 0.2 sqrt(longer side) times singular values that Newton-Schulz leaves between 0.6 and 1.3:
    # AdamW's size of update, whatever the gradient's.
    strengths = torch.linalg.svdvals(move) / (RATE * 0.2 * max(shape) ** 0.5)
    assert strengths.min() > 0.5
    assert strengths.max() < 1.4
    torch.testing.assert_close(norm.abs(), torch.full_like(norm, RATE))


def test_a_table_of_tokens_is_no_matrix() -> None:
    names = ["candidate_selector.predecessor_codebook", "candidate_selector.hidden_projection"]
    table, matrix = moves_of("muon", [(16, 16), (16, 16)], names)
    torch.testing.assert_close(table.abs(), torch.full_like(table, RATE))
    assert torch.linalg.svdvals(matrix).min() > 0.5 * RATE * 0.2 * 16**0.5


def test_a_model_of_norms_alone_needs_no_muon() -> None:
    (move,) = moves_of("muon", [(8,)])
    torch.testing.assert_close(move.abs(), torch.full_like(move, RATE))
