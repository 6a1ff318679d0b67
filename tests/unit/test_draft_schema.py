# SPDX-License-Identifier: Apache-2.0
"""Key by key of a config.json: read, harmless, or named as what our draft does not do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from published import published, read

from sglang_dflash.draft.config import unsupported_reason
from sglang_dflash.errors import UnsupportedCheckpoint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "CausalLM: is none of .*, DFlash2DraftModel"),
        ({"architectures": ...}, r"architectures \[\]"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"projector_type": "domino"}, "Domino"),
        ({"projector_type": "mlp"}, "projector_type 'mlp': not a known projector"),
        ({"dflash_config": {"output_multiplier": 0.2}}, "output_multiplier 0.2"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping 20.0: .*soft-capped"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention sinks"),
        ({"dflash_config": {"attention_value_scale": 0.612}}, "values of the attention"),
        ({"dflash_config": {"shift_label": True}}, "shifted labels"),
        ({"dflash_config": {"sample_from_anchor": True}}, "anchor's row predicts"),
        ({"dflash_config": {"input_embedding_scale": 64.0}}, "scales the embeddings"),
        ({"dflash_config": {"brand_new": 3}}, "dflash_config.brand_new 3: unknown"),
        ({"brand_new": {"deep": 1}}, "brand_new: unknown"),
        ({"use_gemma_norm": True}, "Gemma norms"),
        ({"hidden_act": "swigluoai", "swiglu_alpha": 1.7}, "hidden_act 'swigluoai'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"mlp_bias": True}, "biases in the MLP"),
        ({"has_embed_tokens": True}, "its own embedding"),
        ({"text_config": {"hidden_size": 3}}, "nested text_config"),
        ({"speculators_model_type": "dflash", "draft_vocab_size": 32000}, "speculators format"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks .*original_max"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0,
                           "original_max_position_embeddings": 64}}, "mscale, .*mscale_all_dim"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attn_factor": 1.0,
                           "original_max_position_embeddings": 64}}, "unknown keys .*attn_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer type"),
        ({"rope_parameters": {"rope_type": "default", "mrope_scale": [1, 1]}}, "mrope_scale"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 1]}},
         "unknown keys .*mrope_section"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
         "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 1000000 but 500000.0"),
        ({"partial_rotary_factor": 0.25}, "trained width is unknown"),
        ({"dflash_config": {"a": 1, "b": 2}}, "a 1: unknown.*b 2: unknown"),
    ],
)  # fmt: skip
def test_what_is_not_plain_is_named(changes: dict[str, Any], words: str) -> None:
    reason = unsupported_reason(published(**changes))
    assert reason is not None
    assert "\n" not in reason
    assert re.search(words, reason)
    with pytest.raises(UnsupportedCheckpoint, match="not a plain DFlash or DFlash2 draft"):
        read(**changes)


@pytest.mark.parametrize(
    ("agrees", "contradicts", "words"),
    [
        ({"draft_vocab_size": 151936}, {"draft_vocab_size": 32000}, "a vocabulary of its own"),
        ({"target_hidden_size": 4096}, {"target_hidden_size": 2048}, "another width"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]},
         {"eagle_aux_hidden_state_layer_ids": [1, 9, 17, 25, 33]}, "not target_layer_ids . 1"),
        ({"num_anchors": 512, "loss_decay_gamma": 4.0}, {"num_anchor": 512}, "num_anchor 512"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10],
                              "mrope_interleaved": True}},
         {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
         "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_a_key_that_says_nothing_new_is_harmless_unless_it_contradicts(
    agrees: dict[str, Any], contradicts: dict[str, Any], words: str
) -> None:
    plain = read()
    assert read(**agrees) == plain
    assert re.search(words, unsupported_reason(published(**contradicts)) or "")
    if "rope_parameters" not in agrees:
        assert read(dflash_config=agrees) == plain
        nested = unsupported_reason(published(dflash_config=contradicts))
        assert re.search(words, nested or "")


def test_keys_that_are_switched_off_do_not_matter() -> None:
    off = {
        "projector_type": "dflash2",
        "selector_rank": 0,
        "selector_top_k": None,
        "conv_kernel_size": 0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": 0.0,
        "attention_sink_bias": False,
        "attention_value_scale": 1.0,
        "shift_label": False,
        "brand_new": None,
    }
    top = {"mlp_bias": False, "other": {}, "projector_type": "dflash"}
    assert unsupported_reason(published(dflash_config=off, **top)) is None
    read(dflash_config=off)
