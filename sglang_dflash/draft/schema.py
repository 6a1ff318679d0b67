# SPDX-License-Identifier: Apache-2.0
"""Which draft checkpoints are DFlash or DFlash2, key by key of their config.json.

A key is read, or known to leave the numbers alone, or known to ask for something that our
model does not do, or unknown. An unknown key that is switched on is refused: a draft
that is run without part of itself loads, serves, and is accepted at 1 token a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dflash.draft.rope import rope_unsupported_reason

__all__ = ["ARCHITECTURES", "NESTED_KEYS", "unsupported_reason"]

ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "DFlash2BeamDraftModel",  # Beam and MiniMax are targets; the drafts are the same
    "MiniMaxDFlash2DraftModel",
)

# Keys that may stand in `dflash_config` or at the top level.
NESTED_KEYS = frozenset(
    """block_size conv_group_size conv_kernel_size final_logit_softcapping mask_token mask_token_id
    num_target_layers output_multiplier selector_rank selector_top_k
    target_layer_ids""".split()  # noqa: SIM905
)
_READ_KEYS = NESTED_KEYS | frozenset(
    """architectures attention_bias dflash_config dtype head_dim hidden_act hidden_size
    intermediate_size is_causal is_neox_style layer_types max_position_embeddings
    max_window_layers model_type num_attention_heads num_hidden_layers num_key_value_heads
    partial_rotary_factor rms_norm_eps rope_is_neox_style rope_parameters rope_scaling rope_theta
    sliding_window torch_dtype use_sliding_window vocab_size""".split()  # noqa: SIM905
)
# Bookkeeping, training-time and generation keys that transformers writes into config.json.
_NEUTRAL_KEYS = frozenset(
    """_attn_implementation_autoset _name_or_path add_cross_attention attention_dropout
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torchscript
    transformers_version typical_p use_bfloat16 use_cache""".split()  # noqa: SIM905
)
# What a draft's config keeps of its target's (gpt-oss, Qwen3-MoE): of experts, which the check of
# the weights would show, and of the length before a rotary scaling that is stated itself.
_LEFTOVER_KEYS = frozenset(
    """decoder_sparse_step experts_per_token initial_context_length mlp_only_layers
    moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_local_experts
    output_router_logits router_aux_loss_coef swiglu_limit""".split()  # noqa: SIM905
)
_OTHER_ARCHITECTURES = {
    "DFlashLagunaForCausalLM": "gates its attention and normalises every captured layer (Laguna)",
    "MuseGlimmerAssistantModel": "numbers the captured layers in its own way (Muse Glimmer)",
    "LiLiCorrDraftModel": "re-scores its candidates with a lattice model (LiLiCorr)",
    "Qwen3DSparkModel": "has a Markov head (DSpark)",
    "LingDSparkModel": "has a Markov head (DSpark)",
    "DSparkDraftModel": "has a Markov head (DSpark)",
    "DFlashSpeculator": "is in the speculators format",
}
# key -> (values that mean "off", what the key asks for)
_SPECULATORS = ((), "speculators format, which is not read")
_FEATURES: dict[str, tuple[tuple[Any, ...], str]] = {
    "projector_type": ((), "a projector corrects the logits (Domino)"),
    "output_multiplier": ((1,), "the draft's logits are scaled"),
    "final_logit_softcapping": ((0,), "the draft's logits are soft-capped"),
    "markov_rank": ((0,), "a Markov head (DSpark)"),
    "input_embedding_scale": ((1,), "the draft scales the embeddings itself"),
    "attention_sink_bias": ((), "attention sinks"),
    "attention_value_scale": ((1,), "the values of the attention are scaled"),
    "use_gemma_norm": ((), "Gemma norms (1 + weight)"),
    "shift_label": ((), "shifted labels: row j predicts the token after its own position"),
    "sample_from_anchor": ((), "the anchor's row predicts, so the labels are shifted"),
    "has_embed_tokens": ((), "its own embedding"),
    "has_lm_head": ((), "its own output head"),
    "mlp_bias": ((), "biases in the MLP"),
    "quantization_config": ((), "quantised weights"),
    "text_config": ((), "a nested text_config"),
    "transformer_layer_config": _SPECULATORS,
    "speculators_config": _SPECULATORS,
    "speculators_model_type": _SPECULATORS,
    "draft_vocab_size": ((), "a vocabulary of its own (speculators format)"),
    "aux_hidden_state_layer_ids": _SPECULATORS,
}
# Of a draft with a candidate selector only: its candidates' logits.
_SELECTOR_KEYS = frozenset({"output_multiplier", "final_logit_softcapping"})
_MASK_SIDECAR = "mask_embedding.pt"


def unsupported_reason(config: dict[str, Any], folder: str | Path | None = None) -> str | None:
    """Return in one line why a draft is neither DFlash nor DFlash2, or None when it is.

    Args:
        config: The draft's parsed config.json.
        folder: Where the checkpoint lies, to see the files beside the weights; None skips that.
    """
    reasons = _architecture_reasons(config)
    nested = config.get("dflash_config") or {}
    has_selector = any(
        isinstance(keys, dict) and keys.get("selector_rank") for keys in (config, nested)
    )
    unread = frozenset() if has_selector else _SELECTOR_KEYS
    if isinstance(nested, dict):
        reasons += _key_reasons(nested, "dflash_config.", NESTED_KEYS - unread)
    else:
        reasons.append(f"dflash_config is {nested!r}, expected an object")
    reasons += _key_reasons(config, "", (_READ_KEYS | _NEUTRAL_KEYS | _LEFTOVER_KEYS) - unread)
    if config.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act {config['hidden_act']!r} (supported: silu)")
    rope = rope_unsupported_reason(config)
    if rope is not None:
        reasons.append(rope)
    if folder is not None and (Path(folder) / _MASK_SIDECAR).exists():
        reasons.append(f"{_MASK_SIDECAR}: a mask embedding of its own")
    return "; ".join(dict.fromkeys(reasons)) or None


def _architecture_reasons(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return [f"architectures {names!r}, expected one of {', '.join(ARCHITECTURES)}"]
    if names[0] in ARCHITECTURES:
        return []
    why = _OTHER_ARCHITECTURES.get(names[0], f"is none of {', '.join(ARCHITECTURES)}")
    return [f"architecture {names[0]}: {why}"]


def _key_reasons(keys: dict[str, Any], where: str, known: frozenset[str]) -> list[str]:
    reasons = []
    for key, value in keys.items():
        off, asks_for = _FEATURES.get(key, ((), "unknown, and it may change the numbers"))
        if key in known or _is_off(value, off):
            continue
        shown = "" if isinstance(value, dict | list) else f" {value!r}"
        reasons.append(f"{where}{key}{shown}: {asks_for}")
    return reasons


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return True
    return not isinstance(value, bool) and value in off
