# SPDX-License-Identifier: Apache-2.0
"""A draft goes to SGLang's worker for what that honours, and is refused for all else."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from published import DFLASH2, published, write_weights

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.schema import unsupported_reason
from sglang_dflash.errors import UnsupportedCheckpoint
from sglang_dflash.options import Options
from sglang_dflash.routing import Target, upstream_reason

TARGET = Target(4096, 151936, 36, 1024, has_recurrent_state=False)
RECURRENT = TARGET._replace(has_recurrent_state=True)
SECOND: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {"selector_rank": 256, "selector_top_k": 16},
}
DOMINO = {
    "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1,
    "gru_hidden_dim": 1024, "emb_dim": 256,
}  # fmt: skip
LILICORR = {"lilicorr_candidate_topk": 16, "lilicorr_num_layers": 2, "lilicorr_vector_eps": 1e-6}
NEMOTRON: dict[str, Any] = {
    "has_embed_tokens": True,
    "attention_sink_bias": True,
    "quantization_config": {"quant_algo": "W4A16_NVFP4"},
    "eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "dflash_config": {"sample_from_anchor": False, "swa_window_size": 1024, "use_swa": True},
}


@dataclass(frozen=True)
class Settings:
    """SGLang's settings by name, with nothing asked for that is SGLang's worker's alone."""

    speculative_draft_model_path: str
    speculative_draft_model_revision: None = None
    speculative_draft_window_size: None = None
    speculative_use_block_verification: bool = False
    enable_lora: None = None
    lora_paths: None = None
    enable_strict_thinking: bool = False
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    dcp_size: int = 1
    enable_prefill_cp: bool = False
    enable_unified_memory: bool = False
    disaggregation_mode: str = "null"
    _speculative_draft_quantization_explicitly_set: bool = False
    speculative_draft_model_quantization: None = None


def routed(
    folder: Path,
    config: dict[str, Any],
    target: Target = TARGET,
    worker: str = "auto",
    more: dict[str, Any] | None = None,
) -> str | None:
    """Return why SGLang's worker would serve a draft of this config; `more` as `write_weights`."""
    (folder / "config.json").write_text(json.dumps(config))
    if unsupported_reason(config) is None:
        write_weights(folder, DraftConfig.from_dict(config, source=str(folder)), more)
    return upstream_reason(Settings(str(folder)), Options(worker=worker), target)


def architecture(name: str, **changes: Any) -> dict[str, Any]:
    return published(architectures=[name], **changes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (published(dflash_config=DOMINO), "Domino"),
        (published(**DOMINO), "Domino"),
        (architecture("LiLiCorrDraftModel", dflash_config=LILICORR), "LiLiCorr"),
        (architecture("LiLiCorrDraftModel", quantization_config={"a": 1}), "quantised"),
        (architecture("DFlashLagunaForCausalLM", gating="per-head"), "Laguna"),
        (architecture("MuseGlimmerAssistantModel", model_type="muse_glimmer_assistant"), "Muse"),
        (published(use_gemma_norm=True), "Gemma norms"),
        (published(hidden_act="swigluoai", swiglu_alpha=1.7, swiglu_limit=7.0), "swigluoai"),
        (published(dflash_config={"attention_sink_bias": True}), "sinks"),
        (published(dflash_config={"attention_value_scale": 0.612}), "values of the attention"),
        (published(dflash_config={"output_multiplier": 0.2}), "output_multiplier"),
        (published(**NEMOTRON), "has_embed_tokens"),
    ],
)
def test_what_sglangs_worker_honours_is_routed_there(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    assert words in (routed(tmp_path, config) or "")


ANCHOR_FIRST = "anchor-first layout"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (published(dflash_config={"sample_from_anchor": True}), ANCHOR_FIRST),
        (published(sample_from_anchor=True), ANCHOR_FIRST),
        (published(dflash_config={"query_zero_predicts_next": True}), ANCHOR_FIRST),
        (published(dflash_config={"shift_label": True}), "shifted labels"),
        (published(dflash_config={"input_embedding_scale": 64.0}), "input_embedding_scale 64.0"),
        (published(projector_type="mlp"), "not a known projector"),
        (published(mlp_bias=True), "biases in the MLP"),
        (published(dflash_config={"brand_new": 3}), "dflash_config.brand_new 3: unknown"),
        (published(attention_sink_bias=True), "attention_sink_bias True"),
        (published(attention_value_scale=0.6), "attention_value_scale 0.6"),
        (published(dflash_config={"use_gemma_norm": True}), "use_gemma_norm True"),
        (published(hidden_act="gelu"), "hidden_act 'gelu'"),
        (published(quantization_config={"quant_method": "fp8"}), "quantised weights"),
        (published(**NEMOTRON | {"has_lm_head": True}), "has_embed_tokens"),
        (published(**DOMINO, sample_from_anchor=True), ANCHOR_FIRST),
        (architecture("LiLiCorrDraftModel", mlp_bias=True), "biases in the MLP"),
        (architecture("Qwen3DFlashDraftModels"), "is none of DFlashDraftModel"),
        (architecture("Qwen3ForCausalLM"), "is none of DFlashDraftModel"),
        (architecture("Qwen3DSparkModel"), "--speculative-algorithm DSPARK"),
        (architecture("Qwen3DSparkModel", markov_rank=256), "--speculative-algorithm DSPARK"),
        (architecture("Qwen3DSparkModel", markov_rank=0), r"anchor-first layout, DeepSpec"),
        (
            architecture("DFlashSpeculator", speculators_model_type="dflash"),
            "or serve this one with",
        ),
        (architecture("DFlashSpeculator"), "is none of DFlashDraftModel"),
    ],
)
def test_what_it_misreads_is_refused_on_every_device(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(words)) as refused:
        routed(tmp_path, config)
    assert f"--speculative-draft-model-path {tmp_path}" in str(refused.value)
    assert "SGLANG_DFLASH_WORKER=upstream" in str(refused.value)
    # Also where another setting would hand the server over.
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(words)):
        routed(tmp_path, config, RECURRENT)
    asked = routed(tmp_path, config, worker="upstream")
    assert asked == "SGLANG_DFLASH_WORKER=upstream"


def test_a_deepspec_draft_is_not_sent_to_dspark(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint) as refused:
        routed(tmp_path, architecture("Qwen3DSparkModel", markov_rank=0))
    assert "DSPARK" not in str(refused.value)


def test_the_speculators_format_is_one_reason_however_much_is_in_it(tmp_path: Path) -> None:
    stated = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": {"hidden_size": 4096},
        "aux_hidden_state_layer_ids": [2, 18, 33],
        "draft_vocab_size": 32000,
    }
    with pytest.raises(UnsupportedCheckpoint) as refused:
        routed(tmp_path, stated)
    assert "the speculators format (of type 'dflash')" in str(refused.value)
    assert "`sglang-dflash convert DRAFT TARGET OUT`" in str(refused.value)
    assert "unknown" not in str(refused.value)


def test_plain_drafts_are_ours(tmp_path: Path) -> None:
    assert routed(tmp_path, published()) is None
    second = {"architectures": ["DFlash2DraftModel"], "block_size": ..., "dflash_config": DFLASH2}
    assert routed(tmp_path, published(**second)) is None
    recurrent = routed(tmp_path, published(), RECURRENT)
    assert "recurrent state" in (recurrent or "")


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        (published(dflash_config={"use_swa": True, "swa_window_size": 64}), "use_swa"),
        (published(dflash_config={"causal": True}), "causal"),
        (architecture("Qwen3DFlashDraftModel"), "architecture Qwen3DFlashDraftModel"),
        (published(rope_scaling={"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.1,
                                 "original_max_position_embeddings": 64}), "attention_factor"),
        (published(conv_kernel_size=2, conv_group_size=16, **SECOND),
         "conv_group_size outside dflash_config, conv_kernel_size outside"),
        (published(output_multiplier=0.5, **SECOND), "output_multiplier outside dflash_config"),
    ],
)  # fmt: skip
def test_no_setting_takes_a_draft_from_the_worker_that_reads_it(
    tmp_path: Path, config: dict[str, Any], lost: str
) -> None:
    assert routed(tmp_path, config) is None
    with pytest.raises(UnsupportedCheckpoint, match=f"recurrent state.* ignores .*{lost}"):
        routed(tmp_path, config, RECURRENT)


def test_no_setting_takes_codebooks_whose_names_sglang_does_not_know(tmp_path: Path) -> None:
    second = {"architectures": ["DFlash2DraftModel"], "block_size": ..., "dflash_config": DFLASH2}
    name = "candidate_selector.predecessor_codebook"
    assert "recurrent state" in (routed(tmp_path, published(**second), RECURRENT) or "")
    renamed = {name: None, f"{name}.weight": (151936, 256)}
    with pytest.raises(UnsupportedCheckpoint, match=r"ignores .*codebooks' names"):
        routed(tmp_path, published(**second), RECURRENT, more=renamed)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "model.lm_head.weight"])
def test_no_setting_takes_a_draft_with_parts_of_the_targets(tmp_path: Path, name: str) -> None:
    more = {name: (151936, 4096)}
    assert routed(tmp_path, published(), more=more) is None
    with pytest.raises(UnsupportedCheckpoint, match=f"ignores the draft's own {name}"):
        routed(tmp_path, published(), RECURRENT, more=more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"layers.2.mlp.up_proj.weight": None}, "missing: layers.2.mlp.up_proj.weight"),
        ({"layers.0.self_attn.q_proj.bias": (4096,)}, "unexpected: layers.0.self_attn.q_proj.bias"),
    ],
)
def test_other_tensors_than_the_configs_are_named_for_sglangs_worker_too(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=words):
        routed(tmp_path, published(), RECURRENT, more=more)


def test_a_setting_takes_drafts_that_both_workers_read_alike(tmp_path: Path) -> None:
    alike = {"causal": False, "use_swa": False, "swa_window_size": 64}
    for config in (published(dflash_config=alike), published(is_causal=True, causal=True)):
        reason = routed(tmp_path, config, RECURRENT)
        assert "recurrent state" in (reason or "")


def test_a_mask_of_its_own_is_merged_from_a_local_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    for folder in (hub, cache):
        folder.mkdir()
    (hub / "mask_embedding.pt").touch()
    assert "mask_embedding.pt" in (routed(hub, published()) or "")

    def download(path: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        """Copy what the patterns name, as the Hub's client does."""
        for file in hub.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, cache)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UnsupportedCheckpoint, match=r"org/draft: mask_embedding\.pt"):
        upstream_reason(Settings("org/draft"), Options(), TARGET)
