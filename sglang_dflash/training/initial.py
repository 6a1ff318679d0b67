# SPDX-License-Identifier: Apache-2.0
"""A new draft for a target: its config.json and its first weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.draft.checkpoint import draft_folder
from sglang_dflash.draft.checks import check_target
from sglang_dflash.draft.config import DraftConfig, build_target_layer_ids
from sglang_dflash.draft.rope import RopeSettings
from sglang_dflash.errors import draft_given_as
from sglang_dflash.hf.draft import load_draft
from sglang_dflash.training.earlier import (
    check_alike,
    earlier_sizes,
    named_as_start,
    settled,
)
from sglang_dflash.training.frozen import embedding_of
from sglang_dflash.training.model import BlockDraft
from sglang_dflash.training.settings import SettingsError
from sglang_dflash.training.target import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sglang_dflash.training.settings import DraftSettings

__all__ = ["continued_draft", "draft_config_json", "new_draft", "pick_mask_token"]

_LEAST_STD = 0.02
_MADE_NEUTRAL = ("_codebook", ".base_kernel", ".kernel_projection.weight")


@draft_given_as(None)
def draft_config_json(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: DraftSettings,
    earlier: DraftConfig | None = None,
) -> dict[str, Any]:
    """Return the config.json of a draft.

    What the settings leave open is as in the earlier draft; in a new one sizes and rotary
    embedding are the target's.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        settings: Of the draft.
        earlier: The draft that it goes on from, or None.

    Raises:
        SettingsError: the target is too small, or no mask token can be picked.
        UnsupportedCheckpoint: the target's rotary embedding is not supported, or the settings
            contradict the target.
    """
    settings = settled(settings, earlier)
    stated = target.config.get_text_config().to_dict()
    num_layers, vocab_size = stated["num_hidden_layers"], len(embedding_of(target))
    sizes = _target_sizes(stated, settings) if earlier is None else earlier_sizes(earlier)
    if sizes["hidden_size"] != stated["hidden_size"]:
        raise SettingsError(
            f"draft.init_from_draft: {settings.init_from_draft} has the hidden size "
            f"{sizes['hidden_size']}, and the target has {stated['hidden_size']}: start from a "
            "draft that was made for a target like this one"
        )
    config = {
        "architectures": ["DFlash2DraftModel" if settings.selector_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": settings.num_layers,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "block_size": settings.block_size,
        "num_target_layers": num_layers,
        "max_position_embeddings": stated["max_position_embeddings"],
        "dflash_config": {
            "mask_token_id": _mask_token_id(target, tokenizer, settings, earlier),
            "target_layer_ids": list(_layer_ids(settings, num_layers, earlier)),
            **_dflash2(settings),
        },
        "dtype": str(target.dtype).removeprefix("torch."),
        **sizes,
        **_windows(settings),
    }
    check_target(
        DraftConfig.from_dict(config, source="the new draft"),
        target_hidden_size=stated["hidden_size"],
        target_vocab_size=vocab_size,
        target_num_layers=num_layers,
        tp_size=1,
        target="TARGET",
    )
    return config


def pick_mask_token(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, stops: frozenset[int]
) -> int:
    """Return a token that texts never have: a mask, a reserved one, or an unused embedding row.

    Args:
        tokenizer: The target's.
        vocab_size: Rows of its embedding.
        stops: From `stop_tokens`; answers have them.

    Raises:
        SettingsError: there is none.
    """
    named = tokenizer.get_added_vocab()
    for text in ("<|MASK|>", "<|mask|>", tokenizer.mask_token):
        if text in named:
            return named[text]
    used = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token}
    template = str(tokenizer.chat_template)
    reserved = [
        number
        for text, number in named.items()
        if text not in used and text not in template and number not in stops and number < vocab_size
    ]
    if reserved:
        return min(reserved)
    if len(tokenizer) < vocab_size:
        return vocab_size - 1
    raise SettingsError(
        "draft.mask_token_id: the tokenizer has no mask and no reserved token; name a token that "
        "texts never have"
    )


def new_draft(
    config: dict[str, Any], target: PreTrainedModel, *, seed: int, from_target_layers: bool
) -> BlockDraft:
    """Return a float32 draft with its first weights.

    Matrices are small noise, smaller where they write to the residual stream, so that the draft
    starts close to saying what the anchor's embedding says. DFlash2's parts begin without effect:
    convolutions that pass their input on, a selector whose scores are 0. With
    `from_target_layers` the layers are evenly spread ones of the target as far as shapes agree,
    and the fused feature starts as the mean of the captured ones.

    Args:
        config: From `draft_config_json`.
        target: For its layers.
        seed: Of the noise.
        from_target_layers: Whether to take them.
    """
    draft = _noise_draft(config, seed)
    if from_target_layers:
        with torch.no_grad():
            _take_target_layers(draft, target)
    return draft


def continued_draft(config: dict[str, Any], folder: str, *, seed: int) -> BlockDraft:
    """Return a float32 draft that has the weights of an earlier one.

    Args:
        config: From `draft_config_json`; block size, windows and a selector's candidates may
            be others, and it may add layers and DFlash2's parts, which begin without effect.
        folder: Of the earlier draft, or its Hub id.
        seed: Of the parts that are new.

    Raises:
        SettingsError: the folder holds no DFlash draft, or one that reads other features or has
            another shape.
    """
    with named_as_start():
        earlier = load_draft(draft_folder(folder, weights=True), torch.float32)
    draft = _noise_draft(config, seed)
    check_alike(vars(draft.config), earlier.config, folder)
    draft.load_state_dict(draft.state_dict() | earlier.state_dict())
    with torch.no_grad():
        for layer in draft.layers[len(earlier.layers) :]:
            layer.load_state_dict(earlier.layers[-1].state_dict(), strict=False)
            for writes in layer.self_attn.o_proj, layer.mlp.down_proj:
                for weight in writes.parameters():
                    weight.zero_()
    return draft


@draft_given_as(None)
def _noise_draft(config: dict[str, Any], seed: int) -> BlockDraft:
    """Return a float32 draft of noise, DFlash2's parts without effect."""
    draft = BlockDraft(DraftConfig.from_dict(config, source="the new draft"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.dim() == 1 or name.endswith(_MADE_NEUTRAL):
                continue  # norms start at 1, convolutions at the identity, scores at 0
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (2 * draft.config.num_layers) ** -0.5 if writes else 1.0
            std = max(_LEAST_STD, 0.5 * weight.shape[1] ** -0.5)
            weight.normal_(0, std * scale, generator=generator)
    return draft


def _take_target_layers(draft: BlockDraft, target: PreTrainedModel) -> None:
    """Copy what has the same name and shape, layer by layer."""
    weights = {
        name.partition("layers.")[2]: tensor
        for name, tensor in target.state_dict().items()
        if ".layers." in name
    }
    layers = draft.config.num_target_layers or 0
    origins = build_target_layer_ids(layers, draft.config.num_layers)
    parameters = dict(draft.named_parameters())
    for layer, origin in enumerate(origins):
        for name, parameter in parameters.items():
            if not name.startswith(f"layers.{layer}."):
                continue
            taken = weights.get(f"{origin}.{name.removeprefix(f'layers.{layer}.')}")
            if taken is not None and taken.shape == parameter.shape:
                parameter.copy_(taken)
    number = draft.config.num_context_features
    draft.fc.weight.copy_(torch.eye(draft.config.hidden_size).repeat(1, number) / number)
    norms = [weights.get(f"{origin}.input_layernorm.weight") for origin in origins]
    found = [norm.float() for norm in norms if norm is not None]
    if found:
        draft.hidden_norm.weight.copy_(torch.stack(found).mean(0))
    final = target.state_dict().get(f"{target.base_model_prefix}.norm.weight")
    if final is not None and final.shape == draft.norm.weight.shape:
        draft.norm.weight.copy_(final)


def _target_sizes(stated: dict[str, Any], settings: DraftSettings) -> dict[str, Any]:
    """Return what the draft has as the target has it."""
    rope = RopeSettings.from_dict(stated)
    heads = stated["num_attention_heads"]
    intermediate_size = settings.intermediate_size or stated.get("intermediate_size")
    if not intermediate_size:
        raise SettingsError("draft.intermediate_size: the target's config has none; state it")
    return {
        "hidden_size": stated["hidden_size"],
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": stated.get("num_key_value_heads") or heads,
        "head_dim": stated.get("head_dim") or stated["hidden_size"] // heads,
        "rms_norm_eps": stated.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.theta,
        "attention_bias": False,
        **({"rope_scaling": rope.scaling} if rope.scaling is not None else {}),
    }


def _dflash2(settings: DraftSettings) -> dict[str, Any]:
    """Return the keys of DFlash2's parts that are asked for."""
    selector = ("selector_rank", "selector_top_k") if settings.selector_rank else ()
    conv = ("conv_kernel_size", "conv_group_size") if settings.conv_kernel_size else ()
    return {name: getattr(settings, name) for name in (*selector, *conv)}


def _windows(settings: DraftSettings) -> dict[str, Any]:
    if not settings.sliding_layers:
        return {}
    kinds = ("full_attention", "sliding_attention")
    return {
        "sliding_window": settings.sliding_window,
        "use_sliding_window": True,
        "layer_types": [kinds[i in settings.sliding_layers] for i in range(settings.num_layers)],
    }


def _mask_token_id(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: DraftSettings,
    earlier: DraftConfig | None,
) -> int:
    if settings.mask_token_id is not None:
        return settings.mask_token_id
    if earlier is not None:
        named = tokenizer.get_vocab().get(earlier.mask_token)
        known = named if earlier.mask_token_id is None else earlier.mask_token_id
        if known is None:
            raise SettingsError(
                f"draft.mask_token_id: {settings.init_from_draft} has {earlier.mask_token!r}, and "
                "the target's tokenizer does not know it: state the token"
            )
        return known
    return pick_mask_token(tokenizer, len(embedding_of(target)), stop_tokens(target, tokenizer))


def _layer_ids(
    settings: DraftSettings, num_layers: int, earlier: DraftConfig | None
) -> tuple[int, ...]:
    if settings.target_layer_ids is not None:
        return settings.target_layer_ids
    if earlier is not None and settings.num_features is None:
        return earlier.target_layer_ids
    number = settings.num_features or settings.num_layers
    if num_layers < 4 and number > 1:
        raise SettingsError(
            f"the target has {num_layers} layers, too few to choose {number} from: give "
            "draft.target_layer_ids"
        )
    return tuple(sorted(set(build_target_layer_ids(num_layers, number))))
