# SPDX-License-Identifier: Apache-2.0
"""The budget's state between steps: what the worker asks before and within each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.budget.cost import CostModel, StepKind
from sglang_dflash.budget.gains import GainCurve
from sglang_dflash.budget.pacing import DraftSwitch, LookPurse, Pacing
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


class _Look(NamedTuple):
    """What was risked on looking, beyond the price that was paid before.

    Attributes:
        usual_widths: [n], had the step not looked.
        seconds_per_token: what a token is worth.
        extra_seconds: of the step as it was planned, beyond a usual step and the price.
    """

    usual_widths: NDArray[np.int64]
    seconds_per_token: float
    extra_seconds: float


class BudgetController:
    """Decides step by step, from measured times and calibrated chances.

    A step is `start` -> (draft ->) `plan`, or `num_rows` where the host must not see this step's
    proposals -> verify -> `settle`, and `cost.observe` with the step's kind and time. `learn` takes
    chances when they have reached the host, a step or two late on a GPU; `plan` does so itself.

    Exploration. What is not verified is not observed: a chance believed too low would stay so.
    While decoding plainly, a look drafts and verifies at least two rows a request; while drafting,
    it doubles the widths. `LookPurse` says when: looks that gain nothing take at most
    `Pacing.exploration` of the time (1 %), those that pay for themselves follow one another. After
    a turn the pauses grow by doubling, a handful of looks more: a turn made in error is soon
    undone.

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
        self._purse = LookPurse(self._pacing)
        self._look: _Look | None = None
        self._since_look = 0
        self._looks = 0  # since the draft was last turned on or off
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
        before = self._switch.drafting
        drafting = self._plain_is_barred or self._switch.turn(self._advantage(n))
        if drafting != before:
            self._looks = 0
        explores = self._looks_now(n, drafting)
        drafts = drafting or explores
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
        looked = Plan(widths, tokens, float(seconds(np.array([widths.sum()]))[0]))
        self._look = self._look_of(plan, looked)
        return looked

    def num_rows(self) -> int:
        """Return M for the step that `start` decided to draft, without seeing its proposals."""
        rows, best = self._outlook.rows, self._outlook.best
        return int(rows[self._wider(best)] if self._step.explores else rows[best])

    def learn(self, chances: Array) -> None:
        """Take in [n, B-1] calibrated chances of a step, when they are on the host."""
        self.gains.update(chances)

    def settle(self, num_accepted: NDArray[np.int64]) -> None:
        """Take in what verify made of the step that `plan` chose the widths of.

        Args:
            num_accepted: [n], accepted proposals.
        """
        if self._look is None:
            return
        look, self._look = self._look, None
        gained = int(np.maximum(num_accepted - (look.usual_widths - 1), 0).sum())
        saved = gained * look.seconds_per_token - look.extra_seconds
        self._purse.earn(saved, self._look_price(len(num_accepted), self._switch.drafting))

    @property
    def explores(self) -> bool:
        """Whether the latest step looks wider than pays by present belief."""
        return self._step.explores

    @property
    def _plain_is_barred(self) -> bool:
        return self.limits.min_width > 1

    def _look_ahead(self, n: int) -> _Outlook:
        rows = np.arange(n * self.limits.min_width, n * self.limits.widest + 1)
        return _Outlook(rows, self.gains.tokens(n, rows), self._draft_seconds(n)(rows))

    def _advantage(self, n: int) -> float:
        ahead = self._outlook
        return worth_drafting(ahead.tokens, ahead.seconds, self._plain_seconds(n), n)

    def _looks_now(self, n: int, drafting: bool) -> bool:
        """Return whether this step looks, and pay for it."""
        if self.limits.min_width == self.limits.widest:  # nothing to choose
            return False
        self._since_look += 1
        price = self._look_price(n, drafting)
        self._purse.save(self._usual_seconds(n, drafting))
        pause = min(self._pacing.shortest_pause << min(self._looks, 16), self._pacing.longest_pause)
        least = self._pacing.shortest_pause if drafting else 1
        affords = self._since_look >= least and self._purse.affords(price)
        if self._since_look < pause and not affords:
            return False
        self._purse.spend(price)
        self._since_look = 0
        self._looks += 1
        return True

    def _look_of(self, usual: Plan, looked: Plan) -> _Look:
        """Return what a look must be held against: the plan, or in plain decoding one row each."""
        n, drafting = len(usual.widths), self._switch.drafting
        if drafting:
            pace, widths, seconds = (
                1 / self._outlook.best_rate,
                usual.widths,
                usual.expected_seconds,
            )
        else:
            seconds = self._plain_seconds(n)
            pace, widths = seconds / n, np.ones_like(usual.widths)
        extra = looked.expected_seconds - seconds - self._look_price(n, drafting)
        return _Look(widths, pace, extra)

    def _look_price(self, n: int, drafting: bool) -> float:
        """Return the seconds that a look takes beyond a usual step, at least 0."""
        ahead = self._outlook
        look = ahead.seconds[self._wider(ahead.best if drafting else 0)]
        return max(float(look) - self._usual_seconds(n, drafting), 0.0)

    def _usual_seconds(self, n: int, drafting: bool) -> float:
        ahead = self._outlook
        return float(ahead.seconds[ahead.best]) if drafting else self._plain_seconds(n)

    def _wider(self, index: int) -> int:
        """Return the outlook's index of twice the rows, within the limits."""
        rows = self._outlook.rows
        return min(2 * int(rows[index]), int(rows[-1])) - int(rows[0])

    def _draft_seconds(self, n: int) -> StepSeconds:
        return lambda rows: self.cost.curve("draft", n, rows, self._context_tokens)

    def _plain_seconds(self, n: int) -> float:
        return self.cost.seconds("plain", n, n, self._context_tokens)
