# SPDX-License-Identifier: Apache-2.0
"""The small operators of a decoder layer with fewer torch calls than SGLang's native forms.

A decode step of a small model spends most of its time between operators. In float32 each
function here equals the native one up to the order of two additions; in bfloat16 RMSNorm
normalises the rounded residual sum, as transformers does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

__all__ = [
    "OPERATORS",
    "is_plain_norm",
    "is_plain_rotary",
    "rms_norm",
    "rotary",
    "rotary_factors",
    "rotate",
    "silu_and_mul",
    "softcap_logits",
]


def rms_norm(
    self: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x (+ residual), and the sum where there is a residual.

    Args:
        self: the layer.
        x: [..., hidden] float.
        residual: [..., hidden] float, or None.
        post_residual_addition: [..., hidden] float, or None.
        quant_linear: SGLang's fusion partner; unused on the CPU, as in the native form.
    """
    if not is_plain_norm(self) or self.weight.dtype is not x.dtype:
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
    x = x + residual
    if post_residual_addition is not None:
        x = x + post_residual_addition
    return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon), x


def silu_and_mul(self: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half.

    Args:
        self: the layer.
        x: [..., 2 * width] float.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary(
    self: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: object | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key rotated; one pass where they lie next to each other.

    Args:
        self: the layer.
        positions: [T] int64.
        query: [T, q_heads * head_size] float.
        key: [T, kv_heads * head_size] float of query's dtype.
        offsets: [T] int64 added to positions, or None.
        fused_set_kv_buffer_arg: None on a CPU.
    """
    if not is_plain_rotary(self) or offsets is not None or query.dim() != 2:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = rotary_factors(self, positions, query.dtype)
    joint = _joint_view(query, key)
    if joint is not None:
        turned = rotate(joint, cos, sin, self.head_size)
        return turned[:, : query.shape[1]], turned[:, query.shape[1] :]
    return rotate(query, cos, sin, self.head_size), rotate(key, cos, sin, self.head_size)


def is_plain_norm(norm: torch.nn.Module) -> bool:
    """Return whether `norm` is an RMSNorm without any of SGLang's special roundings."""
    return (
        type(norm) is RMSNorm
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )


def is_plain_rotary(rotary_emb: torch.nn.Module) -> bool:
    """Return whether `rotary_emb` turns whole heads in halves, by a table of its positions."""
    return (
        isinstance(rotary_emb, RotaryEmbedding)
        and type(rotary_emb).forward_native is RotaryEmbedding.forward_native
        and rotary_emb.rotary_dim == rotary_emb.head_size
        and rotary_emb.is_neox_style
        and not hasattr(rotary_emb, "sin_cos_cache")
    )


def rotary_factors(
    rotary_emb: RotaryEmbedding, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `rotate` multiplies by at each position.

    Args:
        rotary_emb: a plain rotary embedding.
        positions: [T] int64.
        dtype: dtype of the queries.

    Returns:
        cos and signed sin, each [T, 1, head_size] of `dtype`.
    """
    factors = _table(rotary_emb, dtype).index_select(0, positions.flatten())
    return factors[:, 0], factors[:, 1]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_size: int) -> torch.Tensor:
    """Return x with the halves (a, b) of each head replaced by (a cos - b sin, b cos + a sin).

    Args:
        x: [T, heads * head_size] float; rows may be strided.
        cos: [T, 1, head_size], both halves the same.
        sin: [T, 1, head_size], the first half negated.
        head_size: width of a head.
    """
    heads = x.unflatten(1, (-1, head_size))
    half = head_size // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos).addcmul_(swapped, sin).flatten(1)


def softcap_logits(
    full_logits: torch.Tensor,
    final_logit_softcapping: float | None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return cap * tanh(logits / cap), in place or in `output` (SGLang has it in Triton only).

    Args:
        full_logits: [rows, vocabulary] float, overwritten where `output` is None.
        final_logit_softcapping: the cap, or None for a plain copy.
        output: [rows, vocabulary] float32, or None.
    """
    capped = full_logits.float()
    if final_logit_softcapping is not None:
        capped = torch.tanh(capped / final_logit_softcapping) * final_logit_softcapping
    return (full_logits if output is None else output).copy_(capped)


def _joint_view(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return query and key as one [T, both] view if they are neighbours in one buffer."""
    adjacent = (
        key.data_ptr() == query.data_ptr() + query.shape[1] * query.element_size()
        and query.stride() == key.stride()
        and query.stride(0) >= query.shape[1] + key.shape[1]
        and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    )
    if not adjacent:
        return None
    shape = (query.shape[0], query.shape[1] + key.shape[1])
    return query.as_strided(shape, query.stride())


def _table(self: RotaryEmbedding, dtype: torch.dtype) -> torch.Tensor:
    """Return [positions, 2, 1, head_size]: cos twice, then -sin and sin, in `dtype`.

    Made again when SGLang replaces its own table (growth, change of dtype).
    """
    made = self.__dict__.get("_dflash_table")
    if made is None or made[0] is not self.cos_sin_cache or made[1].dtype is not dtype:
        cos, sin = self.cos_sin_cache.to(dtype).chunk(2, dim=-1)
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        made = (self.cos_sin_cache, table[:, :, None].contiguous())
        self.__dict__["_dflash_table"] = made
    return made[1]


def _rotary_classes() -> list[type]:
    """Return the rotary classes that differ from the base only in their table."""
    from sglang.srt.layers import rotary_embedding

    return [
        kind
        for kind in vars(rotary_embedding).values()
        if isinstance(kind, type)
        and issubclass(kind, RotaryEmbedding)
        and kind.forward_native is RotaryEmbedding.forward_native
    ]


OPERATORS: list[tuple[type, object]] = [
    (RMSNorm, rms_norm),
    (SiluAndMul, silu_and_mul),
    *((kind, rotary) for kind in _rotary_classes()),
]
