# SPDX-License-Identifier: Apache-2.0
"""A plugin for tests: acceptance rules made wrong, widths made up, context injected otherwise."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_dflash.budget import clock, controller, late_controller, policy
from sglang_dflash.draft.forward import DraftForward
from sglang_dflash.verify import accept, graphs
from sglang_dflash.verify.buckets import RowBuckets

__all__ = ["register"]

_right = accept.accept_block
_inject = DraftForward.inject


def register() -> None:
    """Put what the environment asks for where the worker will look for the right thing."""
    if "DFLASH_MUTANT_FILE" in os.environ:
        accept.accept_block = _accept  # type: ignore[assignment]
    if "DFLASH_RANDOM_WIDTHS" in os.environ:
        policy.FixedWidth = _RandomWidths  # type: ignore[misc]
    if "DFLASH_PLAIN_STEPS" in os.environ:
        policy.FixedWidth = _MostlyPlain  # type: ignore[misc]
    if "DFLASH_LATE" in os.environ:
        _work_behind_the_host()
    if "DFLASH_LATER" in os.environ:
        DraftForward.inject = _never_late  # type: ignore[method-assign]


def _accept(proposals, draft, target_probs, uniforms, row_starts, widths):
    name = Path(os.environ["DFLASH_MUTANT_FILE"]).read_text()
    arguments = (draft, target_probs, row_starts, widths)
    if name == "p instead of p/q":
        chances = accept.rejection_chances(proposals, *arguments)
        drawn = (draft.token_ids == proposals.unsqueeze(2)) * draft.probs
        kept = (uniforms < chances.accept * drawn.sum(2)).long().cumprod(1).sum(1)
        return accept.Acceptance(kept, accept.last_law(kept, chances.scale, *arguments))
    right = _right(proposals, draft, target_probs, uniforms, row_starts, widths)
    if name == "q not subtracted":
        return right._replace(last_law=target_probs[row_starts + right.num_accepted])
    assert name == "right", name
    return right


def _work_behind_the_host() -> None:
    """Decide as for a GPU, on made-up graph sizes; `random`: another number of rows each step."""
    graphs.host_waits = lambda _: False
    graphs.takes_ragged_graphs = lambda _: True
    graphs.row_buckets = lambda _: RowBuckets((2, 3, 5, 8, 16, 24, 40), 12)
    clock.clock_of = lambda _: _LaggingClock()
    if os.environ["DFLASH_LATE"] == "random":
        late_controller.LateController = _RandomRows  # type: ignore[misc]


class _LaggingClock(clock.HostClock):
    """A device that is two steps behind, as far as the host can tell."""

    def __init__(self) -> None:
        self._num_marks = 0

    def mark(self) -> tuple[int, float]:
        self._num_marks += 1
        return self._num_marks, super().mark()

    def passed(self, mark: tuple[int, float]) -> bool:
        return self._num_marks - mark[0] > 8

    def seconds(self, first: tuple[int, float], last: tuple[int, float]) -> float:
        return last[1] - first[1]


class _RandomRows(late_controller.LateController):
    """Another number of rows each step; one step of five is plain."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._random = random.Random(get_parallel().tp_rank)  # the first rank's must count

    def start(self, n: int, context_tokens: float | None = None) -> controller.Step:
        step = super().start(n, context_tokens)
        width = self._random.choice([1, *4 * [self.limits.widest]])
        self._step = step._replace(draft_width=width)
        return self._step

    def choose_rows(self, n: int) -> late_controller.StepPlan:
        plan, width = super().choose_rows(n), self._step.draft_width
        most = n * width
        return plan._replace(num_rows=self._buckets.filled(n, self._random.randint(n, most), most))


def _never_late(self, *arguments, later=False):
    """Inject at once what could wait, or never."""
    if not later or os.environ["DFLASH_LATER"] == "at once":
        _inject(self, *arguments)


class _RandomWidths(policy.FixedWidth):
    """Other widths for each request and step, of draft and verify; one step of five is plain."""

    wants_confidence = True  # so that all ranks take the first one's

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._random = random.Random(get_parallel().tp_rank)  # the first rank's must count

    def draft_width(self, facts: policy.StepFacts) -> int:
        widest = super().draft_width(facts)
        narrow = self._random.randint(2, widest)
        return self._random.choice([1, narrow, narrow, widest, widest])

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        most = 1 if confidence is None else confidence.shape[1] + 1
        return [self._random.randint(1, most) for _ in range(self._num_requests)]


class _MostlyPlain(policy.FixedWidth):
    """Some plain steps, then a whole block."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._left = self._plain_steps = int(os.environ["DFLASH_PLAIN_STEPS"])

    def draft_width(self, facts: policy.StepFacts) -> int:
        width = super().draft_width(facts)
        self._left = self._left - 1 if self._left else self._plain_steps
        return 1 if self._left else width

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        return [self._width if self._left == 0 else 1] * self._num_requests
