# SPDX-License-Identifier: Apache-2.0
"""The target: how it is loaded, and where its answers end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sglang_dflash.training.settings import SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load_target", "stop_tokens"]

# Ends of a turn that some checkpoints state nowhere; SGLang stops at them all the same.
_TURN_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


def load_target(name: str, device: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a target without gradients, and its tokenizer.

    Args:
        name: A folder or a hub name.
        device: Where it answers.

    Raises:
        SettingsError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not os.path.exists(name) and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise SettingsError(f"TARGET {name}: neither a folder nor a hub name")
    try:
        target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SettingsError(f"TARGET {name}: transformers cannot load it: {error}") from error
    return target.to(device).eval().requires_grad_(False), tokenizer


def stop_tokens(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer: all that any part of the checkpoint names.

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
