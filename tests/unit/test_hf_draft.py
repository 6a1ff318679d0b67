# SPDX-License-Identifier: Apache-2.0
"""The draft in plain torch, against loops and transformers' Qwen3."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from sglang_dflash.draft.config import DraftConfig, expected_weights
from sglang_dflash.hf import HFDraft

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
}
CONV = {"conv_kernel_size": 3, "conv_group_size": 4}
SELECTOR = {"architectures": ["DFlash2DraftModel"], "selector_rank": 6, "selector_top_k": 5}
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 6,
}


def config_of(**changes: Any) -> DraftConfig:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "rope_theta": 100.0,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
    }
    return DraftConfig.from_dict(SIZES | config | changes, source="test")


def random_draft(config: DraftConfig, seed: int = 0) -> HFDraft:
    """Return a float64 draft whose every parameter is random, norms included."""
    generator = torch.Generator().manual_seed(seed)
    draft = HFDraft(config).double().requires_grad_(False)
    for parameter in draft.parameters():
        parameter.normal_(0, 1, generator=generator)
        parameter.mul_(parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0)
    return draft


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / math.sqrt(float((x * x).mean()) + eps)


def turned(x: torch.Tensor, position: int, config: DraftConfig) -> torch.Tensor:
    """Rotate one head's channels at a position, pair by pair."""
    out, half = x.clone(), config.rotary_dim // 2
    for pair in range(half):
        angle = position / config.rope_theta ** (2 * pair / config.rotary_dim)
        i, j = (pair, pair + half) if config.rope_is_neox_style else (2 * pair, 2 * pair + 1)
        out[i] = x[i] * math.cos(angle) - x[j] * math.sin(angle)
        out[j] = x[j] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def by_conv(
    draft: HFDraft, conv: str, side: int, rows: list[torch.Tensor], source: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return a block's rows convolved channel by channel, the kernels made of `source`'s rows.

    Args:
        draft: Float64; without convolutions the rows come back as they are.
        conv: Name of the convolution.
        side: 0 before the sublayer, 1 after it.
        rows: B of [H].
        source: B of [H], what went into the first side.
    """
    c, weights, out = draft.config, dict(draft.named_parameters()), []
    if not c.conv_kernel_size:
        return rows
    num_groups = c.hidden_size // c.conv_group_size
    for i, x in enumerate(source):
        moving = weights[f"{conv}.kernel_projection.weight"] @ x
        row = torch.zeros_like(x)
        for tap in range(min(c.conv_kernel_size, i + 1)):
            for channel in range(c.hidden_size):
                group = channel // c.conv_group_size
                kernel = weights[f"{conv}.base_kernel"][side, tap, channel]
                kernel = kernel + moving[(side * c.conv_kernel_size + tap) * num_groups + group]
                row[channel] += kernel * rows[i - tap][channel]
        out.append(row)
    return out


def mlp_by_loops(draft: HFDraft, layer: int, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a layer's MLP adds to the rows of a block."""
    weights = dict(draft.named_parameters())
    scale = weights[f"layers.{layer}.post_attention_layernorm.weight"]
    mlp, conv = f"layers.{layer}.mlp", f"layers.{layer}.mlp_conv"
    inside = [normed(x, scale, draft.config.rms_norm_eps) for x in rows]
    outs = []
    for x in by_conv(draft, conv, 0, inside, inside):
        gate = weights[f"{mlp}.gate_proj.weight"] @ x
        wide = gate * gate.sigmoid() * (weights[f"{mlp}.up_proj.weight"] @ x)
        outs.append(weights[f"{mlp}.down_proj.weight"] @ wide)
    return by_conv(draft, conv, 1, outs, inside)


def by_loops(draft: HFDraft, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the block's hidden states, token by token and head by head.

    Args:
        draft: Float64.
        features: [C, K*H] at positions 0..C-1.
        embeddings: [B, H] at positions C..C+B-1.
    """
    c, size = draft.config, draft.config.head_dim
    weights = dict(draft.named_parameters())
    context = [normed(weights["fc.weight"] @ f, weights["hidden_norm.weight"], c.rms_norm_eps)
               for f in features]  # fmt: skip
    rows = list(embeddings)

    def project(layer: int, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        out = weights[f"layers.{layer}.self_attn.{name}.weight"] @ x
        if c.attention_bias:
            out = out + weights[f"layers.{layer}.self_attn.{name}.bias"]
        return [out[i : i + size] for i in range(0, len(out), size)]

    def head(layer: int, name: str, x: torch.Tensor, position: int) -> list[torch.Tensor]:
        scale = weights[f"layers.{layer}.self_attn.{name[0]}_norm.weight"]
        return [turned(normed(h, scale, c.rms_norm_eps), position, c)
                for h in project(layer, name, x)]  # fmt: skip

    for layer in range(c.num_layers):
        before = weights[f"layers.{layer}.input_layernorm.weight"]
        conv = f"layers.{layer}.attention_conv"
        source = [normed(x, before, c.rms_norm_eps) for x in rows]
        inside = by_conv(draft, conv, 0, source, source)
        seen = [*context, *inside]
        keys = [head(layer, "k_proj", x, position) for position, x in enumerate(seen)]
        values = [project(layer, "v_proj", x) for x in seen]
        outs = []
        for i, x in enumerate(inside):
            position = len(context) + i
            visible = [
                j for j in range(len(seen))
                if (not c.causal[layer] or j <= position)
                and (c.sliding_windows[layer] is None or position - j < c.sliding_windows[layer])
            ]  # fmt: skip
            mixed = []
            for h, query in enumerate(head(layer, "q_proj", x, position)):
                kv = h * c.num_kv_heads // c.num_heads
                scores = torch.stack([query @ keys[j][kv] for j in visible]) / math.sqrt(size)
                parts = zip(scores.softmax(0), visible, strict=True)
                mixed.append(sum(w * values[j][kv] for w, j in parts))
            outs.append(torch.cat(project(layer, "o_proj", torch.cat(mixed))))
        outs = by_conv(draft, conv, 1, outs, source)
        rows = [x + out for x, out in zip(rows, outs, strict=True)]
        outs = mlp_by_loops(draft, layer, rows)
        rows = [x + out for x, out in zip(rows, outs, strict=True)]
    return torch.stack([normed(x, weights["norm.weight"], c.rms_norm_eps) for x in rows])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True},
        {"rope_is_neox_style": False},
        {"rope_scaling": {"rope_type": "default", "rope_dim": 4}},
        {"is_causal": True},
        SLIDING,
        SLIDING | {"is_causal": False},
        CONV,
        CONV | SLIDING,
    ],
)
@pytest.mark.parametrize("context_tokens", [1, 11])
def test_block_is_computed_as_the_loops_say(changes: dict[str, Any], context_tokens: int) -> None:
    draft = random_draft(config_of(**changes))
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, context_tokens, 48, generator=generator, dtype=torch.float64)
    block = torch.randn(1, 5, 24, generator=generator, dtype=torch.float64)
    context = draft.inject(features, torch.arange(context_tokens))
    positions = torch.arange(context_tokens, context_tokens + 5)
    expected = by_loops(draft, features[0], block[0])
    # Norms and rotations go through float32, as in serving.
    torch.testing.assert_close(draft(block, positions, context)[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", [SLIDING, SLIDING | CONV])
def test_context_may_come_in_pieces_and_in_batches(kind: dict[str, Any]) -> None:
    draft = random_draft(config_of(**kind))
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(3, 9, 48, generator=generator, dtype=torch.float64)
    block = torch.randn(3, 4, 24, generator=generator, dtype=torch.float64)
    positions = torch.arange(9, 13)
    whole = draft(block, positions, draft.inject(features, torch.arange(9)))
    pieces = draft.inject(features[:, :2], torch.arange(2))
    for start, end in ((2, 3), (3, 9)):
        more = draft.inject(features[:, start:end], torch.arange(start, end))
        pieces = pieces.extended(more)
    torch.testing.assert_close(draft(block, positions, pieces), whole)
    alone = draft.inject(features[1:2], torch.arange(9))
    torch.testing.assert_close(draft(block[1:2], positions, alone), whole[1:2])


@pytest.mark.parametrize("parts", [{}, CONV, SELECTOR, CONV | SELECTOR])
def test_parameters_are_the_checkpoints(parts: dict[str, Any]) -> None:
    config = config_of(**parts)
    draft = HFDraft(config)
    found = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    assert found == expected_weights(config)
    assert (draft.candidate_selector is None) == ("selector_rank" not in parts)
    for layer in draft.layers:
        assert (layer.attention_conv is None) == ("conv_kernel_size" not in parts)
        assert (layer.mlp_conv is None) == ("conv_kernel_size" not in parts)


def test_new_convolutions_leave_a_plain_draft_as_it_is() -> None:
    plain = random_draft(config_of())
    draft = HFDraft(config_of(**CONV, **SELECTOR)).double().requires_grad_(False)
    assert draft.load_state_dict(plain.state_dict(), strict=False).unexpected_keys == []
    generator = torch.Generator().manual_seed(4)
    context = plain.inject(torch.randn(2, 6, 48, generator=generator).double(), torch.arange(6))
    block = torch.randn(2, 4, 24, generator=generator, dtype=torch.float64)
    positions = torch.arange(6, 10)
    assert torch.equal(draft(block, positions, context), plain(block, positions, context))


def test_causal_block_without_context_is_a_qwen3() -> None:
    draft = random_draft(config_of(is_causal=True)).float()
    reference_config = Qwen3Config(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 100.0}
    )
    reference = Qwen3Model(reference_config).eval().requires_grad_(False)
    weights = {k: v for k, v in draft.state_dict().items() if k[:2] not in ("fc", "hi")}
    loaded = reference.load_state_dict(weights, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["embed_tokens.weight"], [])
    block = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(3))
    empty = draft.inject(torch.zeros(1, 0, 48), torch.arange(0))
    expected = reference(inputs_embeds=block).last_hidden_state
    torch.testing.assert_close(draft(block, torch.arange(7), empty), expected, rtol=1e-4, atol=1e-4)
