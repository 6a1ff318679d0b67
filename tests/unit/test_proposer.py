# SPDX-License-Identifier: Apache-2.0
"""What is proposed for sampled requests, and the law it says it was drawn from."""

from __future__ import annotations

import pytest
import torch
from laws import assert_follows
from samplings import TOP_K_ALL, sampling

from sglang_dflash.budget.calibration import Calibrator
from sglang_dflash.budget.late import most_likely_rows
from sglang_dflash.budget.planner import Limits
from sglang_dflash.draft.proposer import (
    VocabularyHead,
    propose_greedy,
    propose_sampled,
)
from sglang_dflash.noise import gumbel
from sglang_dflash.verify.accept import accept_block

VOCAB = 40


def identity_head() -> VocabularyHead:
    """A head whose logits are the hidden states themselves."""
    return VocabularyHead(lambda rows: rows, VOCAB)


def test_proposals_follow_the_law_they_come_with() -> None:
    n = 100_000
    logits = torch.randn(1, 3, VOCAB, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(4)
    proposal = propose_sampled(
        logits.expand(n, -1, -1), identity_head(), sampling(n), torch.zeros(n, 3)
    )
    assert proposal.draft_probs is not None
    for column in range(2):
        law = torch.zeros(VOCAB, dtype=torch.float64)
        ids = proposal.draft_probs.token_ids[0, column]
        law[ids] = proposal.draft_probs.probs[0, column].double()
        assert_follows(torch.bincount(proposal.tokens[:, column], minlength=VOCAB), law / law.sum())


def test_a_greedy_request_is_proposed_its_best_tokens_and_no_other() -> None:
    hidden = torch.randn(6, 4, VOCAB, generator=torch.Generator().manual_seed(3))
    top_ks = torch.tensor([1, TOP_K_ALL, 1, 3, 1, TOP_K_ALL])
    proposal = propose_sampled(
        hidden, identity_head(), sampling(6, top_ks=top_ks), torch.zeros(6, 4)
    )
    greedy = top_ks == 1
    assert torch.equal(proposal.tokens[greedy], hidden[greedy][:, 1:].argmax(-1))
    assert proposal.draft_probs is not None
    assert torch.equal(
        proposal.draft_probs.probs[greedy].sort(-1, descending=True).values[..., :2],
        torch.tensor([1.0, 0.0]).expand(3, 3, 2),
    )
    kept = (proposal.draft_probs.probs > 0).sum(-1)
    assert kept[3].tolist() == [3, 3, 3], "top-k cuts the draft's law as it cuts the target's"


def test_a_seeded_proposal_is_the_targets_own_draw_where_their_laws_agree() -> None:
    n, block_size = 200, 4
    generator = torch.Generator().manual_seed(5)
    hidden = 3 * torch.randn(n, block_size, VOCAB, generator=generator)
    positions = torch.randint(500, (n, 1), generator=generator) + torch.arange(block_size)
    seeds = torch.randint(1 << 40, (n,), generator=generator)
    by_rank = torch.arange(n) % 2 == 0
    top_ks = torch.where(by_rank, 8, TOP_K_ALL)
    proposal = propose_sampled(
        hidden,
        identity_head(),
        sampling(n, top_ks=top_ks, seeds=seeds, by_rank=by_rank),
        positions,
    )
    # The target, after row j - 1, has row j's logits: the draft is perfect.
    probs = torch.softmax(hidden[:, 1:], -1).flatten(0, 1)
    places, each = positions[:, :-1].flatten(), seeds.repeat_interleave(block_size - 1)
    noise = gumbel(each, places, torch.arange(VOCAB))
    by_id = (probs.log() + noise).argmax(-1)
    ranked, tokens = probs.sort(-1, descending=True)
    best = (ranked[:, :8].log() + noise[:, :8]).argmax(-1, keepdim=True)
    expected = torch.where(
        by_rank.repeat_interleave(block_size - 1), tokens.gather(1, best).squeeze(1), by_id
    )
    same = (proposal.tokens.flatten() == expected).double().mean()
    assert same > 0.999, "only a draw from beyond the draft's support may differ"


def test_shards_of_a_head_propose_what_the_whole_head_does() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 4, generator=generator)
    hidden = torch.randn(5, 4, 4, generator=generator)
    whole = VocabularyHead(lambda rows: rows @ weight.T, 12)
    scores, tokens, _ = whole.best(hidden, 5)
    rows = hidden[:, 1:].reshape(-1, 4)
    shards = [(rows @ part.T).topk(4, dim=-1) for part in weight.chunk(3)]
    gathered = iter(
        [
            torch.cat([shard.values for shard in shards], dim=1),
            torch.cat([shard.indices + 4 * rank for rank, shard in enumerate(shards)], dim=1),
        ]
    )
    head = VocabularyHead(
        lambda rows: rows @ weight.chunk(3)[1].T, 4, 4, gather=lambda _: next(gathered)
    )
    found_scores, found_tokens, _ = head.best(hidden, 5)
    assert torch.equal(found_tokens, tokens)
    torch.testing.assert_close(found_scores, scores)


def test_confidence_is_the_drafts_probability_of_its_proposals() -> None:
    hidden = torch.randn(7, 5, VOCAB, generator=torch.Generator().manual_seed(8))
    law = torch.softmax(hidden[:, 1:], -1)
    greedy = propose_greedy(hidden, identity_head(), with_confidence=True)
    seeded = sampling(7, seeds=torch.arange(7), by_rank=torch.zeros(7, dtype=torch.bool))
    drawn = propose_sampled(
        hidden, identity_head(), seeded, torch.zeros(7, 5).long(), with_confidence=True
    )
    for proposal in (greedy, drawn):
        expected = law.gather(2, proposal.tokens.unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(proposal.confidence, expected)


@pytest.mark.parametrize("count", [1, 4])
def test_a_head_in_chunks_says_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(7, 5, VOCAB, generator=torch.Generator().manual_seed(8))
    whole = identity_head().best(hidden, count, with_mass=True)
    most_rows: list[int] = []
    head = VocabularyHead(lambda rows: most_rows.append(len(rows)) or rows, VOCAB)
    monkeypatch.setattr("sglang_dflash.draft.proposer._CHUNK_LOGITS", 3 * VOCAB + 1)
    for one, other in zip(head.best(hidden, count, with_mass=True), whole, strict=True):
        assert torch.equal(one, other)
    assert most_rows == [3] * 9 + [1]
    torch.testing.assert_close(whole.log_mass[:, 0], hidden[:, 1:].flatten(0, 1).logsumexp(1))


def test_a_draft_that_came_to_nan_costs_its_proposal_and_no_more() -> None:
    """Its proposals are refused, and what is drawn instead follows the target alone."""
    hidden = torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(8))
    hidden[0, 2, 1] = float("nan")
    asked = sampling(2)
    proposal = propose_sampled(
        hidden, identity_head(), asked, torch.zeros(2, 4).long(), with_confidence=True
    )
    assert all(torch.isfinite(each).all() for each in proposal.draft_probs)
    target = torch.softmax(torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(9)), -1)
    starts, widths = torch.tensor([0, 4]), torch.tensor([4, 4])
    uniforms = torch.zeros(2, 3)  # all that can be kept is
    accepted = accept_block(
        proposal.tokens, proposal.draft_probs, target.clone(), uniforms, starts, widths
    )
    assert accepted.num_accepted.tolist() == [1, 3]
    torch.testing.assert_close(accepted.last_law[0], target[1])
    calibrator = Calibrator(4)
    ones = torch.ones(2, dtype=torch.int64)
    calibrator.update(proposal.confidence, torch.ones(2, dtype=torch.bool), 4 * ones, 3 * ones)
    assert torch.isfinite(calibrator.intercepts).all()
    assert torch.isfinite(calibrator.chances(proposal.confidence, ones.bool())).all()


def test_the_confidence_of_unseeded_proposals_does_not_know_what_was_drawn() -> None:
    hidden = torch.randn(1, 5, VOCAB, generator=torch.Generator().manual_seed(8)).expand(50, -1, -1)
    law = torch.softmax(hidden[:, 1:], -1)
    torch.manual_seed(5)
    found = propose_sampled(
        hidden, identity_head(), sampling(50), torch.zeros(50, 5), with_confidence=True
    )
    assert len(found.tokens.unique(dim=0)) > 40
    assert found.confidence is not None
    assert torch.equal(found.confidence, found.confidence[:1].expand(50, -1))
    assert found.draft_probs is not None
    ids, probs = found.draft_probs
    torch.testing.assert_close(found.confidence, (law.gather(2, ids) * probs).sum(2))


def test_a_text_follows_the_target_where_requests_compete_for_rows() -> None:
    """Two requests and one row to give: it must not go to the request that drew a likely token."""
    pairs, laws = 20_000, torch.tensor([[0.7, 0.3], [0.5, 0.5]])  # the draft's, the target's
    head = VocabularyHead(lambda rows: rows, 2)
    hidden = laws[0].log().expand(2 * pairs, 2, 2)
    torch.manual_seed(6)
    drawn = propose_sampled(
        hidden, head, sampling(2 * pairs), torch.zeros(2 * pairs, 2), with_confidence=True
    )
    limits = Limits(block_size=2)
    widths = torch.cat([most_likely_rows(pair, 3, limits) for pair in drawn.confidence.split(2)])
    target = laws[1].expand(int(widths.sum()), 2)
    uniforms, starts = torch.rand(drawn.tokens.shape), widths.cumsum(0) - widths
    accepted = accept_block(drawn.tokens, drawn.draft_probs, target, uniforms, starts, widths)
    last = torch.multinomial(accepted.last_law, num_samples=1).squeeze(1)
    first = torch.where(accepted.num_accepted > 0, drawn.tokens[:, 0], last)
    for request in (0, 1):
        assert_follows(torch.bincount(first[request::2], minlength=2), laws[1].double())


def test_a_mapped_head_proposes_the_best_of_its_tokens() -> None:
    token_ids = torch.tensor([3, 4, 11, 25, 39])
    hidden = torch.randn(7, 5, VOCAB, generator=torch.Generator().manual_seed(9))
    head = VocabularyHead(lambda rows: rows[:, token_ids], 5, token_ids=token_ids)
    masked = torch.full_like(hidden, float("-inf"))
    masked[..., token_ids] = hidden[..., token_ids]
    greedy = propose_greedy(hidden, head, with_confidence=True)
    expected = propose_greedy(masked, identity_head(), with_confidence=True)
    assert torch.equal(greedy.tokens, expected.tokens)
    torch.testing.assert_close(greedy.confidence, expected.confidence)
    sampled = propose_sampled(hidden, head, sampling(7), torch.zeros(7, 5))
    assert torch.isin(sampled.tokens, token_ids).all()
    assert sampled.draft_probs is not None
    assert torch.isin(sampled.draft_probs.token_ids, token_ids).all()


def test_a_narrow_block_is_filled_with_proposals_that_nobody_verifies() -> None:
    hidden = torch.randn(3, 3, VOCAB, generator=torch.Generator().manual_seed(10))
    made = propose_sampled(
        hidden, identity_head(), sampling(3), torch.zeros(3, 3), with_confidence=True
    )
    filled = made.filled(7)
    assert filled.tokens.shape == (3, 7)
    assert filled.draft_probs is not None
    assert torch.equal(filled.tokens[:, :2], made.tokens)
    assert filled.confidence is made.confidence
    torch.testing.assert_close(filled.draft_probs.probs.sum(-1), torch.ones(3, 7))
    assert propose_greedy(hidden, identity_head()).filled(7).draft_probs is None
