# SPDX-License-Identifier: Apache-2.0
"""What a config.json in the speculators format says, in z-lab's layout.

The format is that of vLLM's training library (github.com/vllm-project/speculators, "S" below, under
`src/speculators/`). vLLM serves it (github.com/vllm-project/vllm, "V", under `vllm/`). Rules:

- The backbone is `transformer_layer_config`, less the keys that equal the defaults of transformers'
  class of its `model_type`, Qwen3's where that is missing (S `models/dflash/config.py`).
- Whatever the `model_type`, every layer is Qwen3's: norms of q and k, no bias in the MLP. The
  context is `hidden_norm(fc(features))`, all layers read it (S `models/dflash/
  model_definitions.py`, `core.py`; V `model_executor/models/qwen3_dflash.py`).
- `aux_hidden_state_layer_ids` count layers from 1: id i is the output of decoder layer i - 1, which
  z-lab's layout calls i - 1 (V `transformers_utils/configs/speculators/algos.py`, vLLM PR 40727).
- Row j of a block predicts the token at its own position, and the anchor's row nothing, unless
  `sample_from_anchor` (S `models/dflash/core.py`; before there was the key, always).
- Layers with full attention see their whole block; those with a window do so only with
  `sliding_window_non_causal` (S `models/dflash/attention.py`). vLLM makes all layers causal or none
  (V `algos.py`; vLLM PR 56692 mends that). Where the key is missing, S takes false and V true.
- The window reaches as far back as V's, from each row. In training it is counted from the anchor,
  so that rows saw up to a block more.
- The base of the rotary embedding has no common default: S takes transformers' 10 000, V 1 000 000.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.schema import READ_KEYS, unsupported_reason
from sglang_dflash.errors import DRAFT_OPTION, UnsupportedCheckpoint

__all__ = ["Speculator", "read_speculator"]

_BACKBONES = ("qwen3", "llama")  # those that the library makes drafts of
# Keys of the backbone that may be left out, with the defaults of transformers' class.
_DEFAULTED = frozenset(
    """attention_bias head_dim hidden_act hidden_size intermediate_size max_position_embeddings
    max_window_layers num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps
    sliding_window use_sliding_window vocab_size""".split()  # noqa: SIM905
)
# Keys beside the backbone that are translated, or say how the draft was made and kept.
_TRANSLATED = frozenset(
    """architectures auto_map aux_hidden_state_layer_ids block_size draft_vocab_size dtype
    mask_token_id model_type sliding_window_non_causal speculators_config speculators_model_type
    speculators_version torch_dtype transformer_layer_config""".split()  # noqa: SIM905
)
_TRAINING = frozenset({"auf", "max_anchors"})
# Of the projector Domino, without which they do nothing.
_DOMINO = frozenset(
    """emb_dim gru_hidden_dim lambda_base_decay_ratio lambda_base_start
    pure_draft_prefix_len""".split()  # noqa: SIM905
)


class Speculator(NamedTuple):
    """A draft in the speculators format, as our reader takes it.

    Attributes:
        config: Its config.json in z-lab's layout, which `DraftConfig.from_dict` accepts.
        draft_vocab_size: Rows of its output head, one for each token that it may propose.
        verifier: Name of the target that it was trained for, or None where not stated.
    """

    config: dict[str, Any]
    draft_vocab_size: int
    verifier: str | None


def read_speculator(config: dict[str, Any], *, source: str) -> Speculator:
    """Return what a config.json in the speculators format says.

    Args:
        config: The parsed config.json.
        source: Where it came from, for messages.

    Raises:
        UnsupportedCheckpoint: it is in another format, or of another kind than plain DFlash, or
            leaves open what the sources above disagree on; with every reason that was found.
    """
    layer = _backbone(config, source)
    problems: list[str] = []
    ids = _target_layer_ids(config, problems)
    base = _with_defaults(layer) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.get("block_size"),
        "dflash_config": {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": ids},
    }
    base |= _others(config, base, problems)
    _note_missing(config, layer, problems)
    _settle_causality(config, base, problems)
    if (reason := unsupported_reason(base)) is not None:
        problems.append(reason)
    if problems:
        raise UnsupportedCheckpoint(
            f"{source}: not converted: {'; '.join(dict.fromkeys(problems))}. Correct its "
            "config.json if you know how it was trained, else serve it with vLLM.",
            option=DRAFT_OPTION,
        )
    DraftConfig.from_dict(base, source=source)
    return Speculator(base, config["draft_vocab_size"], _verifier(config))


def _verifier(config: dict[str, Any]) -> str | None:
    """Return the name of the target that a draft was trained for, where it is stated."""
    found: Any = config
    for key in ("speculators_config", "verifier", "name_or_path"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def _backbone(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return `transformer_layer_config` of a plain DFlash draft."""
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind is None:
        raise UnsupportedCheckpoint(
            f"{source}: config.json has no speculators_model_type, so that it is not in the "
            "speculators format. A draft in z-lab's layout is served as it is.",
            option=DRAFT_OPTION,
        )
    if kind != "dflash":
        raise UnsupportedCheckpoint(
            f"{source}: speculators_model_type is {kind!r}, and only 'dflash' is converted. Serve "
            "this one with vLLM.",
            option=DRAFT_OPTION,
        )
    if not isinstance(layer, dict):
        raise UnsupportedCheckpoint(
            f"{source}: transformer_layer_config is {layer!r}, expected an object. Take the "
            "config.json that the draft was published with.",
            option=DRAFT_OPTION,
        )
    if layer.get("model_type", "qwen3") not in _BACKBONES:
        raise UnsupportedCheckpoint(
            f"{source}: the backbone's model_type is {layer['model_type']!r}, and only "
            f"{' and '.join(_BACKBONES)} are converted. Serve this one with vLLM.",
            option=DRAFT_OPTION,
        )
    return layer


def _with_defaults(layer: dict[str, Any]) -> dict[str, Any]:
    """Return a backbone's config with what was left out because it is transformers' default."""
    from transformers import AutoConfig

    stated = {key: value for key, value in layer.items() if value is not None}
    kind = stated.pop("model_type", "qwen3")
    usual = AutoConfig.for_model(kind).to_dict()
    # Llama's follow from the others where they are not stated.
    derived = {"head_dim", "num_key_value_heads"} if kind == "llama" else frozenset()
    base = {k: usual[k] for k in _DEFAULTED - derived if usual.get(k) is not None} | stated
    width, heads = base["hidden_size"], base["num_attention_heads"]
    base.setdefault("num_key_value_heads", heads)
    if type(width) is int and type(heads) is int and heads > 0:
        base.setdefault("head_dim", width // heads)
    return base


def _target_layer_ids(config: dict[str, Any], problems: list[str]) -> list[int]:
    ids = config.get("aux_hidden_state_layer_ids")
    if isinstance(ids, list) and ids and all(type(i) is int and i >= 1 for i in ids):
        return [i - 1 for i in ids]
    problems.append(
        f"aux_hidden_state_layer_ids is {ids!r}, expected the captured layers, counted from 1"
    )
    return [0]


def _others(config: dict[str, Any], base: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the keys beside the backbone that only `unsupported_reason` knows what to do with."""
    known = _TRANSLATED | _TRAINING
    if config.get("projector_type", "dflash") == "dflash":
        known |= _DOMINO
    others = {k: v for k, v in config.items() if k not in known and v not in (None, False)}
    # The library has no such keys there, so that nothing says what they would change.
    stray = {k: v for k, v in others.items() if k in READ_KEYS and v != base.get(k)}
    problems.extend(
        f"{key} is {value!r} beside transformer_layer_config, expected in it"
        for key, value in stray.items()
    )
    return {key: value for key, value in others.items() if key not in READ_KEYS}


def _note_missing(config: dict[str, Any], layer: dict[str, Any], problems: list[str]) -> None:
    for key in ("block_size", "draft_vocab_size", "mask_token_id"):
        value = config.get(key)
        if type(value) is not int or value < 0:
            problems.append(f"{key} is {value!r}, expected a whole number")
    places = (layer, layer.get("rope_parameters"), layer.get("rope_scaling"))
    if not any(isinstance(p, dict) and p.get("rope_theta") is not None for p in places):
        problems.append(
            "rope_theta is missing: training took 10000 then, and vLLM takes 1000000; add to "
            "transformer_layer_config what the draft was trained with"
        )


def _settle_causality(config: dict[str, Any], base: dict[str, Any], problems: list[str]) -> None:
    """Say in `base` whether rows of layers with a window see later rows of their block."""
    types = base.get("layer_types")
    if not (base.get("use_sliding_window") if types is None else "sliding_attention" in types):
        return
    non_causal = config.get("sliding_window_non_causal")
    if non_causal is True:
        base["is_causal"] = False  # the key that SGLang's own worker reads too
    elif non_causal is not False:  # then causal, as layers with a window are by themselves
        problems.append(
            f"sliding_window_non_causal is {non_causal!r}, expected true or false: where it is "
            "missing, training takes false and vLLM true"
        )
