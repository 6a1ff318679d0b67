# SPDX-License-Identifier: Apache-2.0
"""The greedy rule against a loop that says what it means."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.verify.accept import accept_greedy


def accepted_by_a_loop(proposals: list[int], target: list[int]) -> list[int]:
    """Return the tokens that plain decoding would have produced as far as the block reaches."""
    committed = []
    for proposal, token in zip(proposals, target, strict=False):
        committed.append(token)
        if proposal != token:
            return committed
    return [*committed, target[len(proposals)]]


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
def test_commits_the_agreeing_prefix_and_one_more(block_size: int) -> None:
    generator = torch.Generator().manual_seed(block_size)
    proposals = torch.randint(0, 2, (200, block_size - 1), generator=generator)
    target = torch.randint(0, 2, (200, block_size), generator=generator)
    verdict = accept_greedy(proposals, target)
    for row in range(200):
        expected = accepted_by_a_loop(proposals[row].tolist(), target[row].tolist())
        count = int(verdict.num_committed[row])
        assert verdict.tokens[row, :count].tolist() == expected
        assert int(verdict.next_anchor[row]) == expected[-1]


def test_a_later_agreement_does_not_count() -> None:
    verdict = accept_greedy(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7, 1]]))
    assert verdict.num_committed.tolist() == [2]
    assert verdict.next_anchor.tolist() == [9]


def test_dtypes_are_those_the_scheduler_takes() -> None:
    verdict = accept_greedy(torch.tensor([[1]]), torch.tensor([[1, 2]]))
    assert verdict.num_committed.dtype == torch.int32
    assert verdict.next_anchor.dtype == torch.int64
