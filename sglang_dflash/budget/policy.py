# SPDX-License-Identifier: Apache-2.0
"""Who decides the verify width: a constant, or what pays by measurement."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.controller import BudgetController, Step
from sglang_dflash.verify.rows import Rows

__all__ = ["FixedWidth", "Judged", "Latest", "MeasuredWidths", "StepFacts", "WidthPolicy"]


class StepFacts(NamedTuple):
    """What is known of a decode step before it runs.

    Attributes:
        num_requests: n.
        context_tokens: of all requests together.
        iteration: the scheduler's count of forwards; a gap means that another one came between.
        after_idle: whether the scheduler waited before it.
    """

    num_requests: int
    context_tokens: int
    iteration: int
    after_idle: bool

    def follows(self, before: StepFacts) -> bool:
        """Return whether nothing came between another step and this one."""
        return not self.after_idle and self.iteration == before.iteration + 1


class WidthPolicy:
    """Asked three times a step: before the draft, before verify, and after it."""

    wants_confidence = False

    def drafts(self, facts: StepFacts) -> bool:
        """Return whether the draft runs."""
        raise NotImplementedError

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        """Return how many rows of each request are verified, 1..B.

        Args:
            confidence: [n, B-1] float32, the draft's probability of each proposal; None for a step
                without the draft, or where nobody asked.
            sampled: [n] bool, False for greedy requests.
        """
        raise NotImplementedError

    def settle(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """Learn what verify made of the step that `widths` was asked for; by default nothing.

        Args:
            rows: the M verified rows.
            num_accepted: [n] int, accepted proposals.
        """


class FixedWidth(WidthPolicy):
    """The same width for every request and load."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._num_requests = 0

    def drafts(self, facts: StepFacts) -> bool:
        """Return True."""
        self._num_requests = facts.num_requests
        return True

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        """Return the width for each request; see `WidthPolicy`.

        Args:
            confidence: [n, B-1] or None, unused.
            sampled: [n] bool, unused.
        """
        return [self._width] * self._num_requests


class Judged(NamedTuple):
    """The proposals of a step with the draft."""

    confidence: torch.Tensor  # [n, B-1]
    sampled: torch.Tensor  # [n]
    chances: torch.Tensor  # [n, B-1]


class Latest(NamedTuple):
    """What a step was decided by.

    Attributes:
        explores: it looks wider than pays by present belief.
        expected_tokens: of its plan, all requests together; says nothing of a plain step.
        judged: its proposals; None for a plain step.
    """

    explores: bool
    expected_tokens: float
    judged: Judged | None


class MeasuredWidths(WidthPolicy):
    """The widths that pay by measured step times and calibrated chances.

    A step's time is the time from its start to the next step's, so that it has everything that a
    step costs, the scheduler's part included. It is dropped where something else came between.
    """

    wants_confidence = True

    def __init__(self, controller: BudgetController, calibrator: Calibrator) -> None:
        self.controller, self.calibrator = controller, calibrator
        self._facts: StepFacts | None = None
        self._started = 0.0
        self._step = Step("draft", explores=False)
        self._num_rows = 0
        self._judged: Judged | None = None
        self._expected_tokens = 0.0  # of the latest plan, all requests together

    def drafts(self, facts: StepFacts) -> bool:
        """Note the time of the step before, and return whether this one pays for a draft."""
        now = time.perf_counter()
        self._observe(facts, now - self._started)
        self._facts, self._started = facts, now
        self._step = self.controller.start(facts.num_requests, facts.context_tokens)
        self._num_rows = facts.num_requests
        return self._step.kind == "draft"

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        """Return the widths of the best plan for these proposals; see `WidthPolicy`.

        Args:
            confidence: [n, B-1] float32; None for a step without the draft.
            sampled: [n] bool.
        """
        self._judged = None
        if confidence is None:
            return [1] * self._num_rows
        chances = self.calibrator.chances(confidence, sampled)
        self._judged = Judged(confidence, sampled, chances)
        plan = self.controller.plan(chances.double().cpu().numpy())
        self._num_rows = int(plan.widths.sum())
        self._expected_tokens = plan.expected_tokens
        return plan.widths.tolist()

    def settle(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """Calibrate by what was accepted; see `WidthPolicy`.

        Args:
            rows: the M verified rows.
            num_accepted: [n] int.
        """
        if self._judged is not None:
            confidence, sampled, _ = self._judged
            self.calibrator.update(confidence, sampled, rows.widths, num_accepted)
            self.controller.settle(num_accepted.cpu().numpy())

    @property
    def latest(self) -> Latest:
        """What the latest step was decided by."""
        return Latest(self.controller.explores, self._expected_tokens, self._judged)

    def _observe(self, facts: StepFacts, seconds: float) -> None:
        before = self._facts
        if before is None or not facts.follows(before):
            return
        self.controller.cost.observe(
            self._step.kind, before.num_requests, self._num_rows, before.context_tokens, seconds
        )
