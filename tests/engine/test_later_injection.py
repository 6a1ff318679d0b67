# SPDX-License-Identifier: Apache-2.0
"""Context of plain steps is injected a few steps late; the draft must not see a difference."""

from __future__ import annotations

import pytest
from engines import dflash_options, engine, prompts_for, with_test_plugin
from pairs import Pair

pytestmark = pytest.mark.slow

PLAIN_STEPS = 11  # more than wait together, and no multiple of it


def steps_and_texts(pair: Pair, later: str | None) -> tuple[list[int], list[list[int]]]:
    """Return the steps and tokens of requests that end at different times, of two batches."""
    variables = {"DFLASH_PLAIN_STEPS": str(PLAIN_STEPS), "SGLANG_DFLASH_BUDGET": "fixed"}
    if later is not None:
        variables["DFLASH_LATER"] = later
    prompt = prompts_for(pair)
    params = [
        {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in (150, 90, 60)
    ]
    with engine(
        pair, environment=with_test_plugin(**variables), **dflash_options(pair, 8)
    ) as started:
        outputs = [
            output
            for batch in range(2)
            for output in started.generate(
                input_ids=[prompt(20, 3 * batch + i) for i in range(3)], sampling_params=params
            )
        ]
    steps = [output["meta_info"]["spec_verify_ct"] for output in outputs]
    return steps, [output["output_ids"] for output in outputs]


def test_context_injected_late_is_the_same_context(smollm2_pair: Pair) -> None:
    steps, texts = steps_and_texts(smollm2_pair, None)
    at_once, same_texts = steps_and_texts(smollm2_pair, "at once")
    assert texts == same_texts
    assert steps == at_once
    never, _ = steps_and_texts(smollm2_pair, "never")
    assert sum(never) > sum(at_once), "the count of steps shows a missing context"
