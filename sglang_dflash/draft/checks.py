# SPDX-License-Identifier: Apache-2.0
"""Whether a draft belongs to the target it is started with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sglang_dflash.errors import DRAFT_OPTION, TARGET_OPTION, UnsupportedCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sglang_dflash.draft.config import DraftConfig

__all__ = ["check_block_size", "check_target", "with_mask_token"]


def check_target(
    config: DraftConfig,
    *,
    target_hidden_size: int,
    target_vocab_size: int,
    target_num_layers: int,
    tp_size: int,
    has_tokenizer: bool = False,
    target: str = TARGET_OPTION,
) -> None:
    """Refuse a draft that contradicts its target, naming every contradiction at once.

    Args:
        config: The draft.
        target_hidden_size: Channels of the target's hidden states and embeddings.
        target_vocab_size: Rows of the target's embedding.
        target_num_layers: Decoder layers of the target.
        tp_size: Ranks that share the draft's heads.
        has_tokenizer: Whether a mask token that is not numbered can be looked up
            (`with_mask_token`).
        target: What the user gave it as, for the message.

    Raises:
        UnsupportedCheckpoint: with each contradiction and how to mend it.
    """
    problems = [
        *_size_problems(config, target_hidden_size, target_vocab_size),
        *_layer_problems(config, target_num_layers),
        *_mask_problems(config, target_vocab_size, has_tokenizer=has_tokenizer),
        *_parallel_problems(config, tp_size),
    ]
    if problems:
        raise UnsupportedCheckpoint(
            f"{config.source} does not fit {target}:\n- " + "\n- ".join(problems),
            option=DRAFT_OPTION,
        )


def check_block_size(block_size: int, config: DraftConfig) -> None:
    """Refuse a block size that the draft cannot run at.

    Args:
        block_size: B, the anchor included.
        config: The draft.

    Raises:
        UnsupportedCheckpoint: B is below 2, or larger than a layer's sliding window.
    """
    option = f"--speculative-num-draft-tokens {block_size}"
    if block_size < 2:
        raise UnsupportedCheckpoint(
            f"{option}: a block is the anchor and at least one proposal, so it takes 2 or more "
            f"(the draft was trained at {config.block_size or 'an unstated size'}). To decode "
            "without a draft, leave --speculative-algorithm out."
        )
    window = min((w for w in config.sliding_windows if w is not None), default=block_size)
    if block_size > window:
        raise UnsupportedCheckpoint(
            f"{option}: larger than the draft's sliding window of {window} tokens, in which a "
            f"whole block must fit. Use {window} or less."
        )


def _size_problems(config: DraftConfig, hidden_size: int, vocab_size: int) -> list[str]:
    problems = []
    if config.hidden_size != hidden_size:
        problems.append(
            f"hidden_size is {config.hidden_size} and the target's is {hidden_size}, but the "
            "draft borrows the target's embedding and lm_head: use the draft made for this target"
        )
    if config.vocab_size is not None and config.vocab_size != vocab_size:
        problems.append(
            f"vocab_size is {config.vocab_size} and the target's is {vocab_size}: use the draft "
            "made for this target"
        )
    return problems


def _layer_problems(config: DraftConfig, num_layers: int) -> list[str]:
    problems = []
    stated = config.num_target_layers
    if stated is not None and stated != num_layers:
        problems.append(
            f"num_target_layers is {stated} and the target has {num_layers}: use the draft made "
            "for this target"
        )
    ids = config.target_layer_ids
    beyond = [i for i in ids if i > num_layers - 2]
    if beyond:
        problems.append(
            f"target_layer_ids {beyond} cannot be captured: with {num_layers} target layers 0 to "
            f"{num_layers - 2} can (the last layer's output is not exposed before the final norm): "
            "use a draft trained on earlier layers"
        )
    if list(ids) != sorted(set(ids)):
        problems.append(
            f"target_layer_ids {list(ids)} do not rise: layers are captured in the target's "
            "order, so the draft's fc would read them in another one: use a draft trained in order"
        )
    return problems


def with_mask_token(
    config: DraftConfig, tokenizer: PreTrainedTokenizerBase | None, target_vocab_size: int
) -> DraftConfig:
    """Return the draft with its `mask_token_id`: that of `mask_token`, which was added if need be.

    Args:
        config: The draft.
        tokenizer: The target's; None where the server runs without.
        target_vocab_size: Rows of the target's embedding.

    Raises:
        UnsupportedCheckpoint: it has none, or it lies beyond the embedding.

    Source: z-lab/dflash, whose drafts without a number were trained with a token added at the end
        of the vocabulary.
    """
    if config.mask_token_id is not None:
        return config
    number = None
    if tokenizer is not None:
        number = tokenizer.get_vocab().get(config.mask_token, len(tokenizer))
    found = dataclasses.replace(config, mask_token_id=number)
    if problems := _mask_problems(found, target_vocab_size):
        raise UnsupportedCheckpoint(f"{config.source}: {problems[0]}", option=DRAFT_OPTION)
    return found


def _mask_problems(
    config: DraftConfig, vocab_size: int, *, has_tokenizer: bool = False
) -> list[str]:
    if config.mask_token_id is None:
        if has_tokenizer:
            return []
        return [
            "mask_token_id is missing: add it to dflash_config, the tokenizer's id of "
            f"{config.mask_token!r} as the draft was trained"
        ]
    if config.mask_token_id >= vocab_size:
        return [
            f"mask_token_id is {config.mask_token_id} and the target's embedding has {vocab_size} "
            "rows: use the target that the draft was trained with, its embedding not resized"
        ]
    return []


def _parallel_problems(config: DraftConfig, tp_size: int) -> list[str]:
    problems = []
    if config.num_heads % tp_size:
        problems.append(
            f"{config.num_heads} heads cannot be shared by --tp-size {tp_size}: use a divisor of "
            f"{config.num_heads}"
        )
    kv_heads = config.num_kv_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        problems.append(
            f"{kv_heads} KV heads cannot be shared by or copied to --tp-size {tp_size}: use a "
            f"divisor or a multiple of {kv_heads}"
        )
    return problems
