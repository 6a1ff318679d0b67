# SPDX-License-Identifier: Apache-2.0
"""A draft checkpoint is read completely or refused with everything that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import DFLASH2, PUBLISHED, read, read_dflash2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import sglang_dflash
from sglang_dflash.draft.checks import with_mask_token
from sglang_dflash.draft.config import (
    DraftConfig,
    build_target_layer_ids,
    check_block_size,
    check_target,
    unsupported_reason,
)
from sglang_dflash.draft.schema import ARCHITECTURES
from sglang_dflash.errors import UnsupportedCheckpoint

BUNDLED = Path(sglang_dflash.__file__).parent / "assets" / "smollm2-135m-dflash-b8"
FITTING = {
    "target_hidden_size": 4096,
    "target_vocab_size": 151936,
    "target_num_layers": 36,
    "tp_size": 1,
}


def test_published_config_is_read() -> None:
    config = read()
    assert config.architecture == "DFlashDraftModel"
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, 12288, 5)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.block_size, config.mask_token_id, config.vocab_size) == (16, 151669, 151936)
    assert (config.rope_theta, config.rope_scaling, config.rotary_dim) == (1e6, None, 128)
    assert config.sliding_windows == (None,) * 5
    assert config.causal == (False,) * 5
    assert config.dtype == "bfloat16"
    check_target(config, **FITTING)


def test_published_dflash2_config_is_read() -> None:
    config = read_dflash2()
    assert (config.architecture, config.block_size) == ("DFlash2DraftModel", 8)
    assert (config.selector_rank, config.selector_top_k) == (256, 16)
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert (config.output_multiplier, config.final_logit_softcapping) == (1.0, None)
    check_target(config, **FITTING)
    plain = read()
    assert (plain.selector_rank, plain.selector_top_k) == (0, 0)
    assert (plain.conv_kernel_size, plain.conv_group_size) == (0, 0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_selector_is_asked_of_dflash2_by_all_its_names(name: str) -> None:
    assert read_dflash2(architectures=[name]).architecture == name
    if "DFlash2" not in name:
        assert read(architectures=[name]).selector_rank == 0
        return
    with pytest.raises(UnsupportedCheckpoint, match="selector_rank is missing"):
        read(architectures=[name])


def test_either_part_of_dflash2_may_be_absent() -> None:
    without = {"conv_kernel_size": 0, "conv_group_size": None}
    assert read_dflash2(dflash_config=without).conv_kernel_size == 0
    convolved = read(dflash_config={"conv_kernel_size": 2, "conv_group_size": 16})
    assert (convolved.conv_kernel_size, convolved.selector_rank) == (2, 0)


def test_the_candidates_logits_may_be_scaled_and_capped() -> None:
    scaled = read_dflash2(dflash_config={"output_multiplier": 0.2, "final_logit_softcapping": 30})
    assert (scaled.output_multiplier, scaled.final_logit_softcapping) == (0.2, 30.0)
    assert (
        read_dflash2(dflash_config={"final_logit_softcapping": 0}).final_logit_softcapping is None
    )
    named = read_dflash2(architectures=["MiniMaxDFlash2DraftModel"], final_logit_softcapping=5.0)
    assert (named.architecture, named.final_logit_softcapping) == ("MiniMaxDFlash2DraftModel", 5.0)


@pytest.mark.parametrize(
    ("nested", "changes", "words"),
    [
        ({"selector_top_k": ...}, {}, "selector_rank is 256 and selector_top_k 0: one needs"),
        ({"selector_rank": 0}, {}, "selector_rank is 0 and selector_top_k 16: one needs"),
        ({"conv_group_size": ...}, {}, "conv_kernel_size is 2 and conv_group_size 0: one needs"),
        ({"conv_kernel_size": ...}, {}, "conv_kernel_size is 0 and conv_group_size 16: one needs"),
        ({"conv_group_size": 48}, {}, "conv_group_size 48 does not divide hidden_size 4096"),
        ({"selector_rank": ..., "selector_top_k": ...}, {}, "selector_rank is missing"),
        ({}, {"vocab_size": ...}, "vocab_size is missing"),
        ({"selector_top_k": 151937}, {}, "selector_top_k 151937 is beyond vocab_size"),
        ({"selector_rank": -1}, {}, "selector_rank is -1, expected a whole number from 0"),
        ({"conv_kernel_size": 1.5}, {}, "conv_kernel_size is 1.5, expected a whole number"),
        ({"output_multiplier": 0}, {}, "output_multiplier is 0, expected a number above 0"),
        ({"final_logit_softcapping": -1.0}, {}, "final_logit_softcapping is -1.0, expected"),
        ({"selector_top_k": 8}, {"selector_top_k": 16}, "selector_top_k is 16 but 8 in dflash_con"),
    ],
)  # fmt: skip
def test_contradictory_dflash2_config_is_refused_by_key(
    nested: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=words):
        read_dflash2(dflash_config=nested, **changes)


def test_default_layer_ids_are_evenly_spread() -> None:
    assert build_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert build_target_layer_ids(48, 8) == (1, 7, 14, 20, 26, 32, 39, 45)
    assert build_target_layer_ids(30, 1) == (15,)
    with pytest.raises(ValueError, match="at least 4"):
        build_target_layer_ids(3, 2)


def test_nested_keys_may_stand_at_the_top_level() -> None:
    config = read(
        dflash_config={"mask_token_id": ..., "target_layer_ids": ..., "num_target_layers": 36},
        mask_token_id=7,
        target_layer_ids=[2, 4],
        num_target_layers=...,
        block_size=...,
    )
    assert (config.mask_token_id, config.target_layer_ids) == (7, (2, 4))
    assert (config.num_target_layers, config.block_size) == (36, None)
    assert config.num_context_features == 2


def test_same_key_with_two_values_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="block_size is 16 but 8 in dflash_config"):
        read(dflash_config={"block_size": 8})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
         (5e5, None, 128)),
        ({"rope_theta": ...}, (1e4, None, 128)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}},
         (1e6, {"rope_type": "linear", "factor": 2.0}, 128)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 4096, "beta_fast": 32.0}},
         (1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096,
                "beta_fast": 32.0}, 128)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "rope_dim": 64,
                              "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}},
         (1e6, None, 64)),
    ],
)  # fmt: skip
def test_rope_is_read_in_both_spellings(changes: dict[str, Any], expected: Any) -> None:
    config = read(**changes)
    assert (config.rope_theta, config.rope_scaling, config.rotary_dim) == expected


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({"layer_types": ["full_attention"] + ["sliding_attention"] * 4, "sliding_window": 2048,
          "use_sliding_window": True},
         (None, 2048, 2048, 2048, 2048), (False, True, True, True, True)),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 64, "is_causal": False,
          "use_sliding_window": ...}, (64,) * 5, (False,) * 5),
        ({"is_causal": True}, (None,) * 5, (True,) * 5),
        ({"layer_types": ..., "sliding_window": 128, "use_sliding_window": True,
          "max_window_layers": 3}, (None, None, None, 128, 128), (False, False, False, True, True)),
        ({"layer_types": ..., "sliding_window": 128}, (None,) * 5, (False,) * 5),
        # ModelOpt's keys: a window on all layers, and blocks that are seen whole.
        ({"dflash_config": {"use_swa": True, "swa_window_size": 512}}, (512,) * 5, (False,) * 5),
        ({"layer_types": ..., "use_swa": True, "sliding_window": 128}, (128,) * 5, (False,) * 5),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 64, "causal": True}},
         (64,) * 5, (True,) * 5),
        ({"dflash_config": {"swa_window_size": 64}}, (None,) * 5, (False,) * 5),
        ({"dflash_config": {"causal": True}}, (None,) * 5, (True,) * 5),
        ({"dflash_config": {"use_swa": True, "causal": False},
          "layer_types": ["full_attention"] + ["sliding_attention"] * 4, "sliding_window": 2048,
          "use_sliding_window": True}, (None, 2048, 2048, 2048, 2048), (False,) * 5),
        ({"dflash_config": {"swa_window_size": 96}, "layer_types": ["sliding_attention"] * 5,
          "use_sliding_window": ...}, (96,) * 5, (True,) * 5),
        ({"dflash_config": {"causal": True}, "is_causal": True}, (None,) * 5, (True,) * 5),
    ],
)  # fmt: skip
def test_windows_and_causality_follow_the_layer_types(
    changes: dict[str, Any], windows: Any, causal: Any
) -> None:
    config = read(**changes)
    assert (config.sliding_windows, config.causal) == (windows, causal)


def test_mask_sidecar_is_seen_beside_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    DraftConfig.from_pretrained(tmp_path)
    (tmp_path / "mask_embedding.pt").touch()
    assert "mask_embedding.pt" in (unsupported_reason(PUBLISHED, tmp_path) or "")
    with pytest.raises(UnsupportedCheckpoint, match=r"mask_embedding\.pt"):
        DraftConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"model_type": ...}, "model_type is missing, expected .* most drafts have 'qwen3'"),
        ({"model_type": "dflash"}, "model_type is 'dflash', which transformers lacks"),
        ({"model_type": 3}, "model_type is 3"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"num_key_value_heads": 7}, "32 is no multiple of 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected"),
        ({"num_hidden_layers": 10**9}, "from 1 to 1024"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"attention_bias": 1}, "attention_bias is 1, expected true or false"),
        ({"block_size": 1}, "block_size is 1, expected a whole number from 2"),
        ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids is"),
        ({"dflash_config": {"target_layer_ids": [1, True]}}, "target_layer_ids is"),
        ({"dflash_config": {"target_layer_ids": ...}},
         r"target_layer_ids is missing: add .* maybe \[1, 9, 17, 25, 33\]"),
        ({"dflash_config": {"target_layer_ids": ...}, "num_target_layers": ...},
         r"target_layer_ids is missing: add .* trained on\. "),
        ({"dflash_config": {"target_layer_ids": ...}, "num_target_layers": 3}, "is missing: add"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id is -1"),
        ({"dflash_config": {"mask_token": ""}}, "mask_token is ''"),
        ({"layer_types": ["full_attention"]}, "1 entries for 5 layers"),
        ({"layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 5}, "without a sliding_window"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 64},
         "use_sliding_window is false"),
        ({"use_swa": True}, "without a sliding_window or swa_window_size"),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 64}, "sliding_window": 128},
         "swa_window_size is 64 but sliding_window 128"),
        ({"dflash_config": {"use_swa": 1}}, "use_swa is 1, expected true or false"),
        ({"dflash_config": {"causal": True}, "is_causal": False},
         "is_causal is False but causal True"),
        ({"is_causal": "no"}, "is_causal is 'no'"),
        ({"head_dim": 127}, "is odd"),
        ({"head_dim": ..., "hidden_size": 2048}, "head_dim is missing"),
    ],
)  # fmt: skip
def test_malformed_config_is_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=words) as error:
        read(**changes)
    assert "--speculative-draft-model-path draft-folder" in str(error.value)


def test_a_config_may_be_loaded_by_the_checkpoints_own_code() -> None:
    code = {"AutoConfig": "configuration.DFlashConfig", "AutoModel": "dflash.DFlashDraftModel"}
    assert read(model_type="dflash", auto_map=code) == read()


def test_every_problem_of_a_config_is_in_one_message() -> None:
    with pytest.raises(UnsupportedCheckpoint) as error:
        read(hidden_size=..., intermediate_size=-1, is_causal=3)
    for key in ("hidden_size", "intermediate_size", "is_causal"):
        assert key in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "found nothing there"),
        ({}, "no config.json, found an empty folder"),
        ({"other.txt": "x"}, r"found \['other.txt'\]"),
        ({"config.json": "{"}, "config.json is not JSON"),
        ({"config.json": "[]"}, "config.json holds a list"),
    ],
)
def test_folder_without_a_usable_config_is_refused(
    tmp_path: Path, content: dict[str, str] | None, words: str
) -> None:
    folder = tmp_path / "draft"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(UnsupportedCheckpoint, match=words) as error:
        DraftConfig.from_pretrained(folder)
    assert "--speculative-draft-model-path" in str(error.value)
    assert "expected" in str(error.value)


def test_file_instead_of_a_folder_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="found a file there"):
        DraftConfig.from_pretrained(BUNDLED / "config.json")


@pytest.mark.parametrize(
    ("changes", "other", "words"),
    [
        ({}, {"target_hidden_size": 2560}, "hidden_size is 4096 and the target's is 2560"),
        ({}, {"target_vocab_size": 152064}, "vocab_size is 151936 and the target's is 152064"),
        ({"num_target_layers": ...}, {"target_num_layers": 34}, r"\[33\] cannot be captured"),
        ({}, {"target_num_layers": 40}, "num_target_layers is 36 and the target has 40"),
        ({"dflash_config": {"target_layer_ids": [35]}}, {}, r"\[35\] cannot be captured"),
        ({"dflash_config": {"target_layer_ids": [9, 1]}}, {}, "do not rise"),
        ({"dflash_config": {"mask_token_id": ...}}, {}, "mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 151936}}, {}, "embedding has 151936 rows"),
        ({}, {"tp_size": 3}, "32 heads cannot be shared"),
        ({"num_attention_heads": 36, "num_key_value_heads": 6}, {"tp_size": 4}, "6 KV heads"),
    ],
)
def test_contradiction_with_the_target_is_named(
    changes: dict[str, Any], other: dict[str, int], words: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=words):
        check_target(read(**changes), **(FITTING | other))


def test_a_mask_token_without_a_number_is_looked_up_or_stands_behind_the_vocabulary() -> None:
    words = {"a": 0, "b": 1, "<|MASK|>": 2}
    named = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")))
    unnumbered = read(dflash_config={"mask_token_id": ...})
    assert with_mask_token(unnumbered, named, 10).mask_token_id == 2
    other = read(dflash_config={"mask_token_id": ..., "mask_token": "[M]"})
    assert with_mask_token(other, named, 10).mask_token_id == 3
    assert with_mask_token(read(), named, 10).mask_token_id == 151669
    with pytest.raises(UnsupportedCheckpoint, match=r"mask_token_id is 3 and .* has 3 rows"):
        with_mask_token(other, named, 3)
    with pytest.raises(UnsupportedCheckpoint, match="mask_token_id is missing"):
        with_mask_token(other, None, 10)


def test_the_config_of_gpt_oss_draft_is_read() -> None:
    """It keeps what a mixture of experts states, and the length before yarn."""
    yarn = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    kept = {
        "initial_context_length": 4096, "experts_per_token": 4, "num_experts_per_tok": 4,
        "num_local_experts": 32, "output_router_logits": False, "router_aux_loss_coef": 0.9,
        "swiglu_limit": 7.0, "rope_scaling": yarn, "rope_theta": 150000,
    }  # fmt: skip
    config = read(**kept)
    assert config.rope_scaling == yarn
    assert config.num_layers == 5


def test_all_contradictions_are_in_one_message() -> None:
    with pytest.raises(UnsupportedCheckpoint) as error:
        check_target(
            read(),
            target_hidden_size=64,
            target_vocab_size=320,
            target_num_layers=4,
            tp_size=64,
        )
    lines = str(error.value).splitlines()
    assert "draft-folder" in lines[0]
    assert len(lines) == 1 + 6  # sizes, vocabulary, layers twice, mask, heads


def test_kv_heads_may_be_copied_to_more_ranks() -> None:
    check_target(read(), **(FITTING | {"tp_size": 16}))  # 32 heads, 8 KV heads


@pytest.mark.parametrize("block_size", [-3, 0, 1])
def test_block_below_two_is_refused(block_size: int) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"num-draft-tokens {block_size}: .*2 or more"):
        check_block_size(block_size, read())


def test_block_must_fit_in_the_window() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 5, "use_sliding_window": True}
    config = read(**sliding, sliding_window=16)
    check_block_size(16, config)
    with pytest.raises(UnsupportedCheckpoint, match="sliding window of 16"):
        check_block_size(17, config)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [*PUBLISHED, *DFLASH2, "rope_parameters", "is_causal", "is_neox_style", "mask_token",
     "output_multiplier", "final_logit_softcapping"]
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.dictionaries(KEYS, JSON_VALUES, max_size=4),
    st.dictionaries(KEYS, JSON_VALUES, max_size=2),
)
def test_any_json_is_read_or_refused(top: dict[str, Any], nested: dict[str, Any]) -> None:
    config = PUBLISHED | {"dflash_config": PUBLISHED["dflash_config"] | nested} | top
    try:
        draft = DraftConfig.from_dict(config, source="draft-folder")
    except UnsupportedCheckpoint:
        return
    assert len(draft.causal) == draft.num_layers
    assert draft.rotary_dim <= draft.head_dim
    assert bool(draft.selector_rank) == bool(draft.selector_top_k)
    assert bool(draft.conv_kernel_size) == bool(draft.conv_group_size)
    assert draft.target_layer_ids
