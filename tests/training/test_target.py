# SPDX-License-Identifier: Apache-2.0
"""What is asked of a target before it answers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair
from transformers import (
    AutoTokenizer,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from sglang_dflash.training.frozen import borrowed
from sglang_dflash.training.settings import SettingsError
from sglang_dflash.training.target import load_target, stop_tokens, target_digest


def tiny_target(**changes: Any) -> Qwen3ForCausalLM:
    """Return a random target of next to no size."""
    sizes = {
        "vocab_size": 320,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes | changes))


@pytest.fixture(scope="module")
def tokenizer(qwen3_pair: Pair) -> Any:
    return AutoTokenizer.from_pretrained(qwen3_pair.target)


def test_an_answer_ends_at_every_token_that_the_checkpoint_names(tokenizer: Any) -> None:
    target = tiny_target(eos_token_id=7)
    target.generation_config.eos_token_id = [8, 9]
    assert stop_tokens(target, tokenizer) == {7, 8, 9, tokenizer.eos_token_id}
    target.generation_config = None
    assert stop_tokens(target, tokenizer) == {7, tokenizer.eos_token_id}
    assert stop_tokens(tiny_target(eos_token_id=[7, 6]), tokenizer) >= {6, 7}
    known = copy.deepcopy(tokenizer)
    known.add_tokens(["<|eom_id|>"], special_tokens=True)
    named = known.get_added_vocab()["<|eom_id|>"]
    assert stop_tokens(target, known) == {7, tokenizer.eos_token_id, named}


@pytest.mark.parametrize("part", ["0.self_attn.q_proj", "2.mlp.up_proj", "4.mlp.down_proj"])
def test_a_fine_tune_with_its_bases_embedding_is_another_target(part: str) -> None:
    target = tiny_target()
    known = target_digest(target)
    assert target_digest(target) == known
    with torch.no_grad():
        target.model.layers.get_submodule(part).weight[0, 0] += 1.0
    assert target_digest(target) != known


def test_a_tied_head_is_moved_once() -> None:
    device = torch.device("meta")
    embedding, head = borrowed(tiny_target(tie_word_embeddings=True), device)
    assert embedding is head
    embedding, head = borrowed(tiny_target(tie_word_embeddings=False), device)
    assert embedding is not head
    assert embedding.device == head.device == device


def test_a_target_with_recurrent_layers_is_refused_by_its_config_alone(tmp_path: Path) -> None:
    Qwen3_5TextConfig().save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="it has linear_attention layers"):
        load_target(str(tmp_path))


def test_a_target_whose_class_is_recurrent_is_refused(tmp_path: Path) -> None:
    config = RwkvConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2)
    assert not hasattr(config, "layer_types")
    RwkvForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="it has recurrent layers"):
        load_target(str(tmp_path))


def test_a_recurrent_class_with_attention_alone_is_taken(qwen3_pair: Pair, tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_heads": 2}
    config = GraniteMoeHybridConfig(**sizes, **heads, layer_types=["full_attention"])
    target = GraniteMoeHybridForCausalLM(config)
    assert target._is_stateful
    target.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(qwen3_pair.target).save_pretrained(tmp_path)
    load_target(str(tmp_path))
