# SPDX-License-Identifier: Apache-2.0
"""What the scripts make of a trace, and of a draft that knows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.calibration import by_chance_alone, curve_of, judged
from bench.changing_load import columns, rolling, summarise
from bench.random_draft import write_random_draft
from sglang_dflash.demo.model import bundled_draft
from sglang_dflash.draft.checkpoint import check_checkpoint

BLOCK = 4


def step(widths: list[int], accepted: list[int], chance: float = 0.5) -> dict[str, Any]:
    """Return a step as a trace has it."""
    proposals = [[chance] * (BLOCK - 1)] * len(widths)
    return {
        "time": 0.0, "requests": len(widths), "draft_width": BLOCK, "explores": False,
        "widths": widths, "accepted": accepted, "tokens": len(widths) + sum(accepted),
        "expected_tokens": 1.5 * len(widths), "confidence": proposals, "chances": proposals,
        "seconds": 0.1,
    }  # fmt: skip


def test_a_rolling_mean_looks_ahead() -> None:
    values = [4.0, 0.0, 2.0, 2.0, 8.0]
    expected = [np.mean(values[i : i + 3]) for i in range(5)]
    np.testing.assert_allclose(rolling(values, 3), expected)


@pytest.mark.parametrize("lag", [0, 15, 40])
def test_a_plan_that_lags_is_seen_to(lag: int) -> None:
    steps = [step([4], [1])] * (100 + lag) + [step([1], [0])] * (100 - lag)
    first, second = summarise(columns(steps), [0, 100], ["many rows", "few rows"])
    assert (first["rows"], second["rows"]) == (4, 1)
    assert first["followed_after"] == 0
    assert second["followed_after"] == max(0, lag - 3)  # three rows too many in 20 steps are few
    assert second["tokens"] == 1


def test_only_what_verify_judged_counts() -> None:
    found = judged([step([4, 2], [1, 1]), step([1, 1], [0, 0])], BLOCK)
    assert found.accepted.tolist() == [True, False, True]
    with pytest.raises(SystemExit, match="no step of the window drafted"):
        judged([step([1], [0]) | {"confidence": None}], BLOCK)


def test_chance_alone_explains_the_error_of_perfect_predictions_only() -> None:
    generator = torch.Generator().manual_seed(1)
    chances = torch.rand(400, generator=generator)
    accepted = torch.rand(400, generator=generator) < chances
    alone = by_chance_alone(chances)
    right = curve_of(chances, accepted).expected_calibration_error().item()
    wrong = curve_of(chances.sqrt(), accepted).expected_calibration_error().item()
    assert 0.02 < alone < 0.08
    assert right < 2 * alone < wrong


def test_a_random_draft_is_a_draft_of_the_same_shapes(tmp_path: Path) -> None:
    source = bundled_draft()
    folder = write_random_draft(source, tmp_path / "random")
    check_checkpoint(str(folder), None)
    own, theirs = (load_file(f / "model.safetensors") for f in (folder, source))
    assert {k: (v.shape, v.dtype) for k, v in own.items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.items()
    }
    matrices = [name for name in own if own[name].ndim > 1]
    for name in matrices:
        pair = torch.stack([own[name].flatten().float(), theirs[name].flatten().float()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.05
