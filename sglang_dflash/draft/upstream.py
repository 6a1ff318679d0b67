# SPDX-License-Identifier: Apache-2.0
"""Which drafts that ours does not read SGLang's own DFLASH worker runs as they were trained.

That worker ignores the keys and tensors that it does not know, and serves: nothing fails, and
hardly any proposal is accepted. So a draft goes there only for what its code is known to honour.

Source: SGLang 0.5.23's `models/dflash.py`, `models/lilicorr.py` and `speculative/dflash_utils.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dflash.draft.schema import MASK_SIDECAR
from sglang_dflash.draft.weights import BORROWED, canonical_weight_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_dflash.draft.schema import Reason

__all__ = ["lost_there", "misread"]

# Whose classes SGLang has and we do not: of keys that are theirs alone we know nothing.
_FAMILIES = ("DFlashLagunaForCausalLM", "LiLiCorrDraftModel", "MuseGlimmerAssistantModel")
_UNKNOWN = ("Qwen3DFlashDraftModel", "Qwen3DFlash2DraftModel")  # to SGLang, though not to us
# Greedy proposals, as that worker's are without a selector, do not change with these.
_MONOTONE = frozenset({"final_logit_softcapping", "output_multiplier"})
_DOMINO = frozenset(
    {"emb_dim", "gru_hidden_dim", "projector_type", "pure_draft_prefix_len", "shift_label"}
)
_NESTED_ALONE = frozenset({"attention_sink_bias", "attention_value_scale"})
_TOP_ALONE = frozenset({"use_gemma_norm"})
# Which ours takes from the top level too.
_READ_NESTED_ALONE = (
    "conv_group_size", "conv_kernel_size", "final_logit_softcapping", "output_multiplier",
    "selector_rank", "selector_top_k",
)  # fmt: skip
_SWIGLUOAI = frozenset({"hidden_act", "swiglu_alpha"})
# What no class of that worker reads, or not at that place, whatever it knows of a family.
_IGNORED = frozenset(
    """attention_sink_bias attention_value_scale causal dflash_config has_embed_tokens has_lm_head
    input_embedding_scale markov_rank mlp_bias projector_type query_zero_predicts_next
    sample_from_anchor shift_label swa_window_size use_gemma_norm use_swa""".split()  # noqa: SIM905
)
_NEMOTRON = frozenset(
    """attention_sink_bias eagle_aux_hidden_state_layer_ids has_embed_tokens quantization_config
    swa_window_size use_swa""".split()  # noqa: SIM905
)


def misread(
    config: dict[str, Any], reasons: Iterable[Reason], *, from_hub: bool = False
) -> list[Reason]:
    """Return those of the reasons for which SGLang's own worker is no better.

    Args:
        config: The draft's parsed config.json.
        reasons: From `schema.reasons_against`.
        from_hub: Whether the draft is named by a Hub id; that worker then sees no file beside the
            weights.
    """
    return [reason for reason in reasons if not _is_honoured(config, reason.subject, from_hub)]


def lost_there(config: dict[str, Any], weight_names: Iterable[str]) -> list[str]:
    """Return what ours reads of a draft and SGLang's own worker does not.

    Args:
        config: The draft's parsed config.json, one that ours serves.
        weight_names: Of its tensors.
    """
    names = list(weight_names)
    nested = config.get("dflash_config") or {}
    types = config.get("layer_types")
    types = types if isinstance(types, list) and types else ["full_attention"]
    sliding = [kind == "sliding_attention" for kind in types]
    causal, is_causal = _stated(config, "causal"), config.get("is_causal")
    scalings = [config.get(place) or {} for place in ("rope_parameters", "rope_scaling")]
    lost = {
        f"architecture {config['architectures'][0]}": config["architectures"][0] in _UNKNOWN,
        "use_swa": _stated(config, "use_swa") and not any(sliding),
        "causal": causal is not None and is_causal is None and [causal] * len(types) != sliding,
        # That worker knows them without `.weight`, and leaves what it does not find at 0.
        "codebooks' names": any(name.endswith("_codebook.weight") for name in names),
        "attention_factor": any(scaling.get("attention_factor") for scaling in scalings),
    }
    lost |= {
        f"{key} outside dflash_config": bool(config.get(key)) and nested.get(key) is None
        for key in _READ_NESTED_ALONE
    }
    # Ours compares them with the target's, that worker takes the target's in any case.
    lost |= {f"own {name}": canonical_weight_name(name) in BORROWED for name in names}
    return [key for key, is_lost in lost.items() if is_lost]


def _is_honoured(config: dict[str, Any], subject: str, from_hub: bool) -> bool:
    if subject == MASK_SIDECAR:
        return not from_hub
    where, _, key = subject.rpartition(".")
    architectures = config.get("architectures")
    family = architectures[0] if isinstance(architectures, list) and architectures else None
    if key in _DOMINO and _stated(config, "projector_type") == "domino":
        return True
    if key in _SWIGLUOAI and config.get("hidden_act") == "swigluoai":
        return True
    if key in _NEMOTRON and _is_nemotron(config):
        return True
    if key == "quantization_config":  # others have layers without a scale, or without their names
        return family == "LiLiCorrDraftModel"
    if key in _MONOTONE or key in (_NESTED_ALONE if where else _TOP_ALONE):
        return True
    return family in _FAMILIES and key not in _IGNORED


def _stated(config: dict[str, Any], key: str) -> Any:
    """Return a key's value as that worker reads it: from `dflash_config` first."""
    nested = config.get("dflash_config")
    return (nested if isinstance(nested, dict) else {}).get(key, config.get(key))


def _is_nemotron(config: dict[str, Any]) -> bool:
    """Return whether SGLang's loader sees the layout of Nemotron 3.5's drafts.

    An embedding of its own, packed weights, and layers that are numbered in both ways.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_algo") != "W4A16_NVFP4":
        return False
    ids = _stated(config, "target_layer_ids")
    return (
        config.get("architectures") == ["DFlashDraftModel"]
        and bool(config.get("has_embed_tokens"))
        and not config.get("has_lm_head")
        and isinstance(ids, list)
        and bool(ids)
        and config.get("eagle_aux_hidden_state_layer_ids") == [i + 1 for i in ids]
        and _stated(config, "sample_from_anchor") is False
    )
