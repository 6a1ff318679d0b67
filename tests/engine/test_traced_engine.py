# SPDX-License-Identifier: Apache-2.0
"""The trace of a real engine against what it tells of its requests; of two ranks, one decides."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from engines import dflash_options, engine, prompts_for
from pairs import Pair

from sglang_dflash.acceptance import by_position
from sglang_dflash.trace import read_trace

BLOCK_SIZE = 8
PARAMS = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


@pytest.mark.slow
def test_every_step_of_every_request_is_written(llama_pair: Pair, tmp_path: Path) -> None:
    file, config = tmp_path / "trace.jsonl", tmp_path / "budget.json"
    config.write_text('{"budget": "measured", "min_width": 2, "max_width": 5}')
    prompt = prompts_for(llama_pair)
    with engine(
        llama_pair,
        environment={"SGLANG_DFLASH_TRACE": str(file), "SGLANG_DFLASH_BUDGET": "measured"},
        speculative_adaptive_config=str(config),
        tp_size=2,
        disable_overlap_schedule=True,  # with it, a request takes a step more than it needs
        **dflash_options(llama_pair, BLOCK_SIZE),
    ) as served:
        outputs = served.generate(
            input_ids=[prompt(12, seed) for seed in range(3)], sampling_params=PARAMS
        )
        ended = time.time()
        served.generate(input_ids=prompt(5, 9), sampling_params=PARAMS)  # so that all are written
    block_size, steps = read_trace(file)
    assert block_size == BLOCK_SIZE
    mine = [step for step in steps if step["time"] < ended]
    assert len(mine) == max(output["meta_info"]["spec_verify_ct"] for output in outputs)
    widths = [width for step in mine for width in step["widths"]]
    accepted = [count for step in mine for count in step["accepted"]]
    assert (min(widths), max(widths)) >= (2, 3), "the file's bounds"
    assert max(widths) <= 5
    verified = [0] * (BLOCK_SIZE - 1)
    for output in outputs:
        for place, count in enumerate(output["meta_info"]["spec_verified_per_position"]):
            verified[place] += count
    rows = [widths.count(width) for width in range(BLOCK_SIZE + 1)]
    kept = [accepted.count(count) for count in range(BLOCK_SIZE + 1)]
    assert by_position(rows, kept)["spec_verified_per_position"] == verified
    for step in mine:
        assert step["tokens"] == step["requests"] + sum(step["accepted"])
        if step["confidence"] is None:  # nothing was to be won by looking at the proposals
            assert step["widths"] == [step["draft_width"]] * step["requests"]
        else:
            assert len(step["confidence"]) == len(step["chances"]) == step["requests"]
        assert 0 < step["expected_tokens"] <= sum(step["widths"])
    assert sum(step["seconds"] is not None for step in mine) >= len(mine) - 2
