# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint are exactly those its config asks for, or each other one is named."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sglang_dflash
from sglang_dflash.draft.config import (
    DraftConfig,
    canonical_weight_name,
    check_weights,
    expected_weights,
    read_weight_shapes,
)
from sglang_dflash.errors import UnsupportedCheckpoint

BUNDLED = Path(sglang_dflash.__file__).parent / "assets" / "smollm2-135m-dflash-b8"


def read(**changes: Any) -> DraftConfig:
    """Return a config of the usual sizes (those of Qwen3-8B's draft)."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    }
    return DraftConfig.from_dict(config | changes, source="draft-folder")


def test_bundled_draft_has_exactly_the_weights_its_config_asks_for() -> None:
    config = DraftConfig.from_pretrained(BUNDLED)
    shapes = read_weight_shapes(BUNDLED)
    check_weights(shapes, config, BUNDLED)
    assert set(shapes) == set(expected_weights(config))
    parameters = sum(math.prod(shape) for shape in shapes.values())
    assert parameters == pytest.approx(12.3e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("fc.weight", "fc.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("encoder.fc.weight", "fc.weight"),
        ("encoder.output_norm_enc.weight", "hidden_norm.weight"),
        (
            "candidate_selector.predecessor_codebook.weight",
            "candidate_selector.predecessor_codebook",
        ),
        (
            "model.candidate_selector.successor_codebook.weight",
            "candidate_selector.successor_codebook",
        ),
        (
            "candidate_selector.hidden_projection.weight",
            "candidate_selector.hidden_projection.weight",
        ),
        ("layers.0.self_attn.rotary_emb.inv_freq", None),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_weight_names_have_one_form(name: str, canonical: str | None) -> None:
    assert canonical_weight_name(name) == canonical


def test_biases_are_expected_where_the_config_has_them() -> None:
    with_bias = expected_weights(read(attention_bias=True))
    added = {name: with_bias[name] for name in set(with_bias) - set(expected_weights(read()))}
    assert len(added) == 5 * 4
    assert added["layers.0.self_attn.k_proj.bias"] == (1024,)
    assert added["layers.0.self_attn.o_proj.bias"] == (4096,)


def test_dflash2_adds_its_selector_and_two_convolutions_a_layer() -> None:
    sizes = {"selector_rank": 256, "selector_top_k": 16}
    sizes |= {"conv_kernel_size": 2, "conv_group_size": 16, "vocab_size": 151936}
    expected = expected_weights(read(architectures=["DFlash2DraftModel"], **sizes))
    added = {name: expected[name] for name in set(expected) - set(expected_weights(read()))}
    assert len(added) == 5 * 2 * 2 + 3
    for conv in ("layers.0.attention_conv", "layers.4.mlp_conv"):
        assert added[f"{conv}.base_kernel"] == (2, 2, 4096)
        assert added[f"{conv}.kernel_projection.weight"] == (2 * 2 * 256, 4096)
    assert added["candidate_selector.predecessor_codebook"] == (151936, 256)
    assert added["candidate_selector.successor_codebook"] == (151936, 256)
    assert added["candidate_selector.hidden_projection.weight"] == (256, 4096)


def test_parts_of_dflash2_that_the_config_does_not_name_are_refused() -> None:
    config = read()
    found = expected_weights(config) | {"candidate_selector.successor_codebook": (151936, 256)}
    with pytest.raises(UnsupportedCheckpoint, match=r"unexpected: candidate_selector\.successor"):
        check_weights(found, config, "draft-folder")


def test_prefix_and_rotary_tables_are_accepted() -> None:
    config = read()
    found = {f"model.{name}": shape for name, shape in expected_weights(config).items()}
    found["layers.0.self_attn.rotary_emb.inv_freq"] = (64,)
    check_weights(found, config, "draft-folder")


def test_copies_of_the_targets_weights_may_be_there_in_the_targets_shape() -> None:
    found = dict(expected_weights(read()))
    copies = {"model.embed_tokens.weight": (151936, 4096), "lm_head.weight": (151936, 4096)}
    for config in (read(), read(vocab_size=151936)):
        check_weights(found | copies, config, "draft-folder")
    narrow = found | {"embed_tokens.weight": (151936, 2048)}
    with pytest.raises(UnsupportedCheckpoint, match=r"2048\], expected \[151936, 4096\]"):
        check_weights(narrow, read(), "draft-folder")
    with pytest.raises(UnsupportedCheckpoint, match=r"lm_head.weight .* expected \[320, 4096\]"):
        check_weights(found | copies, read(vocab_size=320), "draft-folder")


def test_wrong_weights_are_all_named() -> None:
    config = read()
    found = dict(expected_weights(config))
    del found["norm.weight"]
    found["lm_head.bias"] = (151936,)
    found["fc.weight"] = (4096, 3 * 4096)
    found["model.hidden_norm.weight"] = (4096,)
    with pytest.raises(UnsupportedCheckpoint) as error:
        check_weights(found, config, "draft-folder")
    text = str(error.value)
    assert "missing: norm.weight [4096]" in text
    assert "unexpected: lm_head.bias [151936]" in text
    assert "fc.weight is [4096, 12288], expected [4096, 20480]" in text
    assert "hidden_norm.weight and model.hidden_norm.weight" in text


def test_shapes_come_from_the_headers_of_all_shards(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(5), "c": torch.zeros(())}, tmp_path / "two.safetensors")
    expected = {"a": (2, 3), "b": (5,), "c": ()}
    assert read_weight_shapes(tmp_path) == expected
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weight_shapes(tmp_path) == expected
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"not there: two\.safetensors"):
        read_weight_shapes(tmp_path)


def test_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("one", "two"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match="a is in more than one file"):
        read_weight_shapes(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a safetensors file"),
        (struct.pack("<Q", 2**60) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
        (
            struct.pack("<Q", 41) + b'{"a": {"shape": [1], "data_offsets": []}} ',
            "not a safetensors file",
        ),
        (struct.pack("<Q", 44) + b'{"a": {"shape": [1], "data_offsets": [0, "x"]}}', "not a safe"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a safetensors file"),
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedCheckpoint, match=words):
        read_weight_shapes(tmp_path)


def test_cut_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UnsupportedCheckpoint, match="incomplete download"):
        read_weight_shapes(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"no \*\.safetensors"):
        read_weight_shapes(tmp_path)
