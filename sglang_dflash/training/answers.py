# SPDX-License-Identifier: Apache-2.0
"""Texts of the target on transformers, with what the draft reads and learns kept on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_dflash.training.captured import (
    Capture,
    Text,
    assembled,
    captured_features,
    likely_tokens,
)
from sglang_dflash.training.decode_attention import fast_decoding
from sglang_dflash.training.decoding import DecodingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

__all__ = ["answer", "capture"]

_COMPACT_EVERY = 8  # steps; finished rows are cheap for a few steps, dropping them copies the cache


@torch.inference_mode()
def answer(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    keep: Capture,
    *,
    max_new_tokens: int,
    top_k: int,
    stop_ids: frozenset[int],
    generator: torch.Generator,
) -> list[Text]:
    """Return the target's answers to prompts decoded together, captured in the same pass.

    Args:
        target: A causal language model with full attention.
        prompts: n of token ids.
        temperatures: n; 0 decodes greedily.
        keep: What to keep.
        max_new_tokens: Where an answer is cut.
        top_k: Tokens that sampling chooses from.
        stop_ids: Tokens that end an answer, kept as its last.
        generator: Source of randomness, on the CPU.
    """
    with fast_decoding(target):
        batch = DecodingBatch(target, prompts, temperatures, keep, top_k, generator)
        for step in range(max_new_tokens):
            batch.choose()
            batch.finish(stop_ids, last=step == max_new_tokens - 1)
            if not batch.alive:
                break
            batch.read()
            if step % _COMPACT_EVERY == 0:
                batch.drop_finished()
    return batch.texts()


@torch.inference_mode()
def capture(target: PreTrainedModel, tokens: Sequence[int], start: int, keep: Capture) -> Text:
    """Return a finished text with its features and laws, from one pass over it.

    Args:
        target: A causal language model.
        tokens: T token ids, prompt and answer.
        start: Position of the answer's first token, at least 1.
        keep: What to keep.
    """
    ids = torch.tensor([tokens], dtype=torch.int64, device=target.device)
    output = target(
        ids[:, :-1],
        use_cache=False,
        output_hidden_states=keep.hidden_states,
        logits_to_keep=len(tokens) - start,
    )
    features = captured_features(output.hidden_states, keep, (1, len(tokens) - 1))
    laws = likely_tokens(output.logits[0], ids[0, start:], keep.num_laws)
    return assembled(ids[0].to("cpu", torch.int32), start, features[0].cpu(), laws)
