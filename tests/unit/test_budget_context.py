# SPDX-License-Identifier: Apache-2.0
"""Which context tokens the budget is told of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash import sweep
from sglang_dflash.draft.block import Block
from sglang_dflash.verify.graphs import context_tokens

BLOCK_SIZE = 4


@pytest.mark.parametrize(
    ("host_waits", "expected"), [(True, 10 + 20 + 2 * BLOCK_SIZE), (False, 99)]
)
def test_reserved_positions_count_only_where_the_host_cannot_know(
    host_waits: bool, expected: int
) -> None:
    batch = SimpleNamespace(seq_lens=torch.tensor([10, 20]), seq_lens_sum=99)
    nothing = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64)
    block = Block(nothing, nothing, nothing)
    assert context_tokens(batch, block, host_waits=host_waits) == expected


def test_the_sweep_counts_the_block_as_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_seconds", lambda *_: 0.01)
    seen: list[tuple[int, float]] = []
    cost = SimpleNamespace(
        knows=lambda part: True, observe=lambda part, n, rows, context, _: seen.append((n, context))
    )
    sweep.measure_steps(
        cost,
        SimpleNamespace(device="cpu"),
        None,
        sweep._Sizes(BLOCK_SIZE, BLOCK_SIZE, 8, (2, 3, 4)),
        SimpleNamespace(numbers=lambda values: values),
    )
    assert {n for n, _ in seen} == {1, 2, 4, 8}
    made_up = 64  # tokens of each request
    assert all(context == n * (made_up + BLOCK_SIZE) for n, context in seen)
