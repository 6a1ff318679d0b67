# SPDX-License-Identifier: Apache-2.0
"""The DFlash draft in torch alone, DFlash2's convolutions and selector included.

Per layer: norm, attention of the block's rows over [context | block], norm, SwiGLU. The
context's K and V come from the target's hidden states, not from the draft's own (KV injection):
`K = rope(k_norm(k_proj(c)))`, `V = v_proj(c)` with `c = hidden_norm(fc(features))`. DFlash2 wraps
each sublayer in a convolution over the block's rows; the context is not convolved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from sglang_dflash.draft.borrowed import BorrowedCopies
from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.grouped_conv import GroupedConv, convolved
from sglang_dflash.draft.selector import CandidateSelector
from sglang_dflash.draft.weights import (
    BORROWED,
    canonical_weight_name,
    check_weights,
    read_weight_shapes,
    weight_files,
)
from sglang_dflash.hf.rope import rope_frequencies, rotate

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DraftContext", "HFDraft", "load_draft"]


class DraftContext:
    """K and V of the committed tokens, for every layer of a draft.

    Attributes:
        keys: Per layer [n, num_kv_heads, C, head_dim], rotated.
        values: Per layer [n, num_kv_heads, C, head_dim].
        positions: [C] int64, shared by the n sequences.
    """

    def __init__(
        self, keys: list[torch.Tensor], values: list[torch.Tensor], positions: torch.Tensor
    ) -> None:
        self.keys = keys
        self.values = values
        self.positions = positions

    def extended(self, other: DraftContext) -> DraftContext:
        """Return this context followed by another."""
        return DraftContext(
            [torch.cat(pair, dim=2) for pair in zip(self.keys, other.keys, strict=True)],
            [torch.cat(pair, dim=2) for pair in zip(self.values, other.values, strict=True)],
            torch.cat((self.positions, other.positions)),
        )


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normalised over its last dimension.

        Args:
            x: [..., size] any float type.
        """
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Attention of a block's rows over the injected context and the block itself."""

    def __init__(self, config: DraftConfig, layer_id: int) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.window = config.sliding_windows[layer_id]
        self.causal = config.causal[layer_id]
        self.neox_style = config.rope_is_neox_style
        self.q_proj = nn.Linear(hidden, config.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated keys, and values.

        Args:
            x: [n, T, H], projected context features or normed block rows.
            cos: [T, rotary_dim / 2] float32.
            sin: [T, rotary_dim / 2] float32.

        Returns:
            Two of [n, num_kv_heads, T, head_dim].
        """
        keys = self.k_norm(self._heads(self.k_proj(x)))
        keys = rotate(keys, cos, sin, neox_style=self.neox_style)
        return keys, self._heads(self.v_proj(x))

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        context_keys: torch.Tensor,
        context_values: torch.Tensor,
        distance: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attention's output for a block.

        Args:
            x: [n, B, H], normed rows.
            cos: [B, rotary_dim / 2] float32.
            sin: [B, rotary_dim / 2] float32.
            context_keys: [n, num_kv_heads, C, head_dim].
            context_values: [n, num_kv_heads, C, head_dim].
            distance: [B, C + B] int64, row's position less key's position.

        Returns:
            [n, B, H].
        """
        queries = self.q_norm(self._heads(self.q_proj(x)))
        queries = rotate(queries, cos, sin, neox_style=self.neox_style)
        keys, values = self.keys_values(x, cos, sin)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            visible &= distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        out = F.scaled_dot_product_attention(
            queries,
            torch.cat((context_keys, keys), dim=2),
            torch.cat((context_values, values), dim=2),
            attn_mask=visible,
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n, T, heads * D] -> [n, heads, T, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output.

        Args:
            x: [..., H] any float type.
        """
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Qwen3-like pre-norm layer whose attention also sees the injected context.

    Attributes:
        attention_conv: Wraps the attention; None in a plain draft.
        mlp_conv: Wraps the MLP; None in a plain draft.
    """

    def __init__(self, config: DraftConfig, layer_id: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_id)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = GroupedConv.of(config)
        self.mlp_conv = GroupedConv.of(config)


class HFDraft(nn.Module):
    """A DFlash or DFlash2 draft; its parameters have the checkpoint's names.

    Attributes:
        config: What the checkpoint states.
        candidate_selector: Scores neighbouring candidates; None in a plain draft.
        borrowed_copies: What the checkpoint holds of its target, to be compared; None without one.
    """

    borrowed_copies: BorrowedCopies | None = None

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(config.num_context_features * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.candidate_selector = CandidateSelector.of(config)
        with torch.device("cpu"):  # real even where the parameters are built on "meta"
            self._frequencies, self._rope_factor = rope_frequencies(config)

    def inject(self, features: torch.Tensor, positions: torch.Tensor) -> DraftContext:
        """Return the K and V that committed tokens give every layer (KV injection).

        There is no `input_layernorm` on this path.

        Args:
            features: [n, T, K*H], the captured target layers' outputs, concatenated.
            positions: [T] int64, absolute, shared by the n sequences.
        """
        projected = self.hidden_norm(self.fc(features))
        cos, sin = self._tables(positions)
        pairs = [
            layer.self_attn.keys_values(projected, cos, sin) for layer in self._decoder_layers()
        ]
        return DraftContext([k for k, _ in pairs], [v for _, v in pairs], positions)

    def forward(
        self, embeddings: torch.Tensor, positions: torch.Tensor, context: DraftContext
    ) -> torch.Tensor:
        """Return the final hidden states of a block; row j proposes the token at its own position.

        Args:
            embeddings: [n, B, H], the target's embeddings of anchor, mask, mask, ...
            positions: [B] int64, absolute, shared by the n sequences.
            context: K and V of all tokens before the anchor.

        Returns:
            [n, B, H]; row 0 (the anchor's) proposes nothing.
        """
        cos, sin = self._tables(positions)
        key_positions = torch.cat((context.positions, positions))
        distance = positions[:, None] - key_positions[None, :]
        x = embeddings
        for i, layer in enumerate(self._decoder_layers()):
            attend = partial(
                layer.self_attn,
                cos=cos,
                sin=sin,
                context_keys=context.keys[i],
                context_values=context.values[i],
                distance=distance,
            )
            rows, size = layer.input_layernorm(x), x.shape[1]
            x = x + convolved(rows, attend, layer.attention_conv, size)
            rows = layer.post_attention_layernorm(x)
            x = x + convolved(rows, layer.mlp, layer.mlp_conv, size)
        return self.norm(x)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.layers))

    def _tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, [T, rotary_dim / 2] float32 each."""
        angles = positions[:, None].float() * self._frequencies.to(positions.device)
        return angles.cos() * self._rope_factor, angles.sin() * self._rope_factor


def load_draft(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> HFDraft:
    """Return the draft of a checkpoint's folder, every tensor accounted for.

    Copies of the target's embedding and head stay on disk; `spec_generate` compares them.

    Args:
        path: The folder, with config.json and safetensors.
        dtype: Type to run in; None keeps the stored one.
        device: Where to put it.

    Raises:
        UnsupportedCheckpoint: the checkpoint is neither DFlash nor DFlash2, or its tensors are not
            those that its config.json asks for.

    Example:
        >>> draft = load_draft("Qwen3-8B-DFlash-b16", torch.bfloat16, "cuda")
    """
    config = DraftConfig.from_pretrained(path)
    check_weights(read_weight_shapes(path), config, path)
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        with safe_open(file, "pt", device=str(device)) as stored:
            for name in stored.keys():  # noqa: SIM118
                canonical = canonical_weight_name(name)
                if canonical is not None and canonical not in BORROWED:
                    weights[canonical] = stored.get_tensor(name)
                    if dtype is not None:
                        weights[canonical] = weights[canonical].to(dtype)
    with torch.device("meta"):
        draft = HFDraft(config)
    draft.load_state_dict(weights, strict=True, assign=True)
    draft.borrowed_copies = BorrowedCopies(path)
    return draft.eval().requires_grad_(False)
