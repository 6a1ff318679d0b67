# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of the engine, with a draft or without, and what its figures say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import dflash_options, engine
from pairs import Pair

__all__ = ["acceptance_length", "served"]


def served(
    target: Path, draft: Path | None, block_size: int, prompts: list[list[int]], new_tokens: int
) -> list[dict[str, Any]]:
    """Return the engine's greedy answers, which do not end by themselves.

    Args:
        target: Its folder.
        draft: Its folder, or None for plain decoding.
        block_size: B.
        prompts: Tokens of each.
        new_tokens: Tokens of each answer.
    """
    pair = Pair(target, draft or target, block_size)
    options = {} if draft is None else dflash_options(pair, block_size)
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    with engine(pair, **options) as started:
        return started.generate(input_ids=prompts, sampling_params=params)


def acceptance_length(outputs: list[dict[str, Any]]) -> float:
    """Return tokens per step, the token of the prefill left out."""
    steps = sum(output["meta_info"]["spec_verify_ct"] for output in outputs)
    return sum(output["meta_info"]["completion_tokens"] - 1 for output in outputs) / steps
