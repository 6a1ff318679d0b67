# SPDX-License-Identifier: Apache-2.0
"""Calibration, cost and plan together, on an engine whose laws are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch

from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.controller import BudgetController, draft_widths
from sglang_dflash.budget.cost import CostModel, sweep_points
from sglang_dflash.budget.gains import GainCurve
from sglang_dflash.budget.pacing import LookPurse, Pacing
from sglang_dflash.budget.planner import Limits

BLOCK = 8
MAX_REQUESTS = 32
GOOD = tuple(0.6 - 0.15 * i for i in range(BLOCK - 1))  # intercepts by position
CODE = tuple(-0.35 - 0.3 * i for i in range(BLOCK - 1))
USELESS = (-6.0,) * (BLOCK - 1)
TRUE_SLOPE = 0.8


@dataclass
class Engine:
    """Seconds and acceptance by stated laws; timings are noisy and sometimes delayed.

    The cost is a CPU's: rows are dear, so a full block loses at load.
    """

    intercepts: tuple[float, ...] = GOOD
    per_row: float = 0.5e-3
    per_draft_row: float = 0.02e-3
    per_context_token: float = 0.0
    delays: float = 0.03
    noise: float = 0.03
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def proposals(self, n: int) -> np.ndarray:
        """Draw the draft's probabilities [n, B-1]."""
        return 1 / (1 + np.exp(-self.rng.normal(1.0, 1.5, (n, BLOCK - 1))))

    def chances(self, probs: np.ndarray) -> np.ndarray:
        """Return the true chances [n, B-1]."""
        log_odds = TRUE_SLOPE * np.log(probs / (1 - probs)) + np.array(self.intercepts)
        return 1 / (1 + np.exp(-log_odds))

    def accepted(self, chances: np.ndarray) -> np.ndarray:
        """Draw how many proposals of each request the target confirms, [n]."""
        return (self.rng.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)

    def seconds(self, part: str, n: int, rows: float, context: float = 0.0) -> float:
        """Return the true time of a part of a step, with so many tokens of context in all."""
        if part == "draft":
            return 3e-3 + self.per_draft_row * rows + 0.1 * self.per_context_token * context
        return 10e-3 + 0.3e-3 * n + self.per_row * rows + self.per_context_token * context

    def timed(self, part: str, n: int, rows: int, context: float = 0.0) -> float:
        """Return a measured time."""
        delay = 5.0 if self.rng.random() < self.delays else 1.0
        noise = float(np.exp(self.rng.normal(0, self.noise)))
        return self.seconds(part, n, rows, context) * noise * delay

    def plain_rate(self, n: int, context: float = 0.0) -> float:
        """Return tokens per second without speculation."""
        return n / self.seconds("target", n, n, context)

    def fixed_rate(self, n: int, width: int) -> float:
        """Return tokens per second at one width for all, over many steps."""
        survival = self.chances(self.proposals(20000)).cumprod(axis=1).mean(axis=0)
        return n * (1 + survival[: width - 1].sum()) / self.drafted(n, n * width, BLOCK)

    def drafted(self, n: int, rows: float, draft_width: int, context: float = 0.0) -> float:
        """Return the true time of a step with the draft."""
        draft = self.seconds("draft", n, n * draft_width, context)
        return draft + self.seconds("target", n, rows, context)


class Record(NamedTuple):
    """One simulated step; tokens and seconds are the laws' own, free of noise."""

    draft_width: int
    num_rows: int
    tokens: float
    seconds: float
    survival: np.ndarray  # [B-1], true, the mean over the requests


class Server:
    """An engine with a verify budget; `narrow` lets it choose the draft's width too."""

    def __init__(self, engine: Engine, *, narrow: bool = False) -> None:
        self.engine = engine
        self.calibrator = Calibrator(BLOCK)
        cost = CostModel(MAX_REQUESTS, BLOCK)
        for point in sweep_points(MAX_REQUESTS, BLOCK):
            context = 64.0 * point.num_requests
            times = [engine.timed(*point, context) for _ in range(5)]
            cost.observe(*point, context, float(np.median(times)))
        widths = draft_widths(Limits(BLOCK)) if narrow else None
        self.budget = BudgetController(cost, Limits(BLOCK), draft_widths=widths)

    def step(self, n: int, context: float | None = None) -> Record:
        """Decode once with n requests; their context is the sweep's unless it is given."""
        engine, context = self.engine, 64.0 * n if context is None else context
        step = self.budget.start(n, context)
        widths, tokens = np.ones(n, dtype=np.int64), float(n)
        probs = engine.proposals(n)
        true = engine.chances(probs)
        seconds = 0.0
        if step.drafts:
            width = step.draft_width
            part = ("draft", n, n * width, context)
            seconds = engine.seconds(*part)
            self.budget.cost.observe(*part, engine.timed(*part))
            mine = torch.tensor(probs[:, : width - 1]), torch.zeros(n, dtype=torch.bool)
            if step.judges:
                chances = self.calibrator.chances(*mine).double().numpy()
                widths = self.budget.plan(chances).widths
            else:
                self.budget.take_all()
                widths = np.full(n, width)
            num_accepted = np.minimum(engine.accepted(true), widths - 1)
            verified = np.arange(2, BLOCK + 1) <= widths[:, None]
            tokens += float((true.cumprod(axis=1) * verified).sum())
            if step.judges:
                self.calibrator.update(*mine, torch.tensor(widths), torch.tensor(num_accepted))
            self.budget.settle(num_accepted)
        rows = int(widths.sum())
        self.budget.cost.observe(
            "target", n, rows, context, engine.timed("target", n, rows, context)
        )
        seconds += engine.seconds("target", n, rows, context)
        return Record(step.draft_width, rows, tokens, seconds, true.cumprod(axis=1).mean(axis=0))

    def run(self, n: int, steps: int) -> list[Record]:
        """Decode `steps` times with n requests."""
        return [self.step(n) for _ in range(steps)]


def rate(records: list[Record]) -> float:
    return sum(r.tokens for r in records) / sum(r.seconds for r in records)


def best_fixed_rate(engine: Engine, n: int, records: list[Record], context: float = 0.0) -> float:
    """Return what the best one width for all, the draft always on, makes of the same proposals."""
    survival = np.mean([r.survival for r in records], axis=0)
    return max(
        n * (1 + survival[: width - 1].sum()) / engine.drafted(n, n * width, BLOCK, context)
        for width in range(2, BLOCK + 1)
    )


def share_drafted(records: list[Record]) -> float:
    return sum(r.draft_width > 1 for r in records) / len(records)


@pytest.mark.parametrize("n", [1, 8, 32])
def test_a_useless_draft_costs_little(n: int) -> None:
    server = Server(Engine(USELESS))
    server.run(n, 200)
    records = server.run(n, 400)
    assert rate(records) >= 0.95 * server.engine.plain_rate(n)
    assert share_drafted(records) > 0  # it still looks


@pytest.mark.parametrize("n", [1, 8, 32])
def test_a_fixed_block_with_the_same_draft_loses(n: int) -> None:
    """The simulation is one in which there is something to win."""
    assert Engine(USELESS).fixed_rate(n, BLOCK) < 0.8 * Engine(USELESS).plain_rate(n)
    good = Engine()
    best = max(good.fixed_rate(n, width) for width in range(2, BLOCK + 1))
    assert best > 1.05 * good.plain_rate(n)
    if n == 32:
        assert good.fixed_rate(n, BLOCK) < good.plain_rate(n)


@pytest.mark.parametrize("n", [1, 8, 32])
def test_a_good_draft_serves_as_fast_as_the_best_fixed_width(n: int) -> None:
    server = Server(Engine())
    server.run(n, 200)
    records = server.run(n, 400)
    assert rate(records) >= 0.97 * best_fixed_rate(server.engine, n, records)


def share_whole(pacing: Pacing) -> float:
    """Return how often whole blocks are verified where a further row costs next to nothing."""
    server = Server(Engine(CODE, per_row=0.05e-3), narrow=True)
    server.budget = BudgetController(
        server.budget.cost, Limits(BLOCK), pacing, draft_widths(Limits(BLOCK))
    )
    server.run(1, 200)
    return float(np.mean([r.num_rows == BLOCK for r in server.run(1, 400)]))


def test_noise_is_not_taken_for_a_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that cost nothing and bring little, timed with a third of a step as noise."""

    def share() -> float:
        records = []
        for seed in (3, 4):
            rng = np.random.default_rng(seed)
            server = Server(Engine(CODE, per_row=0.0, noise=0.3, rng=rng))
            server.run(1, 300)
            records += server.run(1, 700)
        return float(np.mean([r.num_rows == BLOCK for r in records]))

    assert share() > 0.9
    monkeypatch.setattr(CostModel, "doubt", 0.0)
    assert share() < 0.8, "the margin alone"


def test_whole_blocks_are_kept_where_narrower_ones_save_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant: by measured times alone, noise decides."""
    assert share_whole(Pacing()) >= 0.85
    monkeypatch.setattr(CostModel, "doubt", 0.0)
    assert share_whole(Pacing(narrow_margin=0.0)) < 0.7


@pytest.mark.parametrize(("n", "per_row"), [(8, 0.7e-3), (16, 0.4e-3), (32, 0.3e-3)])
def test_doubt_does_not_take_whole_blocks_to_where_they_lose(
    n: int, per_row: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times as uncertain as on a busy host; all rows are slower than plain decoding there."""
    monkeypatch.setattr(CostModel, "doubt", 0.09)
    server = Server(Engine(per_row=per_row), narrow=True)
    assert server.engine.fixed_rate(n, BLOCK) < server.engine.plain_rate(n)
    server.run(n, 200)
    records = server.run(n, 400)
    assert rate(records) > 1.045 * best_fixed_rate(server.engine, n, records)


def test_follows_a_load_that_changes() -> None:
    """1 -> 32 -> 1 requests, with rows so dear that 32 requests decode plainly."""
    server = Server(Engine(per_row=2.5e-3))
    server.run(1, 200)
    for n, drafted in ((32, False), (1, True), (32, False), (1, True)):
        server.run(n, 50)
        records = server.run(n, 100)
        best = max(server.engine.plain_rate(n), best_fixed_rate(server.engine, n, records))
        assert rate(records) >= 0.95 * best
        assert (share_drafted(records) > 0.5) is drafted


@pytest.mark.parametrize("n", [4, 8, 32])
def test_follows_prompts_that_grow_and_shrink(n: int) -> None:
    """An ordinary draft: at 32 requests plain decoding wins, unless contexts are long."""
    server = Server(Engine(CODE, per_context_token=4.8e-6), narrow=True)
    for prompt, steps in ((110, 120), (1200, 150), (110, 200)):
        positions = prompt + server.engine.rng.integers(0, 64, (steps, n))
        records = [server.step(n, float(context)) for context in positions.sum(axis=1)]
        usual = n * (prompt + 31.5)
        plain = server.engine.plain_rate(n, usual)
        best = max(plain, best_fixed_rate(server.engine, n, records, usual))
        assert rate(records) >= 0.95 * best


def test_a_load_that_changes_often_pays_no_more_for_looks() -> None:
    """All steps count, those in which it decides what to do with the new load, too."""
    server = Server(Engine(CODE, per_row=1e-3))
    server.run(2, 100)
    records = []
    for _ in range(15):
        records += server.run(32, 20)
        assert share_drafted(server.run(2, 20)) > 0.5
    assert rate(records) >= 0.99 * server.engine.plain_rate(32)


@pytest.mark.parametrize("n", [8, 32])
def test_a_draft_that_changed_while_a_load_was_away_is_found(n: int) -> None:
    """Though that load was seen before, and has made its looks."""
    server = Server(Engine(USELESS))
    for _ in range(10):
        server.run(n, 20)
        server.run(2, 20)
    server.engine.intercepts = GOOD
    server.run(n, 100)
    assert share_drafted(server.run(n, 50)) >= 0.9


def heal(n: int) -> list[Record]:
    """Return 50 steps that begin 150 steps after a useless draft became good."""
    server = Server(Engine(USELESS))
    server.run(n, 400)
    server.engine.intercepts = GOOD
    server.run(n, 150)
    return server.run(n, 50)


@pytest.mark.parametrize("n", [1, 8, 32])
def test_a_draft_that_becomes_good_is_soon_used_again(n: int) -> None:
    assert share_drafted(heal(n)) >= 0.95


def spoil(n: int) -> list[Record]:
    """Return 50 steps that begin 150 steps after a good draft became useless, as sure as ever."""
    server = Server(Engine())
    server.run(n, 300)
    server.engine.intercepts = USELESS
    server.run(n, 150)
    return server.run(n, 50)


@pytest.mark.parametrize("n", [1, 2, 8, 32])
def test_a_draft_that_becomes_bad_is_soon_left(n: int) -> None:
    assert rate(spoil(n)) >= 0.95 * Engine().plain_rate(n)


def test_it_is_what_was_kept_that_makes_it_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: calibrated chances are believed, whatever came of them."""
    monkeypatch.setattr(GainCurve, "kept", 1.0)
    assert rate(spoil(1)) < 0.8 * Engine().plain_rate(1)


def test_it_is_what_looks_earn_that_makes_it_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: looks at a steady pace, whatever they find."""
    monkeypatch.setattr(LookPurse, "earn", lambda *_: None)
    assert share_drafted(heal(8)) < 0.5


def test_without_exploration_it_would_never_be_found() -> None:
    """The mutant: no looks while plain."""
    server = Server(Engine(USELESS))
    server.budget = BudgetController(
        server.budget.cost,
        Limits(BLOCK),
        Pacing(exploration=1e-9, shortest_pause=10**9, longest_pause=10**9),
    )
    server.run(8, 400)
    server.engine.intercepts = GOOD
    server.run(8, 800)
    assert share_drafted(server.run(8, 50)) == 0


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_narrow_draft_wins_where_its_rows_are_dear(n: int) -> None:
    """A draft row costs as much as a verified one: what is not verified is not worth proposing."""
    rates = []
    for narrow in (False, True):
        server = Server(Engine(per_draft_row=0.5e-3), narrow=narrow)
        server.run(n, 200)
        records = server.run(n, 400)
        rates.append(rate(records))
    assert rates[1] > (1.05 if n > 1 else 1.0) * rates[0]
    assert rates[1] >= 0.97 * server.engine.plain_rate(n)


def test_a_narrow_draft_widens_when_its_proposals_become_good() -> None:
    server = Server(Engine(USELESS, per_draft_row=0.5e-3), narrow=True)
    server.run(2, 400)
    server.engine.intercepts = (2.0,) * (BLOCK - 1)
    server.run(2, 800)
    assert np.median([r.draft_width for r in server.run(2, 50)]) >= 4
