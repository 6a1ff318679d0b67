# SPDX-License-Identifier: Apache-2.0
"""The budget's state between steps: what the worker asks before and within each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.budget.cost import CostModel, StepKind
from sglang_dflash.budget.gains import GainCurve
from sglang_dflash.budget.pacing import DraftSwitch, Pacing, steps_between
from sglang_dflash.budget.planner import (
    Limits,
    Plan,
    StepSeconds,
    plan_widths,
    widen,
    worth_drafting,
)

__all__ = ["BudgetController", "Step"]

Array = NDArray[np.float64]


class Step(NamedTuple):
    """What is decided before the draft runs.

    Attributes:
        kind: `plain` skips the draft: one row a request.
        explores: this step looks wider than pays by present belief.
    """

    kind: StepKind
    explores: bool


class _Outlook(NamedTuple):
    """What the next step may do, by number of rows; all [k]."""

    rows: NDArray[np.int64]
    tokens: Array
    seconds: Array

    @property
    def best(self) -> int:
        """Index of the fastest number of rows."""
        return int((self.tokens / self.seconds).argmax())

    @property
    def best_rate(self) -> float:
        """Expected tokens per second there."""
        return float(self.tokens[self.best] / self.seconds[self.best])


class BudgetController:
    """Decides step by step, from measured times and calibrated chances.

    A step is `start` -> (draft ->) `plan`, or `num_rows` where the host must not see this step's
    proposals -> verify -> `cost.observe` with the step's kind and time. `learn` takes chances when
    they have reached the host, a step or two late on a GPU; `plan` does so itself.

    Exploration. What is not verified is not observed: a chance believed too low would stay so.
    While decoding plainly, one step in k drafts and verifies at least two rows a request; while
    drafting, one step in k doubles the widths. k follows from measured costs so that either takes
    at most `Pacing.exploration` of the time (1 %), even if it never gains a token. After a turn the
    pauses grow to k by doubling, a handful of looks more: a turn made in error is soon undone.
    While looks from plain decoding pay by their own proposals, the draft stays on.

    Args:
        cost: measured step times; must know both kinds of step before `start`.
        limits: bounds on the widths; `min_width` above 1 always drafts.
        pacing: hysteresis and exploration.
    """

    def __init__(self, cost: CostModel, limits: Limits, pacing: Pacing | None = None) -> None:
        self.cost, self.limits = cost, limits
        self.gains = GainCurve(limits.block_size)
        self._pacing = pacing or Pacing()
        self._switch = DraftSwitch(self._pacing)
        self._since_look = 0
        self._looks = 0  # since the draft was last turned on or off
        self._last_look_paid = False
        self._context_tokens: float | None = None
        self._step = Step("draft", explores=False)
        self._outlook = _Outlook(np.ones(1, dtype=np.int64), np.ones(1), np.ones(1))

    def start(self, n: int, context_tokens: float | None = None) -> Step:
        """Decide whether the next step, over n requests, runs the draft.

        Args:
            n: requests, at least 1.
            context_tokens: of all requests together; None where it is not known.
        """
        self._context_tokens = context_tokens
        self._outlook = self._look_ahead(n)
        self._since_look += 1
        before = self._switch.drafting
        drafting = self._plain_is_barred or self._switch.turn(self._advantage(n))
        if drafting != before:
            self._looks = 0
        explores = self._since_look >= self._pause(n, drafting)
        if explores:
            self._since_look = 0
            self._looks += 1
        drafts = drafting or explores or self._last_look_paid
        self._step = Step("draft" if drafts else "plain", explores)
        return self._step

    def plan(self, chances: Array) -> Plan:
        """Return the widths of the step that `start` decided to draft, from its own proposals.

        Args:
            chances: [n, B-1], calibrated.
        """
        rate = self._outlook.best_rate
        self.learn(chances)
        seconds = self._draft_seconds(len(chances))
        plan = plan_widths(chances, seconds, self.limits, rate)
        if not self._step.explores:
            return plan
        if self._switch.drafting:
            widths = widen(plan.widths, self.limits)
        else:  # what pays once the draft has run, and something to see of each request
            widths = np.maximum(plan.widths, min(2, self.limits.widest))
        reached = np.arange(2, self.limits.block_size + 1) <= widths[:, None]
        tokens = len(chances) + float((np.cumprod(chances, axis=1) * reached).sum())
        return Plan(widths, tokens, float(seconds(np.array([widths.sum()]))[0]))

    def num_rows(self) -> int:
        """Return M for the step that `start` decided to draft, without seeing its proposals."""
        rows, best = self._outlook.rows, self._outlook.best
        return int(rows[self._wider(best)] if self._step.explores else rows[best])

    def learn(self, chances: Array) -> None:
        """Take in [n, B-1] calibrated chances of a step, when they are on the host."""
        self.gains.update(chances)
        if self._plain_is_barred or self._switch.drafting:
            self._last_look_paid = False
            return
        n = len(chances)
        plan = plan_widths(chances, self._draft_seconds(n), self.limits)
        rate = plan.tokens_per_second * self._plain_seconds(n) / n
        self._last_look_paid = rate > 1 + self._pacing.margin

    @property
    def _plain_is_barred(self) -> bool:
        return self.limits.min_width > 1

    def _look_ahead(self, n: int) -> _Outlook:
        rows = np.arange(n * self.limits.min_width, n * self.limits.widest + 1)
        return _Outlook(rows, self.gains.tokens(n, rows), self._draft_seconds(n)(rows))

    def _advantage(self, n: int) -> float:
        ahead = self._outlook
        return worth_drafting(ahead.tokens, ahead.seconds, self._plain_seconds(n), n)

    def _pause(self, n: int, drafting: bool) -> int:
        """Return how many steps lie between two looks."""
        ahead = self._outlook
        if self.limits.min_width == self.limits.widest:  # nothing to choose
            return self._since_look + 1
        if drafting:
            usual, look = ahead.seconds[ahead.best], ahead.seconds[self._wider(ahead.best)]
        else:
            usual, look = self._plain_seconds(n), ahead.seconds[self._wider(0)]
        paced = steps_between(float(look - usual), float(usual), self._pacing)
        return min(paced, self._pacing.shortest_pause << min(self._looks, 16))

    def _wider(self, index: int) -> int:
        """Return the outlook's index of twice the rows, within the limits."""
        rows = self._outlook.rows
        return min(2 * int(rows[index]), int(rows[-1])) - int(rows[0])

    def _draft_seconds(self, n: int) -> StepSeconds:
        return lambda rows: self.cost.curve("draft", n, rows, self._context_tokens)

    def _plain_seconds(self, n: int) -> float:
        return self.cost.seconds("plain", n, n, self._context_tokens)
