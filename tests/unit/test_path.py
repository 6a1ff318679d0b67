# SPDX-License-Identifier: Apache-2.0
"""The path of a DFlash2 draft: the reference's, its law, and what is said of its chances."""

from __future__ import annotations

import dataclasses
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws import assert_follows
from samplings import TOP_K_ALL, sampling

from sglang_dflash.draft.path import PathProposer
from sglang_dflash.draft.proposer import Proposal, Sampling, VocabularyHead
from sglang_dflash.draft.selector import CandidateSelector
from sglang_dflash.hf.select import successors
from sglang_dflash.noise import gumbel

VOCAB, HIDDEN, RANK = 30, 12, 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """As much of a draft's config as a path follows from."""

    selector_top_k: int = 5
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None


class Drafted:
    """A random selector and head, and blocks' hidden states."""

    def __init__(self, shape: Shape, num_blocks: int, block_size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.selector = CandidateSelector(HIDDEN, VOCAB, RANK).requires_grad_(False)
        for weight in self.selector.parameters():
            weight.normal_(generator=generator)
        self.weight = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
        self.hidden = torch.randn(num_blocks, block_size, HIDDEN, generator=generator)
        self.anchors = torch.randint(VOCAB, (num_blocks,), generator=generator)
        self.shape = shape
        head = VocabularyHead(lambda rows: rows @ self.weight.T, VOCAB)
        self.proposer = PathProposer(self.selector, head, shape)  # type: ignore[arg-type]

    def propose(self, asked: Sampling | None = None, **options: Any) -> Proposal:
        positions = torch.arange(self.hidden.shape[1]).expand(len(self.hidden), -1)
        return self.proposer.propose(self.hidden, self.anchors, asked, positions, **options)

    def repeated(self, times: int) -> Drafted:
        """The first block many times."""
        self.hidden = self.hidden[:1].expand(times, -1, -1)
        self.anchors = self.anchors[:1].expand(times)
        return self

    def successors(self, block: int, row: int, previous: int) -> dict[int, float]:
        """Return the reference's scores of a row's candidates after a token."""
        draft: Any = SimpleNamespace(config=self.shape, candidate_selector=self.selector)
        rows = self.hidden[block, row + 1]
        tokens, scores = successors(draft, rows, rows @ self.weight.T, previous)
        return dict(zip(tokens.tolist(), scores.tolist(), strict=True))


def law_of(scores: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    probs = torch.softmax(torch.tensor(list(scores.values())).double() / temperature, 0)
    return dict(zip(scores, probs.tolist(), strict=True))


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(1), Shape(VOCAB), Shape(5, 3.0), Shape(5, 2.0, 0.7)],
    ids=["top 5", "top 1", "all", "multiplied", "multiplied and capped"],
)
def test_the_best_path_is_the_references(shape: Shape) -> None:
    drafted = Drafted(shape, num_blocks=9, block_size=6)
    found = drafted.propose(with_confidence=True)
    assert found.confidence is not None
    for block in range(9):
        previous = int(drafted.anchors[block])
        for row in range(5):
            scores = drafted.successors(block, row, previous)
            previous = max(scores, key=scores.__getitem__)
            assert int(found.tokens[block, row]) == previous
            expected = law_of(scores)[previous]
            assert float(found.confidence[block, row]) == pytest.approx(expected, rel=1e-4)


def test_the_selector_changes_paths() -> None:
    drafted = Drafted(Shape(), num_blocks=50, block_size=6)
    alone = (drafted.hidden[:, 1:] @ drafted.weight.T).argmax(-1)
    assert 0.2 < (drafted.propose().tokens == alone).double().mean() < 0.8


def test_drawn_paths_follow_their_law_as_a_whole() -> None:
    drafted = Drafted(Shape(3), num_blocks=1, block_size=3).repeated(200_000)
    heat = 0.8
    torch.manual_seed(1)
    found = drafted.propose(sampling(200_000, temperatures=torch.full((200_000, 1), heat)))
    law, places = torch.zeros(VOCAB * VOCAB, dtype=torch.float64), {}
    for first, p in law_of(drafted.successors(0, 0, int(drafted.anchors[0])), heat).items():
        for second, q in law_of(drafted.successors(0, 1, first), heat).items():
            law[first * VOCAB + second] = p * q
            places[first, second] = (p, q)
    assert len(places) == 9
    assert_follows(torch.bincount(found.tokens @ torch.tensor([VOCAB, 1]), minlength=900), law)
    # And what verification is told is the law of each draw, given the one before it.
    assert found.draft_probs is not None
    ids, probs = found.draft_probs
    own = (probs * (ids == found.tokens.unsqueeze(2))).sum(2)
    for i in range(100):
        assert own[i].tolist() == pytest.approx(places[tuple(found.tokens[i].tolist())], rel=1e-4)
    torch.testing.assert_close(probs.sum(2), torch.ones(200_000, 2))


def test_requests_of_a_batch_are_cut_each_as_it_asks() -> None:
    drafted = Drafted(Shape(), num_blocks=40, block_size=5)
    top_ks = torch.tensor([1, TOP_K_ALL, 2, TOP_K_ALL]).repeat(10)
    top_ps = torch.tensor([1.0, 1.0, 1.0, 1e-6]).repeat(10)
    torch.manual_seed(2)
    found = drafted.propose(sampling(40, top_ks=top_ks, top_ps=top_ps))
    best = drafted.propose().tokens
    assert torch.equal(found.tokens[::4], best[::4]), "a greedy one"
    assert torch.equal(found.tokens[3::4], best[3::4]), "one of a tiny top-p"
    assert not torch.equal(found.tokens[1::4], best[1::4])
    assert found.draft_probs is not None
    assert ((found.draft_probs.probs[2::4] > 0).sum(2) == 2).all()


def test_a_seeded_path_is_the_targets_own_draw_where_their_laws_agree() -> None:
    n, rows = 200, 4
    drafted = Drafted(Shape(VOCAB), n, rows + 1)
    generator = torch.Generator().manual_seed(5)
    seeds = torch.randint(1 << 40, (n,), generator=generator)
    by_rank = torch.arange(n) % 2 == 0
    found = drafted.propose(sampling(n, seeds=seeds, by_rank=by_rank), with_confidence=True)
    assert found.confidence is not None
    for block in range(n):
        previous = int(drafted.anchors[block])
        for row in range(rows):
            law = law_of(drafted.successors(block, row, previous))
            ranked = sorted(law, key=lambda token: -law[token])
            columns = range(VOCAB) if by_rank[block] else ranked
            noise = gumbel(
                seeds[block : block + 1], torch.tensor([row]), torch.tensor(list(columns))
            )[0]
            probs = torch.tensor([law[token] for token in ranked], dtype=torch.float64)
            previous = ranked[int((probs.log() + noise).argmax())]
            assert int(found.tokens[block, row]) == previous
            assert float(found.confidence[block, row]) == pytest.approx(law[previous], rel=1e-3)


def test_the_confidence_of_unseeded_paths_does_not_know_what_was_drawn() -> None:
    """It is the mean over all paths, so that widths that follow from it do not know the path."""
    heat, times = 0.7, 60
    drafted = Drafted(Shape(4), num_blocks=1, block_size=4, seed=3).repeated(times)
    temperatures = torch.full((times, 1), heat)
    torch.manual_seed(3)
    found = drafted.propose(sampling(times, temperatures=temperatures), with_confidence=True)
    assert len(found.tokens.unique(dim=0)) > 8
    assert found.confidence is not None
    assert torch.equal(found.confidence, found.confidence[:1].expand(times, -1))
    candidates = [list(drafted.successors(0, row, 0)) for row in range(3)]
    means = [0.0, 0.0, 0.0]
    for path in product(*candidates):
        weight, previous = 1.0, int(drafted.anchors[0])
        for row, token in enumerate(path):
            scores = drafted.successors(0, row, previous)
            weight *= law_of(scores, heat)[token]
            previous = token
        for row, (before, token) in enumerate(
            zip([int(drafted.anchors[0]), *path], path, strict=False)
        ):
            means[row] += weight * law_of(drafted.successors(0, row, before))[token]
    assert found.confidence[0].tolist() == pytest.approx(means, rel=1e-4)
