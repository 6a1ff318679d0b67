# SPDX-License-Identifier: Apache-2.0
"""The config.json of published drafts, and variants of them."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.weights import expected_weights

# As published for Qwen3-8B, with what transformers adds.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# What DFlash2 adds to it, as published for Qwen3.8-27B.
DFLASH2: dict[str, Any] = {
    "block_size": 8,
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "selector_rank": 256,
    "selector_top_k": 16,
}


def published(**changes: Any) -> dict[str, Any]:
    """Return the published config with keys changed; `dflash_config` is merged, ... removes."""
    config = json.loads(json.dumps(PUBLISHED))
    config["dflash_config"] |= changes.pop("dflash_config", {})
    config |= changes
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not ...}
    return {key: value for key, value in config.items() if value is not ...}


def write_weights(folder: Path, config: DraftConfig, more: dict[str, Any] | None = None) -> None:
    """Write a checkpoint of this config's shapes: the header, and a hole of the weights' size.

    Args:
        folder: of the draft.
        config: which tensors it asks for.
        more: name -> shape of others; None for a shape leaves that tensor out.
    """
    shapes = {**expected_weights(config), **(more or {})}
    entries, end = {}, 0
    for name, shape in shapes.items():
        if shape is not None:
            begin, end = end, end + 2 * math.prod(shape)
            entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def read(**changes: Any) -> DraftConfig:
    return DraftConfig.from_dict(published(**changes), source="draft-folder")


def read_dflash2(*, dflash_config: dict[str, Any] | None = None, **changes: Any) -> DraftConfig:
    """Return a DFlash2 draft's config with keys changed."""
    nested = DFLASH2 | (dflash_config or {})
    named = {"architectures": ["DFlash2DraftModel"], "block_size": ...} | changes
    return read(dflash_config=nested, **named)
