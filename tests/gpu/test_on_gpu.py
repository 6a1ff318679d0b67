# SPDX-License-Identifier: Apache-2.0
"""What to run first on a GPU: `DFLASH_TEST_DEVICE=cuda pytest tests/gpu tests/kernels`.

The bundled pair in bfloat16 on SGLang's own choice of back ends, graphs included: whole blocks, and
widths that the budget measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang
import torch
from pairs import Pair
from transformers import AutoTokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("DFLASH_TEST_DEVICE") != "cuda", reason="asks for DFLASH_TEST_DEVICE=cuda"
    ),
]
# The measured budget needs fa3 or trtllm_mha, which SGLang picks on these alone.
BUDGETS = ["fixed"]
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10):
    BUDGETS.append("measured")
each_budget = pytest.mark.parametrize("budget", BUDGETS)
QUESTIONS = [
    "Name three colours of the rainbow.",
    "A train travels 60 miles in an hour. How far does it travel in three?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0, "json_schema": '{"type": "array", "items": {"type": "integer"}}'},
]


def environment(budget: str) -> dict[str, str]:
    return {"SGLANG_DFLASH_BUDGET": budget, "SGLANG_DFLASH_WORKER": "plugin"}


@each_budget
def test_the_demos_texts_are_plain_decodings_but_for_near_ties(budget: str, tmp_path: Path) -> None:
    record_path = tmp_path / "demo.json"
    demo = [sys.executable, "-m", "sglang_dflash.cli", "demo", "--device", "cuda"]
    done = subprocess.run(
        [*demo, "--max-new-tokens", "128", "--json", str(record_path)],
        env={**os.environ, **environment(budget)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert record_path.is_file(), done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads(record_path.read_text())
    assert record["settings"]["device"] == "cuda"
    assert record["acceptance_length"] > 1.7
    divergences = [each["divergence"] for each in record["prompts"] if each["divergence"]]
    for divergence in divergences:
        assert divergence["log_prob_gap"] is not None, divergence
        assert divergence["log_prob_gap"] < 0.25, divergence


@pytest.fixture(params=BUDGETS)
def served(
    request: pytest.FixtureRequest, smollm2_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sglang.Engine]:
    """The bundled pair, with room for 32 requests."""
    for name, value in environment(request.param).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    engine = sglang.Engine(
        model_path=str(smollm2_pair.target),
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(smollm2_pair.draft),
        speculative_num_draft_tokens=8,
        dtype="bfloat16",
        max_running_requests=32,
        max_total_tokens=65536,
        log_level="warning",
    )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def prompts(smollm2_pair: Pair) -> list[list[int]]:
    """The questions as the chat template has them."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_pair.target)
    turns = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return [
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        for turn in turns
    ]


def ask(served: sglang.Engine, ids: list[list[int]], asked: list[dict[str, Any]]) -> list[Any]:
    """Return each answer's record."""
    params = [{"max_new_tokens": 96, **options} for options in asked]
    return served.generate(input_ids=ids, sampling_params=params)


def acceptance_length(outputs: list[Any]) -> float:
    """Return the tokens that a verify step commits."""
    figures = [output["meta_info"] for output in outputs]
    steps = sum(each.get("spec_verify_ct", 0) for each in figures)
    return sum(each["completion_tokens"] - 1 for each in figures) / steps


def test_batches_that_mix_all_options_end(served: sglang.Engine, prompts: list[list[int]]) -> None:
    for number in (1, 3, 32, 33, 100):  # one, few, as many as run at once, and more
        asked = [OPTIONS[i % len(OPTIONS)] for i in range(number)]
        outputs = ask(served, [prompts[i % 4] for i in range(number)], asked)
        assert len(outputs) == number
        for output, options in zip(outputs, asked, strict=True):
            if "json_schema" in options and output["meta_info"]["finish_reason"]["type"] == "stop":
                assert isinstance(json.loads(output["text"]), list)


def test_a_crowd_accepts_about_as_much_as_one(
    served: sglang.Engine, prompts: list[list[int]]
) -> None:
    """The measured budget may verify less in a crowd, but not nothing of a draft that pays."""
    greedy = {"temperature": 0, "ignore_eos": True}
    alone = [ask(served, [ids], [greedy])[0] for ids in prompts]
    crowd = ask(served, prompts * 8, [greedy] * 32)
    assert acceptance_length(alone) > 1.7
    if os.environ["SGLANG_DFLASH_BUDGET"] == "fixed":  # texts part at near-ties: not exactly
        assert acceptance_length(crowd) > 0.85 * acceptance_length(alone)
