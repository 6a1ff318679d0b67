# SPDX-License-Identifier: Apache-2.0
"""The acceptance rules at their edges: equality by a loop, rounding, empty rows, cost.

That they keep the target's law is shown in test_accept_exact.py and test_accept_law.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from laws import BLOCK, REJECTION, Rule
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.verify.accept import (
    DraftProbs,
    accept_block,
    accept_equal,
    accept_rejection,
    verdict,
)

LARGEST = 1 - 2**-24  # float32, below 1

each_rule = pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=["rejection", "block"])


def accepted_by_a_loop(proposals: list[int], target: list[int]) -> list[int]:
    """Return the tokens that plain decoding would have produced as far as the block reaches."""
    committed = []
    for proposal, token in zip(proposals, target, strict=False):
        committed.append(token)
        if proposal != token:
            return committed
    return [*committed, target[len(proposals)]]


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
def test_commits_the_agreeing_prefix_and_one_more(block_size: int, ragged: bool) -> None:
    generator = torch.Generator().manual_seed(block_size)
    proposals = torch.randint(0, 2, (200, block_size - 1), generator=generator)
    target = torch.randint(0, 2, (200, block_size), generator=generator)
    widths = torch.randint(1, block_size + 1, (200,), generator=generator)
    decided = accept_equal(proposals, target, widths if ragged else None)
    for row in range(200):
        width = int(widths[row]) if ragged else block_size
        expected = accepted_by_a_loop(
            proposals[row, : width - 1].tolist(), target[row, :width].tolist()
        )
        count = int(decided.num_committed[row])
        assert decided.tokens[row, :count].tolist() == expected
        assert int(decided.next_anchor[row]) == expected[-1]


def test_a_later_agreement_does_not_count() -> None:
    decided = accept_equal(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7, 1]]))
    assert decided.num_committed.tolist() == [2]
    assert decided.next_anchor.tolist() == [9]


def test_a_verdict_is_the_kept_proposals_and_the_last_token() -> None:
    proposals = torch.tensor([[5, 6, 7], [5, 6, 7], [5, -1, -1]])
    decided = verdict(proposals, torch.tensor([3, 1, 0]), torch.tensor([9, 8, 4]))
    kept = [row[:count] for row, count in zip(decided.tokens.tolist(), [4, 2, 1], strict=True)]
    assert kept == [[5, 6, 7, 9], [5, 8], [4]]
    assert decided.num_committed.tolist() == [4, 2, 1]
    assert decided.next_anchor.tolist() == [9, 8, 4]


def test_dtypes_are_those_the_scheduler_takes() -> None:
    proposals = torch.tensor([[1]])
    for decided in (
        accept_equal(proposals, torch.tensor([[1, 2]])),
        verdict(proposals, torch.tensor([1]), torch.tensor([2])),
    ):
        assert decided.tokens.dtype == torch.int64
        assert decided.num_committed.dtype == torch.int32
        assert decided.next_anchor.dtype == torch.int64


def one_request(
    rule: Rule,
    target_probs: list[list[float]],
    draft_probs: list[list[float]],
    proposals: list[int],
    uniforms: list[float],
) -> tuple[int, list[float]]:
    """Return num_accepted, and the last law, normalised, of a request with dense q."""
    q = torch.tensor([draft_probs])
    acceptance = rule.accept(
        torch.tensor([proposals]),
        DraftProbs(torch.arange(q.shape[2]).expand_as(q), q),
        torch.tensor(target_probs),
        torch.tensor([uniforms]),
        torch.tensor([0]),
        torch.tensor([len(target_probs)]),
    )
    law = acceptance.last_law[0]
    return int(acceptance.num_accepted), (law / law.sum()).tolist()


@each_rule
def test_token_that_the_target_never_says_is_never_kept(rule: Rule) -> None:
    p, q = [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], [[0.6, 0.4, 0.0]]
    assert one_request(rule, p, q, [0], [0.0]) == (0, pytest.approx([0.0, 1 / 6, 5 / 6]))


@each_rule
def test_token_that_the_target_prefers_is_always_kept(rule: Rule) -> None:
    p, q = [[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4]]
    assert one_request(rule, p, q, [0], [LARGEST]) == (1, pytest.approx([0.2, 0.8]))


@each_rule
@pytest.mark.parametrize("coin", [0.0, 0.2, 0.4, LARGEST])
def test_zeros_of_the_draft_count_for_nothing(rule: Rule, coin: float) -> None:
    """Padding may name any token, several times, and the proposal itself."""
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125], [0.25] * 4])
    proposals, rows = torch.tensor([[1, 3]]), (torch.tensor([0]), torch.tensor([3]))
    plain = ([1, 3], [0.5, 0.5])
    padded = ([0, 1, 1, 3, 3, 0], [0.0, 0.0, 0.5, 0.5, 0.0, 0.0])
    without, with_padding = (
        DraftProbs(torch.tensor([[token_ids] * 2]), torch.tensor([[probs] * 2]))
        for token_ids, probs in (plain, padded)
    )
    for function, coins in ((rule.chances, ()), (rule.accept, (torch.full((1, 2), coin),))):
        expected = function(proposals, without, p, *coins, *rows)
        found = function(proposals, with_padding, p, *coins, *rows)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@each_rule
@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_a_draft_that_equals_the_target_is_always_kept(rule: Rule, uniform: float) -> None:
    p = torch.rand(16, 50, generator=torch.Generator().manual_seed(0)).softmax(1)
    rows = p.tolist()
    count, law = one_request(rule, rows, rows[:-1], list(range(15)), [uniform] * 15)
    assert count == 15
    assert law == pytest.approx(rows[-1])


@each_rule
def test_where_nothing_is_left_of_the_residual_the_target_row_stands_in(rule: Rule) -> None:
    """P and q differ by one rounding at the proposal: a refusal, and nothing above q."""
    p, q = [[0.5 - 2**-25, 0.5], [0.5, 0.5]], [[0.5, 0.5]]
    assert one_request(rule, p, q, [0], [LARGEST]) == (0, pytest.approx([0.5, 0.5]))


@each_rule
def test_a_rounding_at_the_last_proposal_costs_that_one_only(rule: Rule) -> None:
    q = [0.5, 0.5]
    p = [q, q, [0.5 - 2**-25, 0.5], q]
    assert one_request(rule, p, [q] * 3, [0, 0, 0], [LARGEST] * 3) == (2, pytest.approx(q))


@each_rule
def test_tiny_probabilities_leave_finite_laws(rule: Rule) -> None:
    tiny = 1e-30
    p = [[tiny, 1.0, 0.0], [tiny, 0.0, 1.0], [0.0, 1.0, 0.0]]
    q = [[1.0, 0.0, 0.0], [1.0, tiny, 0.0]]
    for uniforms in ([0.0, 0.0], [LARGEST, LARGEST], [0.0, LARGEST], [tiny / 2, LARGEST]):
        count, law = one_request(rule, p, q, [0, 0], uniforms)
        assert 0 <= count <= 2
        assert sum(law) == pytest.approx(1.0)


class Step(NamedTuple):
    """The arguments of a rule."""

    proposals: torch.Tensor
    draft: DraftProbs
    target_probs: torch.Tensor
    uniforms: torch.Tensor
    row_starts: torch.Tensor
    widths: torch.Tensor


def random_step(widths: list[int], block_size: int, vocab: int, support: int) -> Step:
    generator = torch.Generator().manual_seed(5)
    n = len(widths)
    shape = (n, block_size - 1)
    token_ids = torch.rand(*shape, vocab, generator=generator).topk(support).indices
    probs = torch.rand(*shape, support, generator=generator).softmax(-1)
    cells = torch.tensor(widths, dtype=torch.int64)
    return Step(
        token_ids[..., 0].where(torch.arange(1, block_size) < cells.unsqueeze(1), -1),
        DraftProbs(token_ids, probs),
        torch.rand(sum(widths), vocab, generator=generator).softmax(-1),
        torch.rand(shape, generator=generator),
        cells.cumsum(0) - cells,
        cells,
    )


@each_rule
def test_width_one_draws_from_the_targets_row(rule: Rule) -> None:
    step = random_step([1] * 5, block_size=4, vocab=12, support=3)
    acceptance = rule.accept(*step._replace(uniforms=torch.zeros(5, 3)))
    assert acceptance.num_accepted.tolist() == [0] * 5
    assert torch.equal(acceptance.last_law, step.target_probs)


@each_rule
def test_no_requests_give_an_empty_verdict(rule: Rule) -> None:
    step = random_step([], block_size=4, vocab=12, support=3)
    acceptance = rule.accept(*step)
    assert acceptance.num_accepted.shape == (0,)
    assert acceptance.num_accepted.dtype == torch.int64
    assert acceptance.last_law.shape == (0, 12)
    decided = verdict(step.proposals, acceptance.num_accepted, torch.zeros(0, dtype=torch.int64))
    assert decided.tokens.shape == (0, 4)


@each_rule
def test_a_request_does_not_depend_on_its_neighbours(rule: Rule) -> None:
    widths = [1, 4, 2, 3, 4, 1, 2]
    step = random_step(widths, block_size=4, vocab=12, support=12)
    together = rule.accept(*step)
    for i, width in enumerate(widths):
        start = int(step.row_starts[i])
        alone = rule.accept(
            step.proposals[i : i + 1],
            DraftProbs(step.draft.token_ids[i : i + 1], step.draft.probs[i : i + 1]),
            step.target_probs[start : start + width],
            step.uniforms[i : i + 1],
            torch.tensor([0]),
            torch.tensor([width]),
        )
        assert torch.equal(together.num_accepted[i : i + 1], alone.num_accepted)
        assert torch.equal(together.last_law[i : i + 1], alone.last_law)
    assert together.num_accepted.unique().numel() > 1


@each_rule
@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_greedy_requests_come_out_as_by_equality(rule: Rule, uniform: float) -> None:
    """One-hot rows and point masses, whatever the coins."""
    n, block_size, vocab = 64, 5, 7
    generator = torch.Generator().manual_seed(2)
    target_tokens = torch.randint(0, vocab, (n, block_size), generator=generator)
    noise = torch.rand(n, block_size - 1, generator=generator) < 0.3
    proposals = (target_tokens[:, :-1] + noise) % vocab
    widths = torch.randint(1, block_size + 1, (n,), generator=generator)
    one_hot = torch.nn.functional.one_hot(target_tokens, vocab).float()
    acceptance = rule.accept(
        proposals,
        DraftProbs(proposals.unsqueeze(2), torch.ones(n, block_size - 1, 1)),
        one_hot[torch.arange(block_size) < widths.unsqueeze(1)],
        torch.full((n, block_size - 1), uniform),
        widths.cumsum(0) - widths,
        widths,
    )
    expected = accept_equal(proposals, target_tokens, widths)
    assert torch.equal(acceptance.num_accepted + 1, expected.num_committed.long())
    last = torch.nn.functional.one_hot(expected.next_anchor, vocab).float()
    assert torch.equal(acceptance.last_law, last)


@each_rule
def test_arguments_are_left_as_they_were(rule: Rule) -> None:
    step = random_step([3, 1, 4], block_size=4, vocab=12, support=3)
    before = [tensor.clone() for tensor in _tensors(step)]
    rule.accept(*step)
    assert all(torch.equal(a, b) for a, b in zip(before, _tensors(step), strict=True))


def _tensors(step: Step) -> list[torch.Tensor]:
    return [t for field in step for t in (field if isinstance(field, DraftProbs) else (field,))]


class Allocations(TorchDispatchMode):
    """Records how many elements each new tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if tensor.untyped_storage()._cdata not in given:
                self.sizes.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@each_rule
def test_makes_one_law_per_request_and_nothing_else_of_that_size(rule: Rule) -> None:
    n, block_size, vocab, support = 6, 8, 4096, 4
    step = random_step([8, 8, 8, 8, 1, 5], block_size, vocab, support)
    with Allocations() as allocations:
        acceptance = rule.accept(*step)
    assert acceptance.last_law.shape == (n, vocab)
    *rest, largest = sorted(allocations.sizes)
    assert largest == n * vocab
    assert rest[-1] <= n * (block_size - 1) * support


@each_rule
def test_never_waits_for_the_device(rule: Rule) -> None:
    """On tensors without values whatever needs one raises."""
    step = random_step([8, 3, 1], block_size=8, vocab=32, support=4)
    meta = step._replace(
        draft=DraftProbs(*(tensor.to("meta") for tensor in step.draft)),
        **{
            name: getattr(step, name).to("meta")
            for name in ("proposals", "target_probs", "uniforms", "row_starts", "widths")
        },
    )
    acceptance = rule.accept(*meta)
    last = torch.empty(3, dtype=torch.int64, device="meta")
    decided = verdict(meta.proposals, acceptance.num_accepted, last)
    assert decided.tokens.is_meta
    target_tokens = torch.empty(3, 8, dtype=torch.int64, device="meta")
    assert accept_equal(meta.proposals, target_tokens, meta.widths).tokens.is_meta


@pytest.mark.parametrize("block", [False, True])
def test_a_broken_law_behind_a_refusal_changes_nothing(block: bool) -> None:
    """The first proposal is impossible, so nobody will ever be at the row behind it."""
    target_probs = torch.tensor([[0.0, 1.0, 0.0], [math.nan] * 3, [0.0, 0.0, 1.0]])
    proposals = torch.tensor([[0, 2]])
    accepted = (accept_block if block else accept_rejection)(
        proposals,
        DraftProbs(proposals.unsqueeze(2), torch.ones(1, 2, 1)),
        target_probs,
        torch.zeros(1, 2),
        torch.tensor([0]),
        torch.tensor([3]),
    )
    assert accepted.num_accepted.tolist() == [0]
    assert accepted.last_law.tolist() == [[0.0, 1.0, 0.0]]
