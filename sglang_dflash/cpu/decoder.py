# SPDX-License-Identifier: Apache-2.0
"""The decoder stack of Llama, Mistral, Qwen2 and Qwen3 as one straight loop.

SGLang's modules serve every kind of parallelism, quantisation and kernel, and pay for it between
two operators: about 0.5 ms a layer on a CPU, more than the arithmetic of a small model's decode
step. This loop calls the same operators in the same order on the same weights. It takes over only
where nothing else is asked for: one rank, plain weights, plain rotary embedding.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from sglang.srt.models.mistral import MistralForCausalLM
from sglang.srt.models.qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM

from sglang_dflash.cpu.linear import PackedLinearMethod, PackedWeight
from sglang_dflash.cpu.operators import is_plain_norm, is_plain_rotary, rotary_factors, rotate

__all__ = ["straighten"]

_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_LAYERS = (LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


class _Norm(NamedTuple):
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm over the last dimension of x [..., width]."""
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Linear(NamedTuple):
    packed: PackedWeight
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with x [T, in]."""
        return self.packed.product(x, self.bias)


class _Layer(NamedTuple):
    input_norm: _Norm
    qkv: _Linear
    q_norm: _Norm | None
    k_norm: _Norm | None
    attention: torch.nn.Module
    out: _Linear
    mlp_norm: _Norm
    gate_up: _Linear
    down: _Linear


class _Stack(NamedTuple):
    layers: list[_Layer]
    rotary: RotaryEmbedding
    final_norm: _Norm
    q_width: int
    kv_width: int
    head_dim: int


def straighten(model: torch.nn.Module) -> bool:
    """Replace the forward of `model`'s decoder stack by the loop; return whether it was."""
    if type(model) not in _MODELS or not _is_plain(model.model):
        return False
    inner = model.model
    stack = _read_stack(inner)
    general = inner.forward

    def forward(
        self: torch.nn.Module,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        if input_ids is not None and input_ids.numel() == 0:
            return general(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        captured: list[torch.Tensor] = []
        hidden = _run(stack, hidden, positions, forward_batch, self.layers_to_capture, captured)
        return (hidden, captured) if captured else hidden

    inner.forward = types.MethodType(forward, inner)
    return True


def _run(
    stack: _Stack,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layers_to_capture: list[int],
    captured: list[torch.Tensor],
) -> torch.Tensor:
    """Return the normed output [T, hidden]; layer i's input is captured for i in the list."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    attend = get_attn_backend().forward_extend
    cos, sin = rotary_factors(stack.rotary, positions, hidden.dtype)
    q_width, turned_width = stack.q_width, stack.q_width + stack.kv_width
    for index, layer in enumerate(stack.layers):
        if index in layers_to_capture:
            captured.append(hidden)
        qkv = layer.qkv(layer.input_norm(hidden))
        if layer.q_norm is None:
            turned = rotate(qkv[:, :turned_width], cos, sin, stack.head_dim)
            q, k = turned[:, :q_width], turned[:, q_width:]
        else:
            q = _normed_heads(layer.q_norm, qkv[:, :q_width], stack.head_dim)
            k = _normed_heads(layer.k_norm, qkv[:, q_width:turned_width], stack.head_dim)
            q = rotate(q, cos, sin, stack.head_dim)
            k = rotate(k, cos, sin, stack.head_dim)
        out = attend(q, k, qkv[:, turned_width:], layer.attention, forward_batch)
        hidden = hidden + layer.out(out)
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
        hidden = hidden + layer.down(F.silu(gate).mul_(up))
    return stack.final_norm(hidden)


def _normed_heads(norm: _Norm, x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return x [T, heads * head_dim] with each head normed."""
    return norm(x.unflatten(1, (-1, head_dim))).flatten(1)


def _is_plain(inner: torch.nn.Module) -> bool:
    """Return whether the loop computes what the decoder stack `inner` would."""
    from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

    parallel = get_parallel()
    if parallel.tp_size * parallel.pp_size > 1 or get_lora().enable_lora:
        return False
    if get_exec().deterministic.rl_on_policy_target is not None or hasattr(
        inner.config, "scale_emb"
    ):
        return False
    return is_plain_norm(inner.norm) and all(_is_plain_layer(layer) for layer in inner.layers)


def _is_plain_layer(layer: torch.nn.Module) -> bool:
    if type(layer) not in _LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        all(type(linear.quant_method) is PackedLinearMethod for linear in linears)
        and all(is_plain_norm(norm) for norm in norms)
        and is_plain_rotary(attention.rotary_emb)
        and not attention.attn.is_cross_attention
    )


def _read_stack(inner: torch.nn.Module) -> _Stack:
    """Return the weights and constants of the decoder stack."""
    attention = inner.layers[0].self_attn
    return _Stack(
        [_read_layer(layer) for layer in inner.layers],
        attention.rotary_emb,
        _norm(inner.norm),
        attention.q_size,
        attention.kv_size,
        attention.head_dim,
    )


def _read_layer(layer: torch.nn.Module) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = hasattr(attention, "q_norm")
    return _Layer(
        _norm(layer.input_layernorm),
        _linear(attention.qkv_proj),
        _norm(attention.q_norm) if has_head_norms else None,
        _norm(attention.k_norm) if has_head_norms else None,
        attention.attn,
        _linear(attention.o_proj),
        _norm(layer.post_attention_layernorm),
        _linear(mlp.gate_up_proj),
        _linear(mlp.down_proj),
    )


def _norm(module: torch.nn.Module) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


def _linear(module: torch.nn.Module) -> _Linear:
    return _Linear(module.packed_weight, module.bias)
