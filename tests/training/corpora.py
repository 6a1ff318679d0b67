# SPDX-License-Identifier: Apache-2.0
"""Tiny drafts and made-up texts, for tests that need no target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.training.captured import Text
from sglang_dflash.training.model import BlockDraft
from sglang_dflash.training.shards import Corpus, TextInfo, shard_path, write_shard

__all__ = [
    "DFLASH2",
    "HIDDEN",
    "NUM_FEATURES",
    "VOCAB",
    "config_of",
    "made_up_corpus",
    "random_draft",
]

HIDDEN, NUM_FEATURES, VOCAB = 24, 2, 50
_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "vocab_size": VOCAB,
    "num_target_layers": 6,
    "block_size": 4,
    "dtype": "float32",
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
}
# Of a draft with convolutions and a selector.
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": _CONFIG["dflash_config"]
    | {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 3, "conv_group_size": 8},
}


def config_of(**changes: Any) -> dict[str, Any]:
    """Return a draft's config.json."""
    return _CONFIG | changes


def random_draft(config: dict[str, Any], seed: int = 0) -> BlockDraft:
    """Return a draft whose every parameter is random, norms included."""
    generator = torch.Generator().manual_seed(seed)
    draft = BlockDraft(DraftConfig.from_dict(config, source="test"))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0, 1, generator=generator)
            parameter.mul_(parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return draft


def made_up_corpus(folder: Path, num_texts: int = 12, num_laws: int = 4, seed: int = 0) -> Corpus:
    """Write random texts of unlike lengths, the last two held out, and return them."""
    generator = torch.Generator().manual_seed(seed)
    texts, infos, row = [], [], 0
    for i in range(num_texts):
        length, start = 14 + 3 * (i % 5), 3 + i % 4
        tokens = torch.randint(4, VOCAB, (length,), generator=generator, dtype=torch.int32)
        keys = torch.rand((length, VOCAB), generator=generator)
        keys[torch.arange(length - 1), tokens[1:].long()] = 1.0  # the text's token is among them
        law_ids = keys.topk(num_laws).indices.int()
        texts.append(
            Text(
                tokens,
                start,
                torch.randn((length, NUM_FEATURES * HIDDEN), generator=generator).bfloat16(),
                law_ids,
                torch.randn((length, num_laws), generator=generator).log_softmax(-1).half(),
            )
        )
        infos.append(
            TextInfo(0, row, length, start, 0.7 * (i % 2), i >= num_texts - 2, f"kind{i % 3}")
        )
        row += length
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(shard_path(folder, 0), texts, infos)
    return Corpus(folder)
