# SPDX-License-Identifier: Apache-2.0
"""The budget's state between steps: what the worker asks before and within each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.budget.cost import CostModel
from sglang_dflash.budget.gains import GainCurve
from sglang_dflash.budget.pacing import DraftSwitch, LookPurse, Pacing
from sglang_dflash.budget.planner import (
    Limits,
    Plan,
    StepSeconds,
    expected_tokens,
    plan_widths,
    widen,
)
from sglang_dflash.budget.surface import half_octaves

__all__ = ["LEARN_FROM", "BudgetController", "Look", "Step", "draft_widths"]

Array = NDArray[np.float64]

LEARN_FROM = 8  # request-steps learnt from together: an update takes as long for one as for many
# Steps for which prices are kept, for to work them out takes some per cent of a short step; a plain
# step teaches nothing but its own price.
_FRESH, _FRESH_WHILE_PLAIN = 4, 16
_PLAIN_PAUSE = 32  # steps between two that time plain decoding while drafting, at least
# How far plain decoding may be behind and still be timed as often as may be: beyond, its price
# would have to be that much too high to matter, and is looked at in proportion more rarely.
_NEAR_PLAIN = 0.25
# Steps that verify whole blocks unjudged between two that are judged, where judging pays nothing:
# the proposals' probabilities and the plan take some per cent of a short step.
_UNJUDGED = 3


class Step(NamedTuple):
    """What is decided before the draft runs.

    Attributes:
        draft_width: rows of each block that the draft runs over, anchor included; 1 skips it, and
            the step is plain decoding.
        explores: this step looks wider than pays by present belief, or times plain decoding.
        judges: the widths follow from this step's own proposals; if not, all rows are verified that
            the draft runs over.
    """

    draft_width: int
    explores: bool
    judges: bool = True

    @property
    def drafts(self) -> bool:
        """Whether the draft runs."""
        return self.draft_width > 1


class _Outlook(NamedTuple):
    """What the next step may do at one draft width, by number of verified rows.

    Attributes:
        rows: [k].
        tokens: [k], expected.
        seconds: [k].
        best: index of the number of rows to take.
        best_rate: expected tokens per second there.
    """

    rows: NDArray[np.int64]
    tokens: Array
    seconds: Array
    best: int
    best_rate: float

    @classmethod
    def of(
        cls,
        rows: NDArray[np.int64],
        tokens: Array,
        seconds: Array,
        allowed: NDArray[np.bool_] | None = None,
    ) -> _Outlook:
        """Return the outlook with its best number of rows, of those `allowed` [k]."""
        rates = tokens / seconds if allowed is None else np.where(allowed, tokens / seconds, 0.0)
        best = int(rates.argmax())
        return cls(rows, tokens, seconds, best, float(rates[best]))

    @property
    def whole(self) -> _Outlook:
        """The same with every row that the draft proposes."""
        last = len(self.rows) - 1
        return self._replace(best=last, best_rate=float(self.tokens[last] / self.seconds[last]))

    def wider(self, index: int) -> int:
        """Return the index of twice the rows, as far as they go."""
        return min(2 * int(self.rows[index]), int(self.rows[-1])) - int(self.rows[0])


class _Prices(NamedTuple):
    """What the next steps cost and promise, for n requests.

    Attributes:
        n: requests.
        plain: seconds of a plain step.
        rows: [k] verified rows in all, rising by one.
        target: [k] seconds of a step's target part over so many.
        draft: seconds of the draft, by its width.
        outlooks: by draft width.
        best_width: whose outlook is the best.
        best_rate: expected tokens per second of the fastest steps with the draft, even where whole
            blocks, as good as far as times can tell, are taken instead.
        kept: how much the outlooks expect to be kept of what chances promise.
        margin: by which fewer rows must be ahead of all where these lead, as a share; 0 elsewhere.
    """

    n: int
    plain: float
    rows: NDArray[np.int64]
    target: Array
    draft: dict[int, float]
    outlooks: dict[int, _Outlook]
    best_width: int
    best_rate: float
    kept: float
    margin: float

    @property
    def best(self) -> _Outlook:
        """The outlook of the best draft width."""
        return self.outlooks[self.best_width]

    def drafted(self, width: int) -> StepSeconds:
        """Return the seconds of steps with the draft, by number of verified rows."""
        return lambda rows: self.target[np.asarray(rows) - self.rows[0]] + self.draft[width]


def draft_widths(limits: Limits) -> tuple[int, ...]:
    """Return the draft widths to choose from where any may be run: 2, 3, 4, 6, 8, ..."""
    nodes = half_octaves(limits.widest).astype(int).tolist()
    return tuple(width for width in nodes if width >= max(2, limits.min_width))


class Look(NamedTuple):
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

    A step is `start` -> (draft -> `plan` or `take_all`) -> verify -> `settle`, and `cost.observe`
    with the time of each part.

    The draft width is chosen before the draft runs and bounds what can be verified: proposals that
    nobody will verify are not worth their rows and their logits.

    Exploration. What is not verified is not observed: a chance believed too low would stay so.
    While decoding plainly, a look drafts and verifies at least two rows a request; while drafting,
    it doubles both widths. `LookPurse` says when: looks that gain nothing take at most
    `Pacing.exploration` of the time (1 %), those that pay for themselves follow one another. After
    a turn the pauses grow by doubling, a handful of looks more: a turn made in error is soon
    undone. That a load returns which goes another way, as it did before, is no turn. What is not
    decoded plainly is not timed plainly: while drafting, plain steps come in between, for as much
    of the time where the two are near and for less where they are not, so that a price believed too
    high heals too.

    Args:
        cost: measured times; must know both parts of a step before `start`.
        limits: bounds on the widths; `min_width` above 1 always drafts.
        pacing: hysteresis and exploration.
        draft_widths: to choose from; None is the widest alone.
    """

    def __init__(
        self,
        cost: CostModel,
        limits: Limits,
        pacing: Pacing | None = None,
        draft_widths: Sequence[int] | None = None,
    ) -> None:
        self.cost, self.limits = cost, limits
        self.draft_widths = tuple(draft_widths or (limits.widest,))
        self.gains = GainCurve(limits.block_size, self.draft_widths)
        self._pacing = pacing or Pacing()
        self._switch = DraftSwitch(self._pacing)
        self._purse = LookPurse(self._pacing)
        self._plain_purse = LookPurse(self._pacing)
        self._since_plain, self._plain_checks = 0, 0
        self._look: Look | None = None
        self._since_look = 0
        self._looks = 0  # since the draft was last turned on or off
        self._ways: dict[int, bool] = {}  # whether so many requests drafted last, by octave
        self._context_tokens: float | None = None
        self._step = Step(limits.widest, explores=False)
        self._unjudged = 0  # whole blocks since a step was judged
        self._chances: list[Array] = []  # not yet learnt from
        self._promised = 0.0  # accepted proposals of the latest plan, by its chances
        self._prices: _Prices | None = None
        self._age = 0  # steps since they were worked out

    def start(self, n: int, context_tokens: float | None = None) -> Step:
        """Decide over how many rows of each block the draft runs in the next step, if at all.

        Args:
            n: requests, at least 1.
            context_tokens: of all requests together; None where it is not known.
        """
        self._context_tokens = context_tokens
        if self.limits.widest == 1:
            return self._step
        before = self._switch.drafting
        self._age += 1
        fresh = _FRESH if before or self._step.drafts else _FRESH_WHILE_PLAIN
        if self._prices is None or self._prices.n != n or self._age >= fresh:
            self._prices, self._age = self._look_ahead(n), 0
        drafting = self._plain_is_barred or self._switch.turn(self._advantage())
        if self._note_way(n, drafting, before):
            self._looks = self._plain_checks = 0
        self._since_plain += 1
        if drafting and self._checks_plain_now():
            self._step = Step(1, explores=True)
            return self._step
        explores = self._looks_now(drafting)
        width = 1
        if drafting or explores:
            width = self._wider_draft if drafting and explores else self._prices.best_width
        if width == 1:
            self._since_plain = 0
        self._step = Step(width, explores, self._judges_now(width, explores=explores))
        return self._step

    def take_all(self) -> float:
        """Return the tokens expected of the step that `start` decided not to judge."""
        tokens = float(self._prices.outlooks[self._step.draft_width].tokens[-1])
        self._promised = (tokens - self._prices.n) / self._prices.kept
        return tokens

    def plan(self, chances: Array) -> Plan:
        """Return the widths of the step that `start` decided to draft, from its own proposals.

        Args:
            chances: [n, w-1], calibrated, w the step's draft width.
        """
        # Tokens are worth what is kept of them, or as much less as the rate is held to be higher.
        rate = self._prices.best.best_rate / self.gains.kept
        self._learn(chances)
        limits, seconds = self._limits_of(chances), self._prices.drafted(chances.shape[1] + 1)
        plan = plan_widths(chances, seconds, limits, rate, self._prices.margin)
        self._promised = plan.expected_tokens - len(chances)
        if not self._step.explores:
            return plan
        # From plain: what pays once the draft has run, and something to see of each request.
        drafting = self._switch.drafting
        widths = widen(plan.widths, limits) if drafting else np.maximum(plan.widths, 2)
        tokens = expected_tokens(chances, widths)
        self._promised = tokens - len(chances)
        looked = Plan(widths, tokens, float(seconds(np.array([widths.sum()]))[0]))
        self._look = self._look_of(plan, looked)
        return looked

    def _learn(self, chances: Array) -> None:
        """Take in a step's calibrated chances [n, w-1], to learn from when there are enough."""
        if self._chances and self._chances[0].shape[1] != chances.shape[1]:
            self._learn_now()
        self._chances.append(chances)
        if sum(map(len, self._chances)) >= LEARN_FROM:
            self._learn_now()

    def _learn_now(self) -> None:
        self.gains.update(np.concatenate(self._chances))
        self._chances.clear()

    def settle(self, num_accepted: NDArray[np.int64]) -> None:
        """Take in what verify made of a step with the draft, planned or whole.

        Args:
            num_accepted: [n], accepted proposals.
        """
        self.gains.settle(len(num_accepted), self._promised, int(num_accepted.sum()))
        if self._look is not None:
            look, self._look = self._look, None
            self._earn(look, num_accepted)

    def _earn(self, look: Look, num_accepted: NDArray[np.int64]) -> None:
        """Take in what a look found, by the accepted proposals [n] of its step."""
        gained = int(np.maximum(num_accepted - (look.usual_widths - 1), 0).sum())
        saved = gained * look.seconds_per_token - look.extra_seconds
        self._purse.earn(saved, self._look_price(self._switch.drafting))

    @property
    def step(self) -> Step:
        """What `start` decided for the latest step."""
        return self._step

    @property
    def _plain_is_barred(self) -> bool:
        return self.limits.min_width > 1

    @property
    def _wider_draft(self) -> int:
        """The draft width of a look while drafting: the largest within twice the usual one."""
        return max(width for width in self.draft_widths if width <= 2 * self._prices.best_width)

    def _limits_of(self, chances: Array) -> Limits:
        """Return the bounds of a step that has the proposals [n, w-1]."""
        return Limits(chances.shape[1] + 1, self.limits.min_width)

    def _look_ahead(self, n: int) -> _Prices:
        rows = np.arange(n * self.limits.min_width, n * self.limits.widest + 1)
        target = self.cost.curve("target", n, rows, self._context_tokens)
        plain = float(target[0])
        if self._plain_is_barred:
            plain = self.cost.seconds("target", n, n, self._context_tokens)
        each = self.cost.curve("draft", n, n * np.array(self.draft_widths), self._context_tokens)
        draft = dict(zip(self.draft_widths, each.tolist(), strict=True))
        outlooks = {}
        for width, seconds in draft.items():
            count = n * (width - self.limits.min_width) + 1
            tokens = self.gains.tokens(n, rows[:count], width)
            allowed = self._numbers_of_rows(n, rows[:count])
            outlooks[width] = _Outlook.of(rows[:count], tokens, target[:count] + seconds, allowed)
        best_width = max(outlooks, key=lambda width: outlooks[width].best_rate)
        best_rate, widest = outlooks[best_width].best_rate, max(outlooks)
        # Of many numbers of rows with noisy times one always looks better than all of them; but
        # what all of them would lose to plain decoding is no matter of chance.
        whole = outlooks[widest].whole
        margin = max(self._pacing.narrow_margin, self.cost.doubt)
        pays = self._plain_is_barred or self._switch.keeps(whole.best_rate * plain / n)
        if pays and whole.best_rate > (1 - margin) * best_rate:
            best_width, outlooks[widest] = widest, whole
        else:
            margin = 0.0
        kept = self.gains.kept
        return _Prices(n, plain, rows, target, draft, outlooks, best_width, best_rate, kept, margin)

    def _numbers_of_rows(self, n: int, rows: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return which numbers of rows [k] of n requests a step may have; None where all."""
        return None

    def _advantage(self) -> float:
        """Return the expected rate with the draft over that of plain decoding.

        Asked before the draft runs, so its pass counts. Above 1, drafting pays.
        """
        return self._prices.best_rate * self._prices.plain / self._prices.n

    def _judges_now(self, width: int, *, explores: bool) -> bool:
        """Return whether a step of this draft width is to be planned by its own proposals."""
        ahead = self._prices.best
        is_whole = width == self.limits.widest and ahead.best == len(ahead.rows) - 1
        judges = explores or not is_whole or self._unjudged == _UNJUDGED
        self._unjudged = 0 if judges else self._unjudged + 1
        return judges

    def _note_way(self, n: int, drafting: bool, before: bool) -> bool:
        """Return whether n requests go another way than the step before, and than so many did last.

        Looks after a turn are beyond the share that is allowed: a load that returns has had them.
        """
        octave = n.bit_length()
        last = self._ways.get(octave)
        self._ways[octave] = drafting
        return drafting not in (before, last)

    def _looks_now(self, drafting: bool) -> bool:
        """Return whether this step looks, and pay for it."""
        if self.limits.min_width == self.limits.widest:  # nothing to choose
            return False
        self._since_look += 1
        price = self._look_price(drafting)
        self._purse.save(self._usual_seconds(drafting))
        pause = min(self._pacing.shortest_pause << min(self._looks, 16), self._pacing.longest_pause)
        least = self._pacing.shortest_pause if drafting else 1
        affords = self._since_look >= least and self._purse.affords(price)
        if self._since_look < pause and not affords:
            return False
        self._purse.spend(price)
        self._since_look = 0
        self._looks += 1
        return True

    def _checks_plain_now(self) -> bool:
        """Return whether this step measures plain decoding, whose price drafting rests on."""
        if self._plain_is_barred:
            return False
        doubt = _NEAR_PLAIN / max(self._advantage() - 1, _NEAR_PLAIN)
        self._plain_purse.save(doubt * self._usual_seconds(drafting=True))
        price = max(self._prices.plain - self._prices.n / self._prices.best.best_rate, 0.0)
        pause = min(self._pacing.shortest_pause << min(self._plain_checks, 16), _PLAIN_PAUSE)
        if self._since_plain < pause or not self._plain_purse.affords(price):
            return False
        self._plain_purse.spend(price)
        self._since_plain = 0
        self._plain_checks += 1
        return True

    def _look_price(self, drafting: bool) -> float:
        """Return the seconds that a look takes beyond a usual step, at least 0."""
        ahead = self._prices.best
        if drafting:
            wide = self._prices.outlooks[self._wider_draft]
            look = wide.seconds[wide.wider(ahead.best)]
        else:
            look = ahead.seconds[ahead.wider(0)]
        return max(float(look) - self._usual_seconds(drafting), 0.0)

    def _usual_seconds(self, drafting: bool) -> float:
        ahead = self._prices.best
        return float(ahead.seconds[ahead.best]) if drafting else self._prices.plain

    def _look_of(self, plan: Plan, looked: Plan) -> Look:
        """Return what a look must be held against: a usual step's share of its own plan."""
        n, drafting = len(plan.widths), self._switch.drafting
        if drafting:
            width, pace = self._prices.best_width, 1 / self._prices.best.best_rate
            usual = np.minimum(plan.widths, width)
            seconds = float(self._prices.drafted(width)(np.array([usual.sum()]))[0])
        else:
            usual, seconds = np.ones_like(plan.widths), self._prices.plain
            pace = seconds / n
        extra = looked.expected_seconds - seconds - self._look_price(drafting)
        return Look(usual, pace, extra)
