# SPDX-License-Identifier: Apache-2.0
"""Noise to draw with: SGLang's seeded one, the same numbers for the same place, and a fresh one."""

from __future__ import annotations

import torch

__all__ = ["exponential", "gumbel", "murmur_hash32"]

_MASK = 0xFFFFFFFF


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """Return the hash of (seed, position, column), MurmurHash3's 32 bits over their 16 bytes.

    Args:
        seed: [R] int64 or uint64.
        positions: [R] integers.
        col_indices: [C], the same columns for all rows, or [R, C].

    Returns:
        [R, C] int64 in 0..2**32 - 1.

    Source: A. Appleby, MurmurHash3_x86_32; `sglang/kernels/ops/sampling/murmur_hash.py`, which has
        the Triton form.
    """
    seed = seed.to(torch.int64)
    state = _mix(torch.zeros_like(seed), seed & _MASK)
    state = _mix(state, (seed >> 32) & _MASK)
    state = _mix(state, positions.to(torch.int64) & _MASK).unsqueeze(1)
    state = _mix(state, col_indices.to(torch.int64) & _MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def gumbel(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Return the Gumbel noise that SGLang's seeded sampler adds to the log-probabilities.

    Args:
        seed: [R] int64.
        positions: [R] integers, the place of the row's input token.
        col_indices: [C] or [R, C], token ids or ranks.

    Returns:
        [R, C] float64.

    Source: `sglang/srt/layers/sampler.py`, `multinomial_with_seed`.
    """
    uniform = murmur_hash32(seed, positions, col_indices).to(torch.float64) / _MASK
    smallest = torch.finfo(torch.float64).min
    return uniform.log().clamp(min=smallest, max=-(2.0**-32)).neg().log().neg()


def exponential(like: torch.Tensor) -> torch.Tensor:
    """Return fresh exponential noise, [...] float32 above 0.

    The smallest of exponentials with rates p is that of token i with probability p_i / sum(p).

    Args:
        like: [...], whose shape and device it has.
    """
    fresh = torch.empty(like.shape, dtype=torch.float32, device=like.device).exponential_()
    return fresh.clamp_min_(torch.finfo(torch.float32).tiny)


def _mix(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = _rotate((key * 0xCC9E2D51) & _MASK, 15)
    key = (key * 0x1B873593) & _MASK
    return (_rotate(state ^ key, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _MASK
