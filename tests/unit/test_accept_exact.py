# SPDX-License-Identifier: Apache-2.0
"""The rules keep the target's law exactly: every draft, coin and draw is enumerated in float64.

The batched functions of the package run on all cases at once; nothing is restated here. A coin is
enumerated by a uniform below its chance and one at it. Every emission is extended by plain decoding
to B tokens and the law of these texts is compared with plain decoding's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from laws import BLOCK, MUTANTS, REJECTION, Rule, SmallTarget, Tree, grow, point_mass

from sglang_dflash.verify.accept import (
    Acceptance,
    Chances,
    DraftProbs,
    Verdict,
    accept_equal,
    last_law,
    verdict,
)

EXACT, SEEN = 1e-12, 1e-4  # errors of right rules are below, of wrong ones above

SHAPES = {"V=3 K=3": (3, 3), "V=4 K=2": (4, 2)}  # vocabulary, proposals
PENALTIES = {"frequency": 0.8, "presence": 0.5, "repetition": 1.3}
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.4},
    "frequency penalty": {"frequency": 0.8},
    "presence penalty": {"presence": 0.8},
    "repetition penalty": {"repetition": 1.7},
    "all": {**PENALTIES, "temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}
RULES = {"rejection": REJECTION, "block": BLOCK}
# A point mass has q = 1 and forgets nothing.
WRONG = [(m, d) for m in MUTANTS for d in (True, False) if d or m != "p/q forgotten"]


class Emissions(NamedTuple):
    """All that a step can commit.

    Attributes:
        verdict: of N cases.
        widths: [N] int64.
        weights: [N] float64, probability given the width.
    """

    verdict: Verdict
    widths: torch.Tensor
    weights: torch.Tensor


def small_target(vocab: int, **options: float) -> SmallTarget:
    generator = random.Random(7)
    logits = [[generator.gauss(0, 1) for _ in range(vocab)] for _ in range(vocab + 1)]
    return SmallTarget(logits, **options)


def target_tree(shape: str, options: str, **changes: int) -> Tree:
    vocab, num_proposals = SHAPES[shape]
    target = replace(small_target(vocab, **OPTIONS[options]), **changes)
    return grow(target.law_after, vocab, num_proposals)


def draft_tree(shape: str, kind: str) -> Tree:
    """Return laws that depend on the position only, on the text before, or have zeros."""
    vocab, num_proposals = SHAPES[shape]

    def law_after(text: tuple[int, ...]) -> list[float]:
        generator = random.Random(str(text) if kind == "sequential" else len(text))
        weights = [generator.random() + 0.05 for _ in range(vocab)]
        if kind == "sparse":
            weights[generator.randrange(vocab)] = 0.0
        return [weight / sum(weights) for weight in weights]

    return grow(law_after, vocab, num_proposals - 1)


def cases(*sizes: int) -> list[torch.Tensor]:
    """Return the columns of the Cartesian product of ranges."""
    return list(torch.tensor(list(product(*map(range, sizes)))).unbind(1))


def drafts_and_coins(draft: Tree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all proposals, coins [N, K] and widths [N]."""
    vocab, num_proposals = draft.probs.shape[1], draft.depth + 1
    sizes = [vocab] * num_proposals + [2] * num_proposals + [num_proposals + 1]
    columns = torch.stack(cases(*sizes), dim=1)
    proposals, coins, widths = columns.split([num_proposals, num_proposals, 1], dim=1)
    return proposals, coins.bool(), widths.squeeze(1) + 1


def ragged(rows: torch.Tensor, widths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the verified rows of [N, B, V], packed, and where each request's begin."""
    verified = torch.arange(rows.shape[1]) < widths.unsqueeze(1)
    return rows[verified], widths.cumsum(0) - widths


def enumerate_rule(rule: Rule, seen: Tree, draft: Tree, *, drawn: bool) -> Emissions:
    """Return all emissions of a rule with coins.

    Args:
        rule: The rule, or a mutant.
        seen: The target's laws as the rule sees them.
        draft: Where the proposals come from.
        drawn: Whether the rule is told q; else it takes the proposals as point masses.
    """
    proposals, coins, widths = drafts_and_coins(draft)
    laws = draft.along(proposals[:, :-1])  # [N, K, V]
    rows, row_starts = ragged(seen.along(proposals), widths)
    weights = laws.gather(2, proposals.unsqueeze(2)).squeeze(2).prod(1)
    proposals = proposals.where(torch.arange(proposals.shape[1]) < widths.unsqueeze(1) - 1, -1)
    token_ids = torch.arange(laws.shape[2]).expand_as(laws)
    q = DraftProbs(token_ids, laws) if drawn else point_mass(proposals)

    chances = rule.chances(proposals, q, rows, row_starts, widths).accept
    uniforms = chances.where(~coins, chances / 2)
    weights = weights * chances.where(coins, 1 - chances).prod(1)
    acceptance = rule.accept(proposals, q, rows, uniforms, row_starts, widths)

    law = acceptance.last_law / acceptance.last_law.sum(1, keepdim=True)
    count, vocab = law.shape
    every = torch.arange(count).repeat_interleave(vocab)
    last = torch.arange(vocab).repeat(count)
    decided = verdict(proposals[every], acceptance.num_accepted[every], last)
    return Emissions(decided, widths[every], (weights.unsqueeze(1) * law).flatten())


def enumerate_equal(seen: Tree, draft: Tree, *, shift: int = 0) -> Emissions:
    """Return all emissions where the target draws a token after each row, and equality decides.

    Args:
        seen: The target's laws as the rule sees them.
        draft: Where the proposals come from.
        shift: Rows by which a wrong verifier misses the proposal's.
    """
    vocab, block_size = draft.probs.shape[1], draft.depth + 2
    columns = torch.stack(cases(*[vocab] * (2 * block_size - 1), block_size), dim=1)
    proposals, tokens, widths = columns.split([block_size - 1, block_size, 1], dim=1)
    q = draft.along(proposals[:, :-1]).gather(2, proposals.unsqueeze(2)).squeeze(2)
    p = seen.along(proposals).gather(2, tokens.unsqueeze(2)).squeeze(2)
    widths = widths.squeeze(1) + 1
    decided = accept_equal(proposals, tokens.roll(-shift, dims=1), widths)
    return Emissions(decided, widths, q.prod(1) * p.prod(1))


def error_of(emissions: Emissions, target: Tree) -> float:
    """Return the largest error in the probability of a text of B tokens, over all widths."""
    tokens, num_committed = emissions.verdict.tokens, emissions.verdict.num_committed
    nodes = torch.zeros(len(tokens), dtype=torch.int64)
    for step, column in enumerate(tokens.unbind(1)):
        nodes = torch.where(step < num_committed, target.child(nodes, column), nodes)
    plain = target.law_of_texts(torch.zeros(1, dtype=torch.int64), torch.ones(1).double())
    assert plain.sum() == pytest.approx(1.0, abs=1e-12)
    worst = 0.0
    for width in emissions.widths.unique():
        weights = emissions.weights.where(emissions.widths == width, 0.0)
        worst = max(worst, float((target.law_of_texts(nodes, weights) - plain).abs().max()))
    return worst


def acceptance_length(emissions: Emissions, width: int) -> float:
    weights = emissions.weights.where(emissions.widths == width, 0.0)
    return float((weights * emissions.verdict.num_committed).sum())


each_shape = pytest.mark.parametrize("shape", SHAPES)
each_options = pytest.mark.parametrize("options", OPTIONS)
each_draft = pytest.mark.parametrize("kind", ["marginal", "sequential", "sparse"])
each_rule = pytest.mark.parametrize("name", RULES)
drawn_or_not = pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point mass"])


@each_shape
@each_options
@each_draft
@each_rule
@drawn_or_not
def test_coins_keep_the_law(shape: str, options: str, kind: str, name: str, drawn: bool) -> None:
    target = target_tree(shape, options)
    emissions = enumerate_rule(RULES[name], target, draft_tree(shape, kind), drawn=drawn)
    assert error_of(emissions, target) < EXACT


@each_shape
@each_options
def test_equality_with_the_targets_draws_keeps_the_law(shape: str, options: str) -> None:
    target = target_tree(shape, options)
    assert error_of(enumerate_equal(target, draft_tree(shape, "marginal")), target) < EXACT


@each_shape
@each_rule
@pytest.mark.parametrize(("mutant", "drawn"), WRONG)
def test_a_wrong_rule_is_seen(shape: str, name: str, mutant: str, drawn: bool) -> None:
    target, draft = target_tree(shape, "plain"), draft_tree(shape, "marginal")
    wrong = MUTANTS[mutant](RULES[name])
    assert error_of(enumerate_rule(wrong, target, draft, drawn=drawn), target) > SEEN


@each_shape
@pytest.mark.parametrize("shift", [1, -1])
def test_equality_with_the_wrong_row_is_seen(shape: str, shift: int) -> None:
    target, draft = target_tree(shape, "plain"), draft_tree(shape, "marginal")
    assert error_of(enumerate_equal(target, draft, shift=shift), target) > SEEN


@each_shape
@pytest.mark.parametrize("options", ["frequency penalty", "presence penalty", "repetition penalty"])
@pytest.mark.parametrize("name", [*RULES, "equal"])
def test_a_penalty_one_step_late_is_seen(shape: str, options: str, name: str) -> None:
    target, late = target_tree(shape, options), target_tree(shape, options, late=1)
    draft = draft_tree(shape, "marginal")
    if name == "equal":
        emissions = enumerate_equal(late, draft)
    else:
        emissions = enumerate_rule(RULES[name], late, draft, drawn=True)
    assert error_of(emissions, target) > SEEN


def _with_chances(change: Callable[[Chances, torch.Tensor], Chances]) -> Rule:
    """Return block verification with other coins or another scale."""

    def chances(*args: torch.Tensor) -> Chances:
        return change(BLOCK.chances(*args), args[-1])

    def accept(
        proposals: torch.Tensor,
        draft: DraftProbs,
        target_probs: torch.Tensor,
        uniforms: torch.Tensor,
        *rows: torch.Tensor,
    ) -> Acceptance:
        coins = chances(proposals, draft, target_probs, *rows)
        steps = torch.arange(1, proposals.shape[1] + 1)
        count = ((uniforms < coins.accept) * steps).amax(1)
        return Acceptance(count, last_law(count, coins.scale, draft, target_probs, *rows))

    return Rule(chances, accept)


def _capped_ratio_as_coin(chances: Chances, widths: torch.Tensor) -> Chances:
    inside = torch.arange(1, chances.scale.shape[1]) < widths.unsqueeze(1)
    return chances._replace(accept=chances.scale[:, 1:].where(inside, 0.0))


def _residual_not_scaled(chances: Chances, widths: torch.Tensor) -> Chances:
    return chances._replace(scale=torch.ones_like(chances.scale))


@each_shape
@pytest.mark.parametrize("change", [_capped_ratio_as_coin, _residual_not_scaled])
def test_a_wrong_block_rule_is_seen(
    shape: str, change: Callable[[Chances, torch.Tensor], Chances]
) -> None:
    # Where one token only is above q in every row, the scale would not show.
    target, draft = target_tree(shape, "plain"), draft_tree(shape, "sparse")
    emissions = enumerate_rule(_with_chances(change), target, draft, drawn=True)
    assert error_of(emissions, target) > SEEN
    right = enumerate_rule(_with_chances(lambda chances, _: chances), target, draft, drawn=True)
    assert error_of(right, target) < EXACT


@pytest.mark.parametrize("shift", [0, 1], ids=["right", "noise of the row before"])
def test_a_draw_coupled_to_the_targets_noise_keeps_the_law(shift: int) -> None:
    """Draft and target invert their distribution functions at one uniform per row.

    Between two neighbouring steps of any of these functions all uniforms are alike, so the cells
    can be enumerated. A verifier that used a row's noise for the row after it would not be exact:
    that noise chose the proposal which it stands behind.
    """
    vocab, num_proposals = 3, 2
    target = grow(small_target(vocab).law_after, vocab, num_proposals)
    draft = grow(lambda text: [0.5, 0.2, 0.3], vocab, num_proposals - 1)
    steps = torch.cat([target.probs.cumsum(1), draft.probs.cumsum(1)]).flatten().clamp(0, 1)
    edges = torch.cat([torch.zeros(1).double(), steps]).unique()
    middles, lengths = (edges[1:] + edges[:-1]) / 2, edges.diff()
    cells = torch.stack(cases(*[len(middles)] * (num_proposals + 1)), dim=1)
    noise = middles[cells]  # [N, B]

    proposals = torch.stack([invert(draft.probs[0], noise[:, j]) for j in range(num_proposals)], 1)
    rows = target.along(proposals)
    tokens = invert(rows, noise.roll(shift, dims=1))
    widths = torch.full((len(cells),), num_proposals + 1)
    decided = accept_equal(proposals, tokens, widths)
    error = error_of(Emissions(decided, widths, lengths[cells].prod(1)), target)
    assert (error > SEEN) if shift else (error < EXACT)


def invert(law: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the tokens [...] at which laws [..., V] reach uniforms [...]."""
    below = law.cumsum(-1)[..., :-1] <= uniforms.unsqueeze(-1)
    return below.sum(-1)


@each_shape
@each_options
@each_draft
def test_block_verification_keeps_at_least_as_much(shape: str, options: str, kind: str) -> None:
    """And exactly as much where the proposals are point masses."""
    target, draft = target_tree(shape, options), draft_tree(shape, kind)
    for drawn in (True, False):
        token, block = (
            enumerate_rule(rule, target, draft, drawn=drawn) for rule in (REJECTION, BLOCK)
        )
        for width in range(1, draft.depth + 3):
            gain = acceptance_length(block, width) - acceptance_length(token, width)
            assert gain > -EXACT
            if not drawn or width <= 2:
                assert gain < EXACT


@pytest.mark.parametrize(("name", "accepted"), [("rejection", 10 / 9), ("block", 11 / 9)])
def test_the_papers_example(name: str, accepted: float) -> None:
    """Sun et al., section 2: target (1/3, 2/3), draft (2/3, 1/3), two proposals."""
    target = grow(lambda text: [1 / 3, 2 / 3], 2, 2)
    draft = grow(lambda text: [2 / 3, 1 / 3], 2, 1)
    emissions = enumerate_rule(RULES[name], target, draft, drawn=True)
    assert acceptance_length(emissions, 3) == pytest.approx(1 + accepted, abs=1e-12)
    assert acceptance_length(emissions, 1) == pytest.approx(1, abs=1e-12)
