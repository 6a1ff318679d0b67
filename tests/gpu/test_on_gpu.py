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
from pairs import Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("DFLASH_TEST_DEVICE") != "cuda", reason="asks for DFLASH_TEST_DEVICE=cuda"
    ),
]
each_budget = pytest.mark.parametrize("budget", ["fixed", "measured"])
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


@pytest.fixture(params=["fixed", "measured"])
def served(
    request: pytest.FixtureRequest, smollm2_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sglang.Engine]:
    """The bundled pair, with room for 32 requests."""
    for name, value in environment(request.param).items():
        monkeypatch.setenv(name, value)
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


def test_batches_that_mix_all_options_end_and_are_speculated(served: sglang.Engine) -> None:
    for number in (1, 3, 32, 33, 100):  # one, few, as many as the graphs hold, and more
        asked = [(QUESTIONS[i % 4], OPTIONS[i % len(OPTIONS)]) for i in range(number)]
        outputs = served.generate(
            prompt=[question for question, _ in asked],
            sampling_params=[{"max_new_tokens": 96, **options} for _, options in asked],
        )
        assert len(outputs) == number
        steps = sum(output["meta_info"]["spec_verify_ct"] for output in outputs)
        tokens = sum(output["meta_info"]["completion_tokens"] for output in outputs)
        assert all(output["text"] for output in outputs)
        assert tokens >= steps
        for output, (_, options) in zip(outputs, asked, strict=True):
            if "json_schema" in options and output["meta_info"]["finish_reason"]["type"] == "stop":
                assert isinstance(json.loads(output["text"]), list)


def test_a_greedy_text_does_not_lose_its_acceptance_in_a_crowd(served: sglang.Engine) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}
    alone = served.generate(prompt=QUESTIONS[1], sampling_params=greedy)
    crowd = served.generate(prompt=QUESTIONS * 8, sampling_params=greedy)
    for output in (alone, crowd[1]):
        assert output["meta_info"]["completion_tokens"] == 96
    assert len({output["text"][:20] for output in crowd[1::4]}) == 1
