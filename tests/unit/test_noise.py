# SPDX-License-Identifier: Apache-2.0
"""The seeded noise, against MurmurHash3's published form and the law it should have."""

from __future__ import annotations

import struct

import pytest
import torch
from laws import assert_follows

from sglang_dflash.noise import gumbel, murmur_hash32


def murmur3_32(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, as its author wrote it down; data in whole words."""
    mask, state = 0xFFFFFFFF, 0
    for (word,) in struct.iter_unpack("<I", data):
        key = word * 0xCC9E2D51 & mask
        key = (key << 15 | key >> 17) & mask
        state ^= key * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= len(data)
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        state = (state ^ state >> shift) * factor & mask
    return state ^ state >> 16


def test_the_hash_is_murmur3() -> None:
    assert murmur3_32(b"test") == 0xBA6BD213  # a published test vector
    seeds = [0, 1, 42, 2**31, 2**40 + 17, 2**63 - 1]
    positions, columns = [0, 5, 77, 4095, 2**20, 3], [0, 1, 319, 151_935]
    found = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3_32(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.tolist() == expected


def test_columns_of_their_own_for_each_row() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.tensor([10, 20])
    columns = torch.tensor([[5, 9, 1], [2, 2, 8]])
    whole = gumbel(seeds, positions, torch.arange(10))
    assert torch.equal(gumbel(seeds, positions, columns), whole.gather(1, columns))


@pytest.mark.parametrize("seed_moves", [True, False])
def test_the_largest_sum_follows_the_law(seed_moves: bool) -> None:
    """Over seeds at one place, and over the places of one seed."""
    law = torch.tensor([0.05, 0.3, 0.15, 0.4, 0.1], dtype=torch.float64)
    many, same = torch.arange(200_000), torch.full((200_000,), 7)
    seeds, positions = (many, same) if seed_moves else (same, many)
    drawn = (law.log() + gumbel(seeds, positions, torch.arange(5))).argmax(1)
    assert_follows(torch.bincount(drawn, minlength=5), law)
