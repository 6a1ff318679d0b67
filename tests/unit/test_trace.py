# SPDX-License-Identifier: Apache-2.0
"""What is written of a step, and what is read back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from test_budget_policy import BLOCK_SIZE, facts, measured

from sglang_dflash.budget.policy import WidthPolicy
from sglang_dflash.trace import TracedWidths, read_trace
from sglang_dflash.verify.rows import Rows


def step(policy: WidthPolicy, iteration: int, n: int = 2, accepted: int = 1) -> None:
    """Serve a step of which each request's first proposals are accepted."""
    width = policy.draft_width(facts(iteration, n))
    confidence = torch.full((n, width - 1), 0.75) if width > 1 else None
    widths = policy.widths(confidence, torch.zeros(n, dtype=torch.bool))
    rows = Rows.of(widths, BLOCK_SIZE, "cpu")
    policy.settle(rows, (rows.widths - 1).clamp(max=accepted))


def test_a_step_is_written_when_the_next_begins(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    policy = TracedWidths(measured(row_seconds=0.0, min_width=2), str(file), BLOCK_SIZE)
    step(policy, 4)
    assert read_trace(file).steps == []
    step(policy, 5)
    step(policy, 7)
    first, second = read_trace(file).steps
    assert first["requests"] == 2
    assert first["draft_width"] == BLOCK_SIZE
    assert first["accepted"] == [1, 1]
    assert first["tokens"] == 4
    assert first["confidence"] == [[0.75] * (BLOCK_SIZE - 1)] * 2
    assert 0 < first["chances"][0][0] < 1
    assert abs(first["time"] - time.time()) < 60
    assert first["seconds"] > 0
    assert second["seconds"] is None  # iteration 6 came between


def test_a_plain_step_has_no_proposals(tmp_path: Path) -> None:
    policy = TracedWidths(measured(row_seconds=0.004), str(tmp_path / "trace"), BLOCK_SIZE)
    for iteration in range(0, 200, 2):  # gaps: no time is measured
        step(policy, iteration, accepted=0)
    plain = [s for s in read_trace(tmp_path / "trace").steps if s["draft_width"] == 1]
    assert plain
    assert all(s["confidence"] is None and s["widths"] == [1, 1] for s in plain)
    assert all(s["tokens"] == s["expected_tokens"] == 2 for s in plain)


def test_the_policy_decides_as_without(tmp_path: Path) -> None:
    bare = measured(row_seconds=0.004)
    traced = TracedWidths(measured(row_seconds=0.004), str(tmp_path / "trace"), BLOCK_SIZE)
    for iteration in range(0, 60, 2):
        for policy in (bare, traced):
            step(policy, iteration)
    torch.testing.assert_close(bare.calibrator.intercepts, traced.inner.calibrator.intercepts)


def test_a_line_half_written_is_left_out_and_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('{"sglang_dflash":"1","block_size":4}\n{"tokens":3}\n{"tok')
    assert read_trace(file) == (4, [{"tokens": 3}])
    file.write_text("{}\n")
    with pytest.raises(ValueError, match="is no trace of sglang-dflash"):
        read_trace(file)
