# SPDX-License-Identifier: Apache-2.0
"""A draft checkpoint's config.json as one frozen object, complete or refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.draft.checks import check_block_size, check_target
from sglang_dflash.draft.fields import Fields
from sglang_dflash.draft.rope import RopeSettings
from sglang_dflash.draft.schema import PLAIN_ARCHITECTURES, reasons_against, unsupported_reason
from sglang_dflash.draft.upstream import misread
from sglang_dflash.draft.weights import (
    canonical_weight_name,
    check_weights,
    expected_weights,
    read_weight_shapes,
)
from sglang_dflash.errors import DRAFT_OPTION, UnsupportedCheckpoint

__all__ = [
    "DEFAULT_MASK_TOKEN",
    "DraftConfig",
    "build_target_layer_ids",
    "canonical_weight_name",
    "check_block_size",
    "check_target",
    "check_weights",
    "expected_weights",
    "read_config",
    "read_weight_shapes",
    "unsupported_reason",
]

DEFAULT_MASK_TOKEN = "<|MASK|>"
_EXPECTED = "expected a folder with the config.json and *.safetensors of a DFlash draft"


@dataclass(frozen=True)
class DraftConfig:
    """What a DFlash or DFlash2 draft is, as its checkpoint states it.

    Attributes:
        source: Where it was read, for messages.
        architecture: One of `schema.ARCHITECTURES`.
        hidden_size: H, the draft's and the target's.
        intermediate_size: Width of the MLP.
        num_layers: L, decoder layers of the draft.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Channels of one head.
        rms_norm_eps: Epsilon of every norm.
        hidden_act: `silu`.
        attention_bias: Whether q, k, v and o projections have biases.
        rope_theta: Base of the rotary embedding.
        rope_scaling: Its scaling with the key `rope_type`, or None for the plain form.
        rotary_dim: Leading channels of a head that rotate.
        rope_is_neox_style: True rotates halves, False interleaved pairs.
        max_position_embeddings: Positions that training saw.
        target_layer_ids: The K captured target layers; id i is the output of decoder layer i.
        sliding_windows: Per layer the window in tokens, own token included (SGLang's
            `window_left` is this less one), or None for full attention.
        causal: Per layer, whether a block's row sees only rows up to its own.
        vocab_size: The target's vocabulary, or None where not stated.
        dtype: Name of the stored type such as `bfloat16`, or None.
        block_size: B the draft was trained at, anchor included, or None.
        num_target_layers: Decoder layers of the target it was trained on, or None.
        mask_token_id: Token id of the masks, or None where only `mask_token` is known.
        mask_token: Text of the mask token.
        selector_rank: Width r of the candidate selector's codebooks; 0 has none.
        selector_top_k: K, the candidates of a row that it chooses from; 0 has none.
        conv_kernel_size: Taps of the convolutions around every sublayer; 0 has none.
        conv_group_size: Channels that share a kernel's moving part; 0 has none.
        output_multiplier: Factor of the candidates' logits.
        final_logit_softcapping: c of c * tanh(logits / c) on them after that, or None.
    """

    source: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rotary_dim: int
    rope_is_neox_style: bool
    max_position_embeddings: int
    target_layer_ids: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    vocab_size: int | None
    dtype: str | None
    block_size: int | None
    num_target_layers: int | None
    mask_token_id: int | None
    mask_token: str
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @property
    def num_context_features(self) -> int:
        """K, the number of captured target layers."""
        return len(self.target_layer_ids)

    @property
    def context_length(self) -> int:
        """Positions that it is made for, as SGLang counts them: a linear scaling has more."""
        scaling = self.rope_scaling or {}
        is_linear = scaling.get("rope_type") == "linear"
        return int(self.max_position_embeddings * (scaling["factor"] if is_linear else 1))

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, source: str) -> DraftConfig:
        """Return the configuration that a parsed config.json states.

        Args:
            config: The parsed config.json.
            source: Where it came from, for messages.

        Raises:
            UnsupportedCheckpoint: the draft is neither DFlash nor DFlash2, or keys are missing or
                contradict each other; one message names all of them.
        """
        reason = unsupported_reason(config)
        if reason is not None:
            other = "misreads" if misread(config, reasons_against(config)) else "serves"
            raise UnsupportedCheckpoint(
                f"{source}: not a plain DFlash or DFlash2 draft: {reason}. "
                f"Use a plain one; on CUDA SGLang's own DFLASH worker {other} this one.",
                option=DRAFT_OPTION,
            )
        fields = Fields(config)
        _check_model_type(fields, config)
        values = _sizes(fields) | _rope(config, fields) | _format(fields) | _dflash2(fields)
        num_layers = values["num_layers"]
        values["sliding_windows"], values["causal"] = _attention(fields, num_layers)
        values["target_layer_ids"] = _target_layer_ids(fields, num_layers)
        if fields.problems:
            raise UnsupportedCheckpoint(
                f"{source}: config.json cannot be used: {'; '.join(fields.problems)}. "
                "Correct these keys, or take the config.json that the draft was published with.",
                option=DRAFT_OPTION,
            )
        return cls(source=source, architecture=config["architectures"][0], **values)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> DraftConfig:
        """Return the configuration of the checkpoint in a folder.

        Args:
            path: The folder of the checkpoint.

        Raises:
            UnsupportedCheckpoint: no usable config.json there, or `from_dict` refuses it, or
                files beside the weights change the model.
        """
        config = read_config(path)
        reason = unsupported_reason(config, path)
        if reason is not None and unsupported_reason(config) is None:
            raise UnsupportedCheckpoint(
                f"{path}: {reason}. Use a draft whose mask token is in the target's embedding; on "
                "CUDA SGLang's own DFLASH worker serves this one from a local folder.",
                option=DRAFT_OPTION,
            )
        return cls.from_dict(config, source=str(path))


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Return the target layers that a draft captures unless it is made for others.

    Evenly spread from the second layer to the third from the end; the middle one for a
    draft of one layer.

    Args:
        num_target_layers: Decoder layers of the target, at least 4 unless the draft has one.
        num_draft_layers: Decoder layers of the draft.

    Raises:
        ValueError: the target has too few layers.

    Source: must equal `build_target_layer_ids` in SGLang's `speculative/dflash_utils.py`.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    if span < 0:
        raise ValueError(f"num_target_layers is {num_target_layers}, expected at least 4")
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint's folder.

    Args:
        path: The folder of the checkpoint.

    Raises:
        UnsupportedCheckpoint: no folder there, no config.json in it, or no JSON object in that.
    """
    folder = Path(path)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise UnsupportedCheckpoint(
            f"{path}: found {found} there, {_EXPECTED}. Check the path; a Hub id is "
            "downloaded first (`hf download ORG/NAME`).",
            option=DRAFT_OPTION,
        )
    file = folder / "config.json"
    if not file.is_file():
        names = sorted(entry.name for entry in folder.iterdir())[:8]
        raise UnsupportedCheckpoint(
            f"{path}: no config.json, found {names or 'an empty folder'}, {_EXPECTED}. "
            "Check the path, or download the draft again.",
            option=DRAFT_OPTION,
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise UnsupportedCheckpoint(
            f"{path}: config.json is not JSON ({error}), {_EXPECTED}. Download the draft again.",
            option=DRAFT_OPTION,
        ) from error
    if not isinstance(config, dict):
        raise UnsupportedCheckpoint(
            f"{path}: config.json holds a {type(config).__name__}, expected an object. "
            "Download the draft again.",
            option=DRAFT_OPTION,
        )
    return config


def _check_model_type(fields: Fields, config: dict[str, Any]) -> None:
    """Note a config that nothing could load: SGLang reads it with transformers' classes."""
    from transformers import CONFIG_MAPPING  # SGLang adds its own to it

    model_type, loaders = config.get("model_type"), config.get("auto_map")
    if isinstance(loaders, dict) and "AutoConfig" in loaders:
        return  # the checkpoint's own code, with --trust-remote-code
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        found = "missing" if model_type is None else f"{model_type!r}, which transformers lacks"
        fields.problem(
            f"model_type is {found}, expected one by which a config can be loaded; most drafts "
            "have 'qwen3'"
        )


def _sizes(fields: Fields) -> dict[str, Any]:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads")
    hidden_size = fields.integer("hidden_size")
    if num_heads % num_kv_heads:
        fields.problem(f"num_attention_heads {num_heads} is no multiple of {num_kv_heads} KV heads")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers", maximum=1024),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": _head_dim(fields, hidden_size, num_heads),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "hidden_act": "silu",
        "attention_bias": fields.flag("attention_bias", False),
        "max_position_embeddings": fields.integer("max_position_embeddings", 32768),
        "vocab_size": fields.integer("vocab_size", None),
    }


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    stated = fields.integer("head_dim", None)
    if stated is not None:
        return stated
    # transformers takes 128 for Qwen3 where nothing is said, others divide.
    if fields.get("model_type") == "qwen3" and hidden_size != 128 * num_heads:
        fields.problem("head_dim is missing, and 128 and hidden_size / num_attention_heads differ")
    return hidden_size // num_heads


def _rope(config: dict[str, Any], fields: Fields) -> dict[str, Any]:
    rope = RopeSettings.from_dict(config)
    head_dim = fields.get("head_dim")
    width = rope.rotary_dim or head_dim
    if not isinstance(width, int):
        width = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    if width % 2 and not fields.problems:  # else it may come from a stand-in
        fields.problem(f"head_dim {width} is odd, so that it cannot rotate")
    style = "rope_is_neox_style" if fields.has("rope_is_neox_style") else "is_neox_style"
    return {
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_dim": width,
        "rope_is_neox_style": fields.flag(style, True),
    }


def _format(fields: Fields) -> dict[str, Any]:
    mask_token = fields.get("mask_token", DEFAULT_MASK_TOKEN)
    if not isinstance(mask_token, str) or not mask_token:
        fields.problem(f"mask_token is {mask_token!r}, expected a text")
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    return {
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "block_size": fields.integer("block_size", None, minimum=2),
        "num_target_layers": fields.integer("num_target_layers", None),
        "mask_token_id": fields.integer("mask_token_id", None, minimum=0),
        "mask_token": mask_token,
    }


def _dflash2(fields: Fields) -> dict[str, Any]:
    """Return what DFlash2 adds; each part is there or not by its two sizes."""
    names = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
    sizes = {name: fields.integer(name, 0, minimum=0) for name in names}
    for one, other in (names[:2], names[2:]):
        if bool(sizes[one]) != bool(sizes[other]):
            fields.problem(f"{one} is {sizes[one]} and {other} {sizes[other]}: one needs the other")
    is_second = fields.get("architectures")[0] not in PLAIN_ARCHITECTURES
    if is_second and not sizes["selector_rank"]:
        fields.problem("selector_rank is missing, and DFlash2 has a candidate selector")
    vocab_size = fields.integer("vocab_size", None)
    if sizes["selector_rank"] and vocab_size is None:
        fields.problem("vocab_size is missing, and the candidate selector has a row for each token")
    if vocab_size is not None and sizes["selector_top_k"] > vocab_size:
        fields.problem(f"selector_top_k {sizes['selector_top_k']} is beyond vocab_size")
    group_size, hidden_size = sizes["conv_group_size"], fields.integer("hidden_size")
    if group_size and hidden_size % group_size:
        fields.problem(f"conv_group_size {group_size} does not divide hidden_size {hidden_size}")
    cap = fields.get("final_logit_softcapping")
    return sizes | {
        "output_multiplier": fields.number("output_multiplier", 1.0),
        # Off is null or 0.
        "final_logit_softcapping": fields.number("final_logit_softcapping", 1.0) if cap else None,
    }


def _attention(fields: Fields, num_layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return window and causality of every layer.

    Source: SGLang's `models/dflash.py`; `use_swa`, `swa_window_size` and `causal` are ModelOpt's,
    with the meaning that vLLM's `qwen3_dflash.py` gives them.
    """
    types = _layer_types(fields, num_layers)
    causal = [kind == "sliding_attention" for kind in types]
    sliding = list(causal)
    if fields.flag("use_swa", False) and not any(sliding):
        sliding = [True] * len(types)  # and each row still sees its whole block
    elif any(sliding) and fields.get("use_sliding_window") is False:
        fields.problem("layer_types has sliding_attention but use_sliding_window is false")
    window = _window(fields) if any(sliding) else None
    for key in ("causal", "is_causal"):  # the latter wins, and may not differ
        if fields.has(key):
            causal = [fields.flag(key, False)] * len(types)
    if fields.has("causal") and fields.has("is_causal"):
        stated, other = fields.get("is_causal"), fields.get("causal")
        if stated != other:
            fields.problem(f"is_causal is {stated!r} but causal {other!r}, expected one of them")
    return tuple(window if slides else None for slides in sliding), tuple(causal)


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    """Return each layer's kind, as stated or as transformers makes it up."""
    types = fields.get("layer_types")
    if types is None:
        sliding_from = num_layers
        if fields.has("sliding_window") and fields.flag("use_sliding_window", False):
            sliding_from = fields.integer("max_window_layers", 28, minimum=0)
        types = ["full_attention"] * min(sliding_from, num_layers)
        return types + ["sliding_attention"] * (num_layers - len(types))
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(kind not in kinds for kind in types):
        fields.problem(f"layer_types is {types!r}, expected full_ and sliding_attention")
        return []
    if len(types) != num_layers:
        fields.problem(f"layer_types has {len(types)} entries for {num_layers} layers")
    return types


def _window(fields: Fields) -> int | None:
    names = ("swa_window_size", "sliding_window")
    windows = [w for name in names if (w := fields.integer(name, None)) is not None]
    if not windows:
        fields.problem("sliding attention without a sliding_window or swa_window_size")
        return None
    if len(set(windows)) > 1:
        fields.problem(f"swa_window_size is {windows[0]} but sliding_window {windows[1]}")
    return windows[0]


def _target_layer_ids(fields: Fields, num_layers: int) -> tuple[int, ...]:
    ids = fields.get("target_layer_ids")
    if ids is None:
        count = fields.integer("num_target_layers", None)
        guess = ""
        if count is not None and (num_layers == 1 or count >= 4):
            guess = f", maybe {list(build_target_layer_ids(count, num_layers))}"
        # Only maybe: most published drafts have others, and nothing would show a wrong guess.
        fields.problem(
            "target_layer_ids is missing: add it to dflash_config, the layers that the draft was "
            f"trained on{guess}"
        )
    elif isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
        return tuple(ids)
    else:
        fields.problem(f"target_layer_ids is {ids!r}, expected a list of layer numbers")
    return ()
