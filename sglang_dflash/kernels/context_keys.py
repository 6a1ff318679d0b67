# SPDX-License-Identifier: Apache-2.0
"""Norm and rotary embedding of the context's keys, of all draft layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from sglang_dflash.kernels import has_kernels

__all__ = ["context_keys", "context_keys_reference"]


def context_keys(
    keys: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    eps: float,
    is_neox_style: bool,
) -> torch.Tensor:
    """Return rope(k_norm(keys)), [L, M, kv heads, D] in the dtype of `keys`.

    Args:
        keys: [M, L, kv heads, D], in any strides with dense heads.
        positions: [M] int64.
        weight: [L, D], of the K norm.
        cos_sin: [positions, R] float, R/2 cosines and R/2 sines; R <= D channels of a head turn.
        eps: of the K norm.
        is_neox_style: whether halves turn, or neighbours.
    """
    if not has_kernels(keys):
        return context_keys_reference(
            keys, positions, weight, cos_sin, eps=eps, is_neox_style=is_neox_style
        )
    num_rows, num_layers, num_heads, head_dim = keys.shape
    assert keys.stride()[2:] == (head_dim, 1)
    turned = keys.new_empty(num_layers, num_rows, num_heads, head_dim)
    if num_rows == 0:
        return turned
    _context_keys_kernel[(num_rows, num_layers)](
        keys,
        positions,
        weight,
        cos_sin,
        turned,
        keys.stride(0),
        keys.stride(1),
        num_rows,
        eps,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=cos_sin.shape[1],
        IS_NEOX=is_neox_style,
        HEADS=triton.next_power_of_2(num_heads),
        CHANNELS=triton.next_power_of_2(head_dim),
    )
    return turned


def context_keys_reference(
    keys: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    eps: float,
    is_neox_style: bool,
) -> torch.Tensor:
    """See `context_keys`."""
    normed = functional.rms_norm(keys, keys.shape[-1:], eps=eps) * weight[:, None]
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin.index_select(0, positions)[:, None, None].chunk(2, dim=-1)
    turning, still = normed[..., :rotary_dim], normed[..., rotary_dim:]
    if is_neox_style:
        first, second = turning.chunk(2, dim=-1)
    else:
        first, second = turning[..., ::2], turning[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.cat(turned, -1) if is_neox_style else torch.stack(turned, -1).flatten(-2)
    return torch.cat([joined.to(keys.dtype), still], -1).transpose(0, 1)


@triton.jit(do_not_specialize=["num_rows"])  # of prompts as many as there are lengths
def _context_keys_kernel(
    keys,  # [M, L, heads, D]
    positions,  # [M]
    weight,  # [L, D]
    cos_sin,  # [positions, R]
    turned,  # [L, M, heads, D]
    row_stride,
    layer_stride,
    num_rows,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One program a row and layer."""
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = (head < NUM_HEADS) & (channel < HEAD_DIM)
    turns = channel < ROTARY_DIM
    half = ROTARY_DIM // 2
    if IS_NEOX:
        partner = tl.where(channel < half, channel + half, channel - half)
        sign = tl.where(channel < half, -1.0, 1.0)
        angle = channel % half
    else:
        partner = channel ^ 1
        sign = tl.where(channel % 2 == 0, -1.0, 1.0)
        angle = channel // 2
    partner = tl.where(turns, partner, channel)

    base = keys + row * row_stride + layer * layer_stride + head * HEAD_DIM
    key = tl.load(base + channel, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(base + partner, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(key * key, axis=1) / HEAD_DIM + eps)[:, None]
    dtype = turned.dtype.element_ty
    gains = weight + layer * HEAD_DIM
    in_head = channel < HEAD_DIM
    own_gain = tl.load(gains + channel, mask=in_head, other=0.0).to(tl.float32)
    other_gain = tl.load(gains + partner, mask=in_head, other=0.0).to(tl.float32)
    # Rounded where torch's operators round: after the norm, and after its weight.
    key = ((key * scale).to(dtype).to(tl.float32) * own_gain).to(dtype).to(tl.float32)
    other = ((other * scale).to(dtype).to(tl.float32) * other_gain).to(dtype).to(tl.float32)

    place = cos_sin + tl.load(positions + row) * ROTARY_DIM + angle
    cos = tl.load(place, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(place + half, mask=turns, other=0.0).to(tl.float32)
    result = key * cos + sign * other * sin
    out = turned + (layer * num_rows + row) * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    tl.store(out + channel, result.to(dtype), mask=inside)
