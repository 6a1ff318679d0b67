# SPDX-License-Identifier: Apache-2.0
"""The target: how it is loaded, what it is known by, and where its answers end."""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Any

from sglang_dflash.training.frozen import embedding_of
from sglang_dflash.training.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["embedding_digest", "load_target", "stop_tokens", "target_digest"]

# Ends of a turn that some checkpoints state nowhere; SGLang stops at them all the same.
_TURN_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
# Kinds of layers whose cache is keys and values, one each a token.
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def load_target(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a target without gradients, and its tokenizer.

    Its weights are mapped from the files: what is not used is not read, and processes share it.
    Those that transformers merges as it loads them, such as experts in one matrix each, are read
    into each process's memory.

    Args:
        name: A folder or a hub name.

    Raises:
        SettingsError: transformers cannot load it, or it has layers that are no attention.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not os.path.exists(name) and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise SettingsError(f"TARGET {name}: neither a folder nor a hub name")
    config = _loaded(AutoConfig, name).get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    _check_layers(name, kinds - _ATTENTION)
    target = _loaded(AutoModelForCausalLM, name, dtype="auto")
    # The class tells of some kinds of layers; those of a config say which of them it has.
    _check_layers(name, {"recurrent"} if target._is_stateful and not kinds else set())
    return target.eval().requires_grad_(False), _loaded(AutoTokenizer, name)


def stop_tokens(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokens that end an answer: all that any part of the checkpoint names.

    Source: must equal what SGLang stops at, `_get_hf_eos_token_id` in its
    `configs/model_config.py` and `attach_additional_stop_token_ids` with the tokenizer's own.
    """
    stating = (target.config, target.config.get_text_config(), target.generation_config, tokenizer)
    named = tokenizer.get_added_vocab()
    stops = {named[text] for text in _TURN_ENDS if text in named}
    for part in stating:
        stated = getattr(part, "eos_token_id", None)  # one, several or none
        stops.update([stated] if isinstance(stated, int) else stated or ())
    return frozenset(stops)


def target_digest(target: PreTrainedModel) -> str:
    """Return what a target is known by: a hash of rows of its embedding and of three layers.

    The embedding alone does not tell a fine-tune from its base, which often share it.

    Raises:
        SettingsError: the target has no embedding of one weight.
    """
    return _digest(_embedding_rows(target), *_layer_rows(target))


def embedding_digest(target: PreTrainedModel) -> str:
    """Return what a target was known by before `target_digest`: a hash of its embedding alone.

    Raises:
        SettingsError: the target has no embedding of one weight.
    """
    return _digest(_embedding_rows(target))


def _loaded(kind: Any, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise SettingsError(f"TARGET {name}: transformers cannot load it: {error}") from error


def _check_layers(name: str, others: set[str]) -> None:
    """Refuse a target with layers whose cache is more than keys and values."""
    if others:
        raise SettingsError(
            f"TARGET {name}: it has {', '.join(sorted(others))} layers, and train can decode "
            f"{', '.join(sorted(_ATTENTION))} alone: take another target"
        )


def _digest(*parts: torch.Tensor) -> str:
    """Return 16 hexadecimal digits of tensors of any shape and type."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _embedding_rows(target: PreTrainedModel) -> torch.Tensor:
    """Return [256, H], the first rows of the embedding."""
    return embedding_of(target)[:256]


def _layer_rows(target: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Yield [4, columns], the first rows of each matrix of the first, middle and last layer."""
    layers: dict[int, list[torch.Tensor]] = {}
    for name, weight in target.named_parameters():
        number = re.search(r"\.(\d+)\.", name)
        if number is not None and weight.dim() >= 2:
            layers.setdefault(int(number[1]), []).append(weight)
    known = sorted(layers)
    for number in sorted({known[0], known[len(known) // 2], known[-1]}) if known else ():
        for weight in layers[number]:
            yield weight.flatten(0, -2)[:4]
