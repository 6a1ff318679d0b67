# SPDX-License-Identifier: Apache-2.0
"""A draft made here, served by the engine: what training measured is what serving gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drafts import MADE_BLOCK
from pairs import Pair
from serving import acceptance_length, served

from sglang_dflash.training.shards import Corpus

pytestmark = pytest.mark.slow


def test_a_draft_made_from_nothing_is_accepted_as_training_said(
    made: Path, llama_pair: Pair
) -> None:
    corpus = Corpus(made / "training" / "data")
    numbers = corpus.split(held_out=True)[:8]
    texts = [corpus.read(i) for i in numbers]
    new_tokens = len(texts[0].tokens) - texts[0].start
    prompts = [text.tokens[: text.start].tolist() for text in texts]
    outputs = served(llama_pair.target, made, MADE_BLOCK, prompts, new_tokens)
    for output, text in zip(outputs, texts, strict=True):
        assert output["output_ids"] == text.tokens[text.start :].tolist()
    tau = acceptance_length(outputs)
    assert tau > 1.5
    lines = (made / "training" / "history.jsonl").read_text().splitlines()
    assert tau == pytest.approx(json.loads(lines[-1])["held_out"]["tau"], rel=0.05)
