# SPDX-License-Identifier: Apache-2.0
"""The batched rules in float32, in one mixed batch: do their texts follow the target's law?

Each trial is one step of one request, extended to three tokens by plain decoding. One batch holds
requests whose proposals are drawn from a draft opposed to the target, argmax chains taken as point
masses, and greedy requests; widths 1, 2 and full. The target is Markov with a penalty, so a wrong
row, a wrong residual or a late penalty shows; the mutants prove that it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from laws import (
    BLOCK,
    MUTANTS,
    REJECTION,
    Rule,
    SmallTarget,
    Tree,
    assert_follows,
    chi_squared_p_value,
    grow,
)

from sglang_dflash.verify.accept import DraftProbs, Verdict, accept_equal, verdict

VOCAB, NUM_PROPOSALS, NUM_TOKENS, SUPPORT = 8, 3, 3, 5
WIDTHS = (1, 2, NUM_PROPOSALS + 1)
DRAWN, ARGMAX, GREEDY = range(3)
TRIALS, MUTANT_TRIALS = 200_000, 50_000  # of each sampled kind
ALPHA = 1e-8


def penalised_target(late: int = 0) -> Tree:
    generator = random.Random(3)
    logits = [[generator.gauss(0, 1.2) for _ in range(VOCAB)] for _ in range(VOCAB + 1)]
    target = SmallTarget(logits, frequency=1.0, presence=0.5, repetition=1.2, late=late)
    return grow(target.law_after, VOCAB, NUM_PROPOSALS)


TARGET, LATE = penalised_target(), penalised_target(late=1)


class Batch(NamedTuple):
    """One step's inputs, as the worker has them.

    Attributes:
        kinds: [n] int64, DRAWN, ARGMAX or GREEDY.
        proposals: [n, B-1] int64.
        draft: q, [n, B-1, SUPPORT]; padded with entries of 0.
        target_probs: [M, V] float32, one-hot for greedy requests.
        row_starts: [n] int64.
        widths: [n] int64.
        noise: [n, B, V] float32, Gumbel; the drawn proposals are coupled to its first rows.
        generator: for coins and draws.
    """

    kinds: torch.Tensor
    proposals: torch.Tensor
    draft: DraftProbs
    target_probs: torch.Tensor
    row_starts: torch.Tensor
    widths: torch.Tensor
    noise: torch.Tensor
    generator: torch.Generator


Decide = Callable[[Batch], Verdict]


def opposed_draft() -> torch.Tensor:
    """Return [B-1, V], q of each position: tokens that the target avoids, some with 0."""
    average = TARGET.probs[: VOCAB + 1].mean(0)
    logits = -(average.log() * torch.tensor([[0.9], [0.5], [-0.6]], dtype=torch.float64))
    dropped = logits.argsort(1)[:, : VOCAB - SUPPORT]
    return logits.scatter(1, dropped, -torch.inf).softmax(1)


def make_batch(trials: int, seen: Tree) -> Batch:
    generator = torch.Generator().manual_seed(11)
    num_requests = 2 * trials + trials // 10
    kinds = torch.full((num_requests,), GREEDY)
    kinds[:trials], kinds[trials : 2 * trials] = DRAWN, ARGMAX
    kinds = kinds[torch.randperm(num_requests, generator=generator)]
    widths = torch.tensor(WIDTHS)[torch.randint(3, (num_requests,), generator=generator)]
    uniforms = torch.rand(num_requests, NUM_PROPOSALS + 1, VOCAB, generator=generator)
    noise = -(-uniforms.clamp(1e-7, 1 - 1e-7).log()).log()

    q = opposed_draft().float()
    chain = TARGET.probs[0].topk(NUM_PROPOSALS).indices  # a guess that is often right at first
    drawn = (q.log() + noise[:, :-1]).argmax(2)
    proposals = torch.where((kinds == DRAWN).unsqueeze(1), drawn, chain)
    rows = seen.along(proposals).float()  # [n, B, V]
    one_hot = torch.nn.functional.one_hot(rows.argmax(2), VOCAB).float()
    rows = torch.where((kinds == GREEDY)[:, None, None], one_hot, rows)
    verified = torch.arange(NUM_PROPOSALS + 1) < widths.unsqueeze(1)
    starts = widths.cumsum(0) - widths
    draft = sparse(q, proposals, kinds)
    return Batch(kinds, proposals, draft, rows[verified], starts, widths, noise, generator)


def sparse(q: torch.Tensor, proposals: torch.Tensor, kinds: torch.Tensor) -> DraftProbs:
    """Return q on its support; a point mass padded with zeros where nothing was drawn."""
    probs, token_ids = q.topk(SUPPORT)  # [B-1, SUPPORT]
    point = torch.zeros(SUPPORT)
    point[1] = 1.0
    drawn = (kinds == DRAWN)[:, None, None]
    padded = proposals.unsqueeze(2).repeat(1, 1, SUPPORT)
    return DraftProbs(torch.where(drawn, token_ids, padded), torch.where(drawn, probs, point))


def decide_by(rule: Rule) -> Decide:
    def decide(batch: Batch) -> Verdict:
        uniforms = torch.rand(batch.proposals.shape, generator=batch.generator)
        count, law = rule.accept(
            batch.proposals,
            batch.draft,
            batch.target_probs,
            uniforms,
            batch.row_starts,
            batch.widths,
        )
        last = torch.multinomial(law, 1, generator=batch.generator).squeeze(1)
        return verdict(batch.proposals, count, last)

    return decide


def decide_by_equality(batch: Batch, shift: int = 0) -> Verdict:
    """Draw every row with its own noise; `shift` rows off in a wrong verifier."""
    last = batch.widths.unsqueeze(1) - 1
    rows = batch.row_starts.unsqueeze(1) + torch.arange(NUM_PROPOSALS + 1).minimum(last)
    noise = batch.noise.roll(shift, dims=1)
    tokens = (batch.target_probs[rows].log() + noise).argmax(2)
    return accept_equal(batch.proposals, tokens, batch.widths)


def decide_by_turns(batch: Batch) -> Verdict:
    """Three rules in one batch, request by request."""
    turn = torch.arange(len(batch.kinds)) % 3
    tokens, counts, anchors = zip(*(decide(batch) for decide in RULES.values()), strict=True)
    return Verdict(
        torch.stack(tokens)[turn, torch.arange(len(turn))],
        torch.stack(counts)[turn, torch.arange(len(turn))],
        torch.stack(anchors)[turn, torch.arange(len(turn))],
    )


RULES: dict[str, Decide] = {
    "rejection": decide_by(REJECTION),
    "block": decide_by(BLOCK),
    "equal": decide_by_equality,
}
WRONG: dict[str, Decide] = {
    f"{name}: {mutant}": decide_by(mutate(rule))
    for name, rule in (("rejection", REJECTION), ("block", BLOCK))
    for mutant, mutate in MUTANTS.items()
} | {"equal: noise of the row before": lambda batch: decide_by_equality(batch, shift=1)}


def texts(decided: Verdict, batch: Batch) -> torch.Tensor:
    """Return [n], the number of each request's first NUM_TOKENS tokens, decoded on if fewer."""
    nodes = torch.zeros(len(batch.kinds), dtype=torch.int64)
    greedy = batch.kinds == GREEDY
    for step in range(NUM_TOKENS):
        law = TARGET.probs[nodes].float()
        drawn = torch.multinomial(law, 1, generator=batch.generator).squeeze(1)
        drawn = torch.where(greedy, law.argmax(1), drawn)
        committed = step < decided.num_committed
        nodes = TARGET.child(nodes, torch.where(committed, decided.tokens[:, step], drawn))
    return nodes - (VOCAB**NUM_TOKENS - 1) // (VOCAB - 1)


def law_of_texts() -> torch.Tensor:
    """Return [V ** NUM_TOKENS] float64 of plain decoding."""
    shallow = Tree(TARGET.probs, NUM_TOKENS - 1)
    num_nodes = (VOCAB**NUM_TOKENS - 1) // (VOCAB - 1)
    shallow = shallow._replace(probs=shallow.probs[:num_nodes])
    return shallow.law_of_texts(torch.zeros(1, dtype=torch.int64), torch.ones(1).double())


def groups(batch: Batch, outcome: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return [V ** NUM_TOKENS] counts by kind and width, and by kind."""
    found = {}
    for kind, name in ((DRAWN, "drawn"), (ARGMAX, "argmax")):
        for width in (None, *WIDTHS):
            chosen = batch.kinds == kind
            if width is not None:
                chosen &= batch.widths == width
            found[f"{name}, width {width}"] = outcome[chosen].bincount(minlength=VOCAB**NUM_TOKENS)
    return found


def first_two(law_or_counts: torch.Tensor) -> torch.Tensor:
    return law_or_counts.view(VOCAB**2, -1).sum(1)


@pytest.mark.parametrize("name", [*RULES, "by turns"])
def test_a_mixed_batch_follows_the_target(name: str) -> None:
    batch = make_batch(TRIALS, TARGET)
    decided = (RULES | {"by turns": decide_by_turns})[name](batch)
    outcome, law = texts(decided, batch), law_of_texts()
    for counts in groups(batch, outcome).values():
        assert_follows(first_two(counts), first_two(law), ALPHA)
        assert_follows(counts, law, ALPHA)
    assert (decided.num_committed <= batch.widths).all()
    # The draft is opposed, not hopeless: every ending is seen.
    full = (batch.widths == NUM_PROPOSALS + 1) & (batch.kinds == DRAWN)
    assert (decided.num_committed[full].bincount(minlength=NUM_PROPOSALS + 2)[1:] > 500).all()


@pytest.mark.parametrize("name", RULES)
def test_greedy_requests_of_a_mixed_batch_are_deterministic(name: str) -> None:
    batch = make_batch(MUTANT_TRIALS, TARGET)
    greedy = batch.kinds == GREEDY
    text: tuple[int, ...] = ()
    node = torch.zeros(1, dtype=torch.int64)
    for _ in range(NUM_PROPOSALS + 1):
        token = TARGET.probs[node].argmax(1)
        node = TARGET.child(node, token) if len(text) < NUM_PROPOSALS else node
        text = (*text, int(token))
    decided = RULES[name](batch)
    committed = torch.arange(NUM_PROPOSALS + 1) < decided.num_committed.unsqueeze(1)
    assert (~committed | (decided.tokens == torch.tensor(text)))[greedy].all()
    agree = (batch.proposals[greedy][0] == torch.tensor(text[:-1])).long().cumprod(0).sum()
    assert 0 < agree < NUM_PROPOSALS  # a refusal is part of it
    expected = (agree + 1).minimum(batch.widths[greedy])
    assert torch.equal(decided.num_committed[greedy].long(), expected)


def worst_p_value(decide: Decide, seen: Tree) -> float:
    batch = make_batch(MUTANT_TRIALS, seen)
    outcome, law = texts(decide(batch), batch), law_of_texts()
    return min(
        chi_squared_p_value(first_two(counts), first_two(law))
        for counts in groups(batch, outcome).values()
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_seen(name: str) -> None:
    """On a quarter of the trials."""
    assert worst_p_value(WRONG[name], TARGET) < ALPHA


@pytest.mark.parametrize("name", RULES)
def test_a_penalty_one_step_late_is_seen(name: str) -> None:
    assert worst_p_value(RULES[name], LATE) < ALPHA


@pytest.mark.parametrize("name", RULES)
def test_fewer_trials_do_not_blame_a_right_rule(name: str) -> None:
    """The mutants' own check, passed by the rules themselves."""
    assert worst_p_value(RULES[name], TARGET) >= ALPHA
