# SPDX-License-Identifier: Apache-2.0
"""Copies of the target's embedding and head are compared with the target's, wherever they lie."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_dflash.draft.borrowed import BorrowedCopies
from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.errors import UnsupportedCheckpoint
from sglang_dflash.hf import HFDraft, load_draft, spec_generate

VOCAB = 9000  # more than two pieces of what is read at a time
HIDDEN = 6
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"


class Split(NamedTuple):
    """As SGLang's layers state their rows."""

    org_vocab_start_index: int
    num_org_elements: int


class Shard(nn.Module):
    """A rank's rows of a weight, with padding behind them."""

    def __init__(self, weight: torch.Tensor, first: int, count: int) -> None:
        super().__init__()
        rows = torch.cat((weight[first : first + count], weight.new_full((3, HIDDEN), 7.0)))
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.shard_indices = Split(first, count)


def random_weight(seed: int, rows: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def whole(weight: torch.Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight)


def folder_with(folder: Path, **weights: torch.Tensor) -> BorrowedCopies:
    """Write tensors by name, `__` for a dot, in two files."""
    for number, (name, weight) in enumerate(weights.items()):
        save_file({name.replace("__", "."): weight}, folder / f"part{number}.safetensors")
    return BorrowedCopies(folder)


def test_equal_copies_are_harmless(tmp_path: Path) -> None:
    embed, head = random_weight(0), random_weight(1)
    copies = folder_with(tmp_path, model__embed_tokens__weight=embed, lm_head__weight=head)
    copies.check(whole(embed), whole(head))
    copies.check(whole(embed.float()), whole(head.half()))  # the target in another type


def test_copies_that_were_rounded_from_the_target_are_equal(tmp_path: Path) -> None:
    """A target whose file is float32, served so, beside a bfloat16 draft."""
    embed = random_weight(0).float() * 1.001
    copies = folder_with(tmp_path, embed_tokens__weight=embed.bfloat16())
    copies.check(whole(embed), whole(embed))


@pytest.mark.parametrize("row", [0, 4095, 4096, VOCAB - 1])
@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_one_other_number_is_refused_by_name(tmp_path: Path, name: str, row: int) -> None:
    weights = {EMBED: random_weight(0), HEAD: random_weight(1)}
    other = {key: weight.clone() for key, weight in weights.items()}
    other[name][row, -1] += 1
    copies = folder_with(tmp_path, **{key.replace(".", "__"): w for key, w in other.items()})
    with pytest.raises(UnsupportedCheckpoint, match=rf"its {name} \[9000, 6\] differs"):
        copies.check(whole(weights[EMBED]), whole(weights[HEAD]))


@pytest.mark.parametrize(("first", "count"), [(0, 4500), (4500, 4500), (8000, 1000)])
def test_a_rank_compares_its_own_rows(tmp_path: Path, first: int, count: int) -> None:
    weight = random_weight(0)
    copies = folder_with(tmp_path, lm_head__weight=weight)
    copies.check(whole(weight), Shard(weight, first, count))
    shifted = Shard(weight.roll(1, dims=0), first, count)
    with pytest.raises(UnsupportedCheckpoint, match=HEAD):
        BorrowedCopies(tmp_path).check(whole(weight), shifted)


def test_fewer_rows_than_the_target_has_are_refused(tmp_path: Path) -> None:
    weight = random_weight(0)
    copies = folder_with(tmp_path, embed_tokens__weight=weight[:-1].clone())
    with pytest.raises(UnsupportedCheckpoint, match=EMBED):
        copies.check(whole(weight), whole(weight))


def test_a_quantised_head_cannot_be_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = random_weight(0)
    packed = nn.Module()
    packed.weight = nn.Parameter(torch.zeros(VOCAB, 3, dtype=torch.uint8), requires_grad=False)
    with caplog.at_level(logging.WARNING):
        folder_with(tmp_path, lm_head__weight=weight).check(whole(weight), packed)
    assert HEAD in caplog.text


def tiny_target(seed: int) -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=2)
        return LlamaForCausalLM(config).eval()


def test_a_draft_with_copies_is_loaded_without_them_and_compared_when_it_meets_its_target(
    tmp_path: Path,
) -> None:
    target = tiny_target(seed=0)
    stated = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "block_size": 3,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0]},
    }  # fmt: skip
    draft = HFDraft(DraftConfig.from_dict(stated, source="test"))
    (tmp_path / "config.json").write_text(json.dumps(stated))
    copies = {EMBED: target.model.embed_tokens.weight, HEAD: target.lm_head.weight}
    stored = {name: weight.detach().clone() for name, weight in copies.items()}
    save_file(draft.state_dict() | stored, tmp_path / "model.safetensors")
    loaded = load_draft(tmp_path)
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    prompt = torch.tensor([[1, 2, 3]])
    assert len(spec_generate(loaded, target, prompt, 4, stop_token_ids=()).tokens) == 4
    with pytest.raises(UnsupportedCheckpoint, match=f"its {EMBED} "):
        spec_generate(loaded, tiny_target(seed=1), prompt, 4)
