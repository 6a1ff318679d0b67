# SPDX-License-Identifier: Apache-2.0
"""Drafts made here, served by the engine: what training measured is what serving gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafts import KNOWN_BLOCK, MADE_BLOCK, known_prompts
from engines import dflash_options, engine
from pairs import Pair

from sglang_dflash.training.shards import Corpus

pytestmark = pytest.mark.slow


def served(
    pair: Pair, draft: Path, block_size: int, prompts: list[list[int]], new_tokens: int
) -> list[dict[str, Any]]:
    """Return the engine's greedy answers, which do not end by themselves."""
    options = dflash_options(Pair(pair.target, draft, block_size), block_size)
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    with engine(pair, **options) as started:
        return started.generate(input_ids=prompts, sampling_params=params)


def acceptance_length(outputs: list[dict[str, Any]]) -> float:
    """Return tokens per step, the token of the prefill left out."""
    steps = sum(output["meta_info"]["spec_verify_ct"] for output in outputs)
    return sum(output["meta_info"]["completion_tokens"] - 1 for output in outputs) / steps


def test_a_draft_made_from_nothing_is_accepted_as_training_said(
    made: Path, llama_pair: Pair
) -> None:
    corpus = Corpus(made / "training" / "data")
    numbers = corpus.split(held_out=True)[:8]
    texts = [corpus.read(i) for i in numbers]
    new_tokens = len(texts[0].tokens) - texts[0].start
    prompts = [text.tokens[: text.start].tolist() for text in texts]
    outputs = served(llama_pair, made, MADE_BLOCK, prompts, new_tokens)
    for output, text in zip(outputs, texts, strict=True):
        assert output["output_ids"] == text.tokens[text.start :].tolist()
    tau = acceptance_length(outputs)
    assert tau > 1.5
    lines = (made / "training" / "history.jsonl").read_text().splitlines()
    assert tau == pytest.approx(json.loads(lines[-1])["held_out"]["tau"], rel=0.05)


def test_a_draft_that_knows_its_texts_fills_its_blocks(knowing: Path, llama_pair: Pair) -> None:
    outputs = served(llama_pair, knowing, KNOWN_BLOCK, known_prompts(), 1 + 4 * KNOWN_BLOCK)
    assert acceptance_length(outputs) > 12
