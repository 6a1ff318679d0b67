# SPDX-License-Identifier: Apache-2.0
"""Where a block's rows stand, and what is proposed for them."""

from __future__ import annotations

import torch

from sglang_dflash.draft.block import BlockBuilder
from sglang_dflash.draft.context import context_kv
from sglang_dflash.draft.proposer import VocabularyHead, propose_greedy

MASK = 5


def test_a_block_is_an_anchor_and_masks_at_its_requests_next_slots() -> None:
    builder = BlockBuilder(3, MASK, max_requests=4, device="cpu")
    req_to_token = torch.arange(40, dtype=torch.int32).view(4, 10) + 100
    for _ in range(2):  # the second call must not see the first's values
        block = builder.build(
            anchors=torch.tensor([7, 8]),
            prefix_lens=torch.tensor([2, 6]),
            req_pool_indices=torch.tensor([3, 1]),
            req_to_token=req_to_token,
        )
        assert block.ids.tolist() == [[7, MASK, MASK], [8, MASK, MASK]]
        assert block.positions.tolist() == [[2, 3, 4], [6, 7, 8]]
        assert block.locs.tolist() == [[132, 133, 134], [116, 117, 118]]
        assert block.locs.dtype == torch.int64
        builder.build(
            torch.tensor([1, 2, 3, 4]), torch.zeros(4, dtype=torch.int64), torch.arange(4),
            req_to_token,
        )  # fmt: skip


def test_the_anchor_row_proposes_nothing_and_ties_go_to_the_lowest_id() -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [9.0, 9.0]])  # the last is padding
    head = VocabularyHead(lambda rows: rows @ weight.T, num_tokens=3)
    hidden = torch.tensor([[[0.0, 9.0], [1.0, 0.0], [0.0, 1.0]]])
    assert propose_greedy(hidden, head).tokens.tolist() == [[0, 1]]


def test_shards_of_a_head_propose_what_the_whole_head_does() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 4, generator=generator).round()  # rounded: ties between shards
    hidden = torch.randn(5, 4, 4, generator=generator).round()
    whole = propose_greedy(hidden, VocabularyHead(lambda rows: rows @ weight.T, 12)).tokens
    rows = hidden[:, 1:].reshape(-1, 4)
    shards = [(rows @ part.T).max(dim=-1, keepdim=True) for part in weight.chunk(3)]
    gathered = iter(
        [
            torch.cat([s.values for s in shards], dim=1),
            torch.cat([s.indices + 4 * rank for rank, s in enumerate(shards)], dim=1),
        ]
    )
    head = VocabularyHead(
        lambda rows: rows @ weight.chunk(3)[1].T, 4, 4, gather=lambda _: next(gathered)
    )
    assert propose_greedy(hidden, head).tokens.tolist() == whole.tolist()


def test_context_kv_is_each_layers_own_projection_norm_and_rotation() -> None:
    layers, rows, hidden, heads, dim = 3, 5, 16, 2, 4
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    context, norms = draw(rows, hidden), draw(layers, dim)
    k_weights, v_weights = draw(layers, heads * dim, hidden), draw(layers, heads * dim, hidden)
    positions = torch.tensor([0, 3, 1, 7, 2])

    angles = draw(8, dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1).contiguous())
        turned = turned * torch.polar(torch.ones(()).double(), angles)[positions].unsqueeze(1)
        return torch.cat([turned.real, turned.imag], dim=-1)

    k, v = context_kv(
        context,
        positions,
        weight=torch.cat([k_weights, v_weights], dim=1).reshape(-1, hidden),
        bias=None,
        k_norm_weight=norms,
        eps=1e-6,
        cos_sin=table,
        is_neox_style=True,
    )
    for layer in range(layers):
        raw = (context @ k_weights[layer].T).view(rows, heads, dim)
        scale = (raw.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(k[layer], rotate(raw * scale * norms[layer]))
        torch.testing.assert_close(v[layer], (context @ v_weights[layer].T).view(raw.shape))
