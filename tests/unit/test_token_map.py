# SPDX-License-Identifier: Apache-2.0
"""Which tokens a draft may propose, and the rows of the head that are theirs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from torch import nn

from sglang_dflash.draft.hot_head import HotHead, note_weight_update
from sglang_dflash.draft.token_map import (
    TOKEN_MAP_FILE,
    own_token_map,
    read_token_map,
    token_map_of,
    write_token_map,
)
from sglang_dflash.errors import DRAFT_OPTION, UnsupportedCheckpoint

VOCAB, HIDDEN = 12, 4
WEIGHT = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


def head_of(rank: int, tp_size: int) -> Any:
    """As much of SGLang's output head as its rows are taken from: one rank's shard of it."""
    size = VOCAB // tp_size
    shard = nn.Parameter(WEIGHT[rank * size : (rank + 1) * size].clone(), requires_grad=False)
    indices = SimpleNamespace(org_vocab_start_index=rank * size)
    return SimpleNamespace(
        weight=shard,
        shard_indices=indices,
        num_embeddings_per_partition=size,
        quant_method=UnquantizedEmbeddingMethod(),
    )


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert own_token_map(tmp_path) is None
    write_token_map(tmp_path, torch.tensor([7, 2, 7, 0]))
    path = token_map_of(tmp_path, None)
    assert path is not None
    assert read_token_map(path, 8).tolist() == [0, 2, 7]
    own = own_token_map(tmp_path)
    assert own is not None
    assert own.tolist() == [7, 2, 7, 0]


def test_the_option_goes_over_the_drafts_own_map(tmp_path: Path) -> None:
    assert token_map_of(tmp_path, None) is None
    write_token_map(tmp_path, torch.tensor([1]))
    assert token_map_of(tmp_path, "other.pt") == "other.pt"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([3, 8], "from 0 to 7, found 3 to 8"),
        ([-1, 2], "from 0 to 7, found -1 to 2"),
        ([], "found none"),
        ({"a": 1}, "no list of token ids"),
        (["a"], "no list of token ids"),
    ],
)
def test_a_map_of_other_things_is_refused(tmp_path: Path, tokens: Any, words: str) -> None:
    path = tmp_path / "map.pt"
    torch.save(tokens, path)
    with pytest.raises(ValueError, match=words) as refused:
        read_token_map(str(path), 8)
    assert f"--speculative-token-map {path}" in str(refused.value)


def test_a_drafts_own_map_is_named_by_the_draft(tmp_path: Path) -> None:
    path = tmp_path / TOKEN_MAP_FILE
    path.write_text("cut short")
    with pytest.raises(UnsupportedCheckpoint, match=f"{TOKEN_MAP_FILE} holds no list") as refused:
        own_token_map(tmp_path)
    assert str(refused.value).startswith(f"{DRAFT_OPTION} {tmp_path}")
    with pytest.raises(ValueError, match=f"^{DRAFT_OPTION} {path}: no list of token ids"):
        read_token_map(str(path), 8, DRAFT_OPTION)


@pytest.mark.parametrize("content", ["3 4 5", ""])
def test_a_file_that_torch_did_not_write_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "map.pt"
    path.write_text(content)
    with pytest.raises(ValueError, match="no list of token ids"):
        read_token_map(str(path), 8)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_ranks_together_have_the_maps_rows(tp_size: int) -> None:
    token_map = torch.tensor([0, 1, 3, 5, 10])
    hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    heads = [HotHead(head_of(rank, tp_size), token_map, tp_size) for rank in range(tp_size)]
    assert len({len(head.token_ids) for head in heads}) == 1
    logits = torch.cat([head.project(hidden) for head in heads], dim=1)
    tokens = torch.cat([head.token_ids for head in heads])
    real = logits[0] > float("-inf")
    assert sorted(tokens[real].tolist()) == token_map.tolist()
    torch.testing.assert_close(logits[:, real], hidden @ WEIGHT[tokens[real]].T)


def test_an_updated_weight_is_taken_over() -> None:
    whole = head_of(0, 1)
    hot = HotHead(whole, torch.tensor([2, 9]), 1)
    whole.weight.data.copy_(2 * WEIGHT)  # as SGLang's loaders write
    note_weight_update()
    hidden = torch.randn(3, HIDDEN)
    torch.testing.assert_close(hot.project(hidden), 2 * hidden @ WEIGHT[[2, 9]].T)


def test_a_quantised_head_is_not_cut() -> None:
    whole = head_of(0, 1)
    assert HotHead.can_cut(whole)
    whole.quant_method = object()
    assert not HotHead.can_cut(whole)
