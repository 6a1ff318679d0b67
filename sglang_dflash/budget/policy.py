# SPDX-License-Identifier: Apache-2.0
"""Who decides the verify width: a constant, or what pays by measurement."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.controller import LEARN_FROM, BudgetController
from sglang_dflash.verify.rows import Rows

__all__ = [
    "FixedWidth",
    "FollowedWidths",
    "Judged",
    "Latest",
    "Lessons",
    "MeasuredWidths",
    "StepFacts",
    "WidthPolicy",
]


class StepFacts(NamedTuple):
    """What is known of a decode step before it runs.

    Attributes:
        num_requests: n.
        context_tokens: positions of all requests together, the block's own included; where the host
            does not wait for lengths, those reserved.
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
    """Asked three times a step: before the draft, before verify, and after it.

    Attributes:
        wants_confidence: whether it decides by the draft's probabilities and by the clock, which
            ranks see differently.
        agrees: whether it then asks the first rank itself.
    """

    wants_confidence = agrees = False

    @property
    def judges(self) -> bool:
        """Whether the step that `draft_width` decided on wants its proposals' probabilities."""
        return self.wants_confidence

    def draft_width(self, facts: StepFacts) -> int:
        """Return over how many rows of each block the draft runs, anchor included; 1 skips it."""
        raise NotImplementedError

    def draft_begins(self) -> None:
        """Note that the draft starts now, where it runs; by default nothing."""

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int] | Rows:
        """Return how many rows of each request are verified, 1..B, or the rows themselves.

        Rows where the host does not know the widths; all ranks must agree on them already.

        Args:
            confidence: [n, w-1] float32, of `Proposal`, w the step's draft width; None for a step
                without the draft, or one that does not judge.
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

    def draft_width(self, facts: StepFacts) -> int:
        """Return the width; see `WidthPolicy`."""
        self._num_requests = facts.num_requests
        return self._width

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        """Return the width for each request; see `WidthPolicy`.

        Args:
            confidence: unused.
            sampled: [n] bool, unused.
        """
        return [self._width] * self._num_requests


class FollowedWidths(WidthPolicy):
    """For all ranks but the first, which measures and decides: the worker asks it for every number.

    Its own are of no effect, and nothing is learnt where nothing is decided.
    """

    wants_confidence = True

    def __init__(self) -> None:
        self._num_requests = 0

    def draft_width(self, facts: StepFacts) -> int:
        """Return 1; see `WidthPolicy`."""
        self._num_requests = facts.num_requests
        return 1

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        """Return 1 for each request; see `WidthPolicy`.

        Args:
            confidence: unused.
            sampled: [n] bool, unused.
        """
        return [1] * self._num_requests


class Lessons:
    """What a calibrator is to learn: several short steps at once, a long one by itself.

    Args:
        calibrator: who learns.
        min_steps: how many at once, at least.
    """

    def __init__(self, calibrator: Calibrator, *, min_steps: int = 1) -> None:
        self._calibrator, self._min_steps = calibrator, min_steps
        self._steps: list[tuple[torch.Tensor, ...]] = []  # not yet learnt from

    def add(
        self,
        confidence: torch.Tensor,
        sampled: torch.Tensor,
        rows: Rows,
        num_accepted: torch.Tensor,
    ) -> None:
        """Take in a step with the draft.

        Args:
            confidence: [n, w-1] float32, of `Proposal`.
            sampled: [n] bool.
            rows: the M verified rows.
            num_accepted: [n] int.
        """
        unseen = rows.block_size - 1 - confidence.shape[1]
        padded = F.pad(confidence, (0, unseen), value=0.5)
        self._steps.append((padded, sampled, rows.widths, num_accepted))
        enough = sum(len(each[1]) for each in self._steps) >= LEARN_FROM
        if enough and len(self._steps) >= self._min_steps:
            self._calibrator.update(*map(torch.cat, zip(*self._steps, strict=True)))
            self._steps.clear()


class Judged(NamedTuple):
    """The proposals of a step with the draft."""

    confidence: torch.Tensor  # [n, w-1]
    sampled: torch.Tensor  # [n]
    chances: torch.Tensor  # [n, w-1]


class Latest(NamedTuple):
    """What a step was decided by.

    Attributes:
        draft_width: rows of each block that the draft ran over; 1 for a plain step.
        explores: it looks wider than pays by present belief.
        expected_tokens: of its plan, all requests together; says nothing of a plain step.
        judged: its proposals; None for a plain step, and for one that did not judge.
    """

    draft_width: int
    explores: bool
    expected_tokens: float
    judged: Judged | None


class MeasuredWidths(WidthPolicy):
    """The widths that pay by measured step times and calibrated chances.

    The draft's part of a step is timed from its begin to the choice of widths; the rest is what
    lies between two steps' starts beyond that, so that it has everything that a step costs, the
    scheduler's part included. It is dropped where something else came between. Both are the host's
    time: for devices that the host waits for.
    """

    wants_confidence = True

    def __init__(self, controller: BudgetController, calibrator: Calibrator) -> None:
        self.controller, self.calibrator = controller, calibrator
        self._facts: StepFacts | None = None
        self._started = 0.0
        self._decided, self._late_seconds = 0.0, 0.0
        self._draft_began, self._draft_seconds = 0.0, 0.0
        self._num_rows = 0
        self._judged: Judged | None = None
        self._expected_tokens = 0.0  # of the latest plan, all requests together
        self._lessons = Lessons(calibrator)

    @property
    def judges(self) -> bool:
        """Whether this step's proposals are judged; see `WidthPolicy`."""
        return self.controller.step.judges

    def draft_width(self, facts: StepFacts) -> int:
        """Note the time of the step before, and return the draft width that pays now."""
        now = time.perf_counter()
        self._observe(facts, now - self._started)
        self._facts, self._started = facts, now
        self._num_rows, self._draft_seconds = facts.num_requests, 0.0
        step = self.controller.start(facts.num_requests, facts.context_tokens)
        self._decided = time.perf_counter()
        self._late_seconds = 0.0
        return step.draft_width

    def draft_begins(self) -> None:
        """Leave out of this step's price what was late from steps before."""
        self._draft_began = time.perf_counter()
        self._late_seconds = self._draft_began - self._decided

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int]:
        """Return the widths of the best plan for these proposals; see `WidthPolicy`.

        Args:
            confidence: [n, w-1] float32; None for a step that does not judge.
            sampled: [n] bool.
        """
        self._judged = None
        if confidence is None:
            return self._undivided()
        chances = self.calibrator.chances(confidence, sampled)
        self._judged = Judged(confidence, sampled, chances)
        plan = self.controller.plan(chances.double().cpu().numpy())
        self._num_rows = plan.num_rows
        self._expected_tokens = plan.expected_tokens
        self._observe_draft(chances.numel() + len(chances))
        return plan.widths.tolist()

    def _undivided(self) -> list[int]:
        """Return the widths of a step whose proposals are not looked at: one row each, or all."""
        width, n = self.controller.step.draft_width, self._facts.num_requests
        if width > 1:
            self._expected_tokens = self.controller.take_all()
            # Shorter than a draft that is judged, whose price is wanted: it stays unknown.
            self._draft_seconds = time.perf_counter() - self._draft_began
        self._num_rows = n * width
        return [width] * n

    def settle(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """Calibrate by what was accepted; see `WidthPolicy`.

        Args:
            rows: the M verified rows.
            num_accepted: [n] int.
        """
        if not self.controller.step.drafts:
            return
        self.controller.settle(num_accepted.cpu().numpy())
        if self._judged is None:
            return
        confidence, sampled, _ = self._judged
        self._lessons.add(confidence, sampled, rows, num_accepted)

    @property
    def latest(self) -> Latest:
        """What the latest step was decided by."""
        step = self.controller.step
        return Latest(step.draft_width, step.explores, self._expected_tokens, self._judged)

    def _observe_draft(self, num_rows: int) -> None:
        self._draft_seconds = time.perf_counter() - self._draft_began
        n, context = self._facts.num_requests, self._facts.context_tokens
        self.controller.cost.observe("draft", n, num_rows, context, self._draft_seconds)

    def _observe(self, facts: StepFacts, seconds: float) -> None:
        before = self._facts
        if before is None or not facts.follows(before):
            return
        n, context = before.num_requests, before.context_tokens
        rest = seconds - self._late_seconds - self._draft_seconds
        self.controller.cost.observe("target", n, self._num_rows, context, rest)
