# SPDX-License-Identifier: Apache-2.0
"""Widths for a device that works behind the host, which therefore never looks at a step's results.

The host chooses *how many* rows a step verifies, by the steps that it has heard of; the device
chooses *which*, by this step's own proposals. SGLang's DSPARK splits the decision in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_dflash.budget.calibration import Calibrator, survival
from sglang_dflash.budget.clock import Clock
from sglang_dflash.budget.late_controller import LateController, StepPlan
from sglang_dflash.budget.planner import Limits
from sglang_dflash.budget.policy import Lessons, StepFacts, WidthPolicy
from sglang_dflash.verify.rows import Rows

__all__ = ["Host", "LateWidths", "most_likely_rows"]


_LEARN_AFTER = 16  # steps: learning takes a hundred small launches


class Host(NamedTuple):
    """How the host hears of the device and of other ranks without waiting for the device.

    Attributes:
        clock: of the device.
        copy: begins to copy a tensor to the host, and returns the copy.
        agree: returns the first rank's numbers.
        share: makes a tensor of the device the first rank's.
    """

    clock: Clock
    copy: Callable[[torch.Tensor], torch.Tensor]
    agree: Callable[[list[int]], list[int]]
    share: Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Step:
    """A step, from its start until the host has heard how it ended.

    Attributes:
        facts: what was known before it ran.
        plan: how many rows.
        started: moment.
        drafted: moments of the draft's begin and of the choice of widths.
        chances: [n, w-1], on their way to the host; None for a plain step.
        widths: [n], on their way to the host where they are counted.
        accepted: [n], on their way to the host.
        arrived: moment at which they are there.
        ended: moment at which the next step starts; None where something else came between.
    """

    facts: StepFacts
    plan: StepPlan
    started: Any
    drafted: list[Any]
    chances: torch.Tensor | None = None
    widths: torch.Tensor | None = None
    accepted: torch.Tensor | None = None
    arrived: Any = None
    ended: Any = None


class LateWidths(WidthPolicy):
    """The widths that pay by measured step times and calibrated chances, without waiting for them.

    The draft runs over whole blocks or not at all, for it has graphs of no other width.

    Args:
        controller: what the host knows.
        calibrator: on the device; it learns there, in the order of the stream.
        host: how the host hears of the device.
        count: called with each step's widths [n], accepted proposals [n], chances [n, w-1] or None,
            and expected tokens; None counts nothing.
    """

    wants_confidence = agrees = True

    def __init__(
        self,
        controller: LateController,
        calibrator: Calibrator,
        host: Host,
        count: Callable[..., None] | None = None,
    ) -> None:
        self.controller, self.calibrator = controller, calibrator
        self._count = count
        self._lessons = Lessons(calibrator, min_steps=_LEARN_AFTER)
        self._host = host
        self._unheard: deque[_Step] = deque()  # the running step is the last
        self._judged: tuple[torch.Tensor, torch.Tensor] | None = None

    def draft_width(self, facts: StepFacts) -> int:
        """Hear of the steps that have ended, and decide on the next one; see `WidthPolicy`."""
        now = self._host.clock.mark()
        if self._unheard and facts.follows(self._unheard[-1].facts):
            self._unheard[-1].ended = now
        self._hear()
        step = self.controller.start(facts.num_requests, facts.context_tokens)
        plan = self.controller.choose_rows(facts.num_requests)
        width, num_rows = self._host.agree([step.draft_width, plan.num_rows])
        plan = plan._replace(num_rows=num_rows)
        self._unheard.append(_Step(facts, plan, now, []))
        self._judged = None
        return self.controller.limits.block_size if width > 1 else 1

    def draft_begins(self) -> None:
        """Mark the moment."""
        self._unheard[-1].drafted.append(self._host.clock.mark())

    def widths(self, confidence: torch.Tensor | None, sampled: torch.Tensor) -> list[int] | Rows:
        """Return as many rows as were decided, the most likely ones; see `WidthPolicy`.

        Args:
            confidence: [n, w-1] float32; None for a step without the draft.
            sampled: [n] bool.
        """
        step, limits = self._unheard[-1], self.controller.limits
        if confidence is None:
            return self.controller.plain_widths(step.facts.num_requests)
        confidence = confidence[:, : limits.widest - 1]  # the draft ran over whole blocks
        self._judged = (confidence, sampled)
        chances = self.calibrator.chances(confidence, sampled)
        widths = self._host.share(most_likely_rows(chances, step.plan.num_rows, limits))
        step.chances = self._host.copy(chances)
        step.drafted.append(self._host.clock.mark())
        return Rows.chosen_on_device(widths, step.plan.num_rows, limits.block_size)

    def settle(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """Calibrate on the device, and send the host what it will hear; see `WidthPolicy`.

        Args:
            rows: the M verified rows.
            num_accepted: [n] int.
        """
        step = self._unheard[-1]
        if self._judged is not None:
            self._lessons.add(*self._judged, rows, num_accepted)
        step.accepted = self._host.copy(num_accepted)
        if self._count is not None:
            step.widths = self._host.copy(rows.widths)
        step.arrived = self._host.clock.mark()

    def _hear(self) -> None:
        """Learn from the steps that have ended, in their order."""
        while self._unheard and self._host.clock.passed(_last_moment(self._unheard[0])):
            self._learn(self._unheard.popleft())

    def _learn(self, step: _Step) -> None:
        facts, cost, clock = step.facts, self.controller.cost, self._host.clock
        n, context = facts.num_requests, facts.context_tokens
        draft_seconds = clock.seconds(*step.drafted) if step.drafted else 0.0
        if step.chances is not None:
            num_rows = step.chances.numel() + n
            cost.observe("draft", n, num_rows, context, draft_seconds)
            self.controller.hear(step.plan, step.chances.double().numpy(), step.accepted.numpy())
        if self._count is not None:
            expected = step.plan.expected_tokens
            self._count(step.widths, step.accepted, step.chances, expected)
        if step.ended is not None:
            seconds = clock.seconds(step.started, step.ended) - draft_seconds
            cost.observe("target", n, step.plan.num_rows, context, seconds)


def most_likely_rows(chances: torch.Tensor, num_rows: int, limits: Limits) -> torch.Tensor:
    """Return the widths [n] int64 of so many rows that commit the most expected tokens.

    `planner.most_likely_widths` on a device, without waiting for it.

    Args:
        chances: [n, B-1] float, calibrated, each given that all before are accepted.
        num_rows: of all requests together, within the limits.
        limits: bounds on the widths.
    """
    n = len(chances)
    optional = survival(chances)[:, limits.min_width - 1 : limits.widest - 1]
    # Column-major and stable: among equals the shallower row first, so that prefixes stay whole.
    order = optional.T.flatten().argsort(descending=True, stable=True)
    chosen = order[: num_rows - n * limits.min_width] % n
    widths = torch.full((n,), limits.min_width, dtype=torch.int64, device=chances.device)
    return widths.scatter_add_(0, chosen, torch.ones_like(chosen))


def _last_moment(step: _Step) -> Any:
    return step.arrived if step.ended is None else step.ended
