# SPDX-License-Identifier: Apache-2.0
"""Which draft checkpoints are DFlash or DFlash2, key by key of their config.json.

A key is read, or known to leave the numbers alone, or known to ask for something that our
model does not do, or unknown. An unknown key that is switched on is refused: a draft
that is run without part of itself loads, serves, and is accepted at 1 token a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.draft.rope import rope_unsupported_reason

__all__ = [
    "ARCHITECTURES",
    "MASK_SIDECAR",
    "NESTED_KEYS",
    "PLAIN_ARCHITECTURES",
    "READ_KEYS",
    "Reason",
    "has_selector",
    "reasons_against",
    "unsupported_reason",
]

ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "DFlash2BeamDraftModel",  # Beam and MiniMax are targets; the drafts are the same
    "MiniMaxDFlash2DraftModel",
    "Qwen3DFlashDraftModel",  # NeMo Automodel's names
    "Qwen3DFlash2DraftModel",
)
PLAIN_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")  # without a selector

# Keys that may stand in `dflash_config` or at the top level.
NESTED_KEYS = frozenset(
    """block_size causal conv_group_size conv_kernel_size final_logit_softcapping mask_token
    mask_token_id num_target_layers output_multiplier selector_rank selector_top_k swa_window_size
    target_layer_ids use_swa""".split()  # noqa: SIM905
)
READ_KEYS = NESTED_KEYS | frozenset(
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
_TRAINING_KEYS = frozenset({"loss_decay_gamma", "num_anchors"})
# What a draft's config keeps of its target's (gpt-oss, Qwen3-MoE): of experts, which the check of
# the weights would show, and of the length before a rotary scaling that is stated itself.
_LEFTOVER_KEYS = frozenset(
    """decoder_sparse_step experts_per_token initial_context_length mlp_only_layers
    moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_local_experts
    output_router_logits router_aux_loss_coef swiglu_limit""".split()  # noqa: SIM905
)
_DSPARK = "has a Markov head (DSpark): serve it with --speculative-algorithm DSPARK"
_ANCHOR_FIRST = "the anchor's row predicts the next token (the anchor-first layout, DeepSpec)"
_OTHER_ARCHITECTURES = {
    "DFlashLagunaForCausalLM": "gates its attention and normalises every captured layer (Laguna)",
    "MuseGlimmerAssistantModel": "numbers the captured layers in its own way (Muse Glimmer)",
    "LiLiCorrDraftModel": "re-scores its candidates with a lattice model (LiLiCorr)",
    "Qwen3DSparkModel": _DSPARK,
    "LingDSparkModel": _DSPARK,
    "DSparkDraftModel": _DSPARK,
}
_LAYER_INPUTS = "eagle_aux_hidden_state_layer_ids"  # the captured layers, counted from 1
# key -> (values that mean "off", what the key asks for)
_FEATURES: dict[str, tuple[tuple[Any, ...], str]] = {
    # ModelOpt and speculators name the format itself here.
    "projector_type": (("dflash", "dflash2"), "a projector corrects the logits (Domino)"),
    "output_multiplier": ((1,), "the draft's logits are scaled"),
    "final_logit_softcapping": ((0,), "the draft's logits are soft-capped"),
    "markov_rank": ((0,), _DSPARK),
    "input_embedding_scale": ((1,), "the draft scales the embeddings itself"),
    "attention_sink_bias": ((), "attention sinks"),
    "attention_value_scale": ((1,), "the values of the attention are scaled"),
    "use_gemma_norm": ((), "Gemma norms (1 + weight)"),
    "shift_label": ((), "shifted labels: row j predicts the token after its own position"),
    "sample_from_anchor": ((), _ANCHOR_FIRST),
    "query_zero_predicts_next": ((), _ANCHOR_FIRST),
    "has_embed_tokens": ((), "its own embedding"),
    "has_lm_head": ((), "its own output head"),
    "mlp_bias": ((), "biases in the MLP"),
    "quantization_config": ((), "quantised weights"),
    "text_config": ((), "a nested text_config"),
    "draft_vocab_size": ((), "a vocabulary of its own"),
    "target_hidden_size": ((), "the target's hidden states have another width than the draft's"),
    _LAYER_INPUTS: ((), "these are not target_layer_ids + 1"),
}
# Of the speculators library, which nests the backbone's config and has none that AutoConfig reads.
_SPECULATORS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
# Keys that say again what another says, as long as they do.
_REPEATS = {"draft_vocab_size": "vocab_size", "target_hidden_size": "hidden_size"}
# Of a draft with a candidate selector only: its candidates' logits.
_SELECTOR_KEYS = frozenset({"output_multiplier", "final_logit_softcapping"})
MASK_SIDECAR = "mask_embedding.pt"


class Reason(NamedTuple):
    """Why a draft is neither DFlash nor DFlash2.

    Attributes:
        subject: What it is about: a key as in `dflash_config.causal`, `architecture`, `rope`, or a
            file's name.
        text: In words, the subject and its value named.
    """

    subject: str
    text: str


def has_selector(config: dict[str, Any]) -> bool:
    """Return whether a draft chooses its proposals by DFlash2's candidate selector.

    Args:
        config: Its parsed config.json.
    """
    nested = config.get("dflash_config")
    places = [config, nested] if isinstance(nested, dict) else [config]
    return any(place.get("selector_rank") for place in places)


def reasons_against(config: dict[str, Any], folder: str | Path | None = None) -> list[Reason]:
    """Return every reason why a draft is neither DFlash nor DFlash2.

    Args:
        config: The draft's parsed config.json.
        folder: Where the checkpoint lies, to see the files beside the weights; None skips that.
    """
    found = [key for key in _SPECULATORS if config.get(key)]
    if found:
        kind = config.get("speculators_model_type", "unstated")
        way = "take the draft as z-lab's layout has it"
        if kind == "dflash":
            way = "rewrite the draft with `sglang-dflash convert DRAFT TARGET OUT`"
        text = (
            f"{', '.join(found)}: the speculators format (of type {kind!r}), which is not read; "
            f"{way}, or serve this one with vLLM"
        )
        return [Reason("speculators", text)]
    reasons = _architecture_reasons(config)
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        text = f"dflash_config is {nested!r}, expected an object"
        reasons, nested = [*reasons, Reason("dflash_config", text)], {}
    unread = frozenset() if has_selector(config) else _SELECTOR_KEYS
    known = _TRAINING_KEYS | _repeated(config, nested)
    reasons += _key_reasons(nested, "dflash_config.", (NESTED_KEYS | known) - unread)
    known |= READ_KEYS | _NEUTRAL_KEYS | _LEFTOVER_KEYS
    reasons += _key_reasons(config, "", known - unread)
    if config.get("hidden_act", "silu") != "silu":
        text = f"hidden_act {config['hidden_act']!r} (supported: silu)"
        reasons.append(Reason("hidden_act", text))
    rope = rope_unsupported_reason(config)
    if rope is not None:
        reasons.append(Reason("rope", rope))
    if folder is not None and (Path(folder) / MASK_SIDECAR).exists():
        reasons.append(Reason(MASK_SIDECAR, f"{MASK_SIDECAR}: a mask embedding of its own"))
    return reasons


def unsupported_reason(config: dict[str, Any], folder: str | Path | None = None) -> str | None:
    """Return in one line what `reasons_against` has, or None for a DFlash or DFlash2 draft.

    Args:
        config: The draft's parsed config.json.
        folder: Where the checkpoint lies, to see the files beside the weights; None skips that.
    """
    return "; ".join(dict.fromkeys(r.text for r in reasons_against(config, folder))) or None


def _architecture_reasons(config: dict[str, Any]) -> list[Reason]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        text = f"architectures {names!r}, expected one of {', '.join(ARCHITECTURES)}"
        return [Reason("architecture", text)]
    if names[0] in ARCHITECTURES:
        return []
    why = _OTHER_ARCHITECTURES.get(names[0], f"is none of {', '.join(ARCHITECTURES)}")
    if why is _DSPARK and config.get("markov_rank") == 0:
        why = _ANCHOR_FIRST  # no head to speak of, and SGLang's DSPARK asks for one
    return [Reason("architecture", f"architecture {names[0]}: {why}")]


def _repeated(config: dict[str, Any], nested: dict[str, Any]) -> frozenset[str]:
    """Return the keys that only say again what another key says."""

    def stated(key: str) -> list[Any]:
        return [place[key] for place in (config, nested) if place.get(key) is not None]

    wanted = {key: stated(other) for key, other in _REPEATS.items()}
    wanted[_LAYER_INPUTS] = [
        [i + 1 for i in ids]
        for ids in stated("target_layer_ids")
        if isinstance(ids, list) and all(type(i) is int for i in ids)
    ]
    return frozenset(
        key
        for key, values in wanted.items()
        if values and all(value == values[0] for value in stated(key))
    )


def _key_reasons(keys: dict[str, Any], where: str, known: frozenset[str]) -> list[Reason]:
    reasons = []
    for key, value in keys.items():
        off, asks_for = _FEATURES.get(key, ((), "unknown, and it may change the numbers"))
        if key in known or _is_off(value, off):
            continue
        if key == "projector_type" and value != "domino":
            asks_for = "not a known projector"
        shown = "" if isinstance(value, dict | list) else f" {value!r}"
        reasons.append(Reason(where + key, f"{where}{key}{shown}: {asks_for}"))
    return reasons


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return True
    return not isinstance(value, bool) and value in off
