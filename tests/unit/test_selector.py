# SPDX-License-Identifier: Apache-2.0
"""DFlash2's selector and convolutions, against SGLang's own classes and against loops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.models import dflash as theirs

from sglang_dflash.draft.grouped_conv import GroupedConv
from sglang_dflash.draft.selector import CandidateSelector, follow

N, ROWS, K = 3, 5, 4
HIDDEN, VOCAB, RANK = 24, 40, 6
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """SGLang compiles its functions; what they mean is seen without."""
    with torch.compiler.set_stance("force_eager"):
        yield


def fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw all parameters."""
    for parameter in module.requires_grad_(False).parameters():
        parameter.normal_(0, 0.5, generator=generator)


def random_selector(dtype: torch.dtype, seed: int) -> CandidateSelector:
    selector = CandidateSelector(HIDDEN, VOCAB, RANK).to(dtype)
    fill(selector, torch.Generator().manual_seed(seed))
    return selector


def random_blocks(
    dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden [N, ROWS, H], anchors [N], candidates and their logits [N, ROWS, K]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, ROWS, HIDDEN, generator=generator, dtype=dtype)
    anchors = torch.randint(VOCAB, (N,), generator=generator)
    best = torch.randn(N, ROWS, VOCAB, generator=generator, dtype=dtype).topk(K)
    return hidden, anchors, best.indices, best.values


def their_selector(ours: CandidateSelector, dtype: torch.dtype) -> theirs.CandidateSelector:
    selector = theirs.CandidateSelector(
        hidden_size=HIDDEN, vocab_size=VOCAB, state_rank=RANK, top_k=K
    ).to(dtype)
    selector.load_state_dict(ours.state_dict())
    return selector


@each_type
@pytest.mark.parametrize("seed", range(3))
def test_lattice_is_sglangs(dtype: torch.dtype, seed: int) -> None:
    ours = random_selector(dtype, seed)
    hidden, anchors, candidates, logits = random_blocks(dtype, seed)
    expected = their_selector(ours, dtype).build_lattice(
        candidate_ids=candidates,
        unary_logits=logits,
        hidden_states=hidden,
        anchor_token_ids=anchors,
    )
    lattice = ours.lattice(hidden, anchors, candidates, logits)
    assert torch.equal(lattice.tokens, candidates)
    assert lattice.scores.dtype == torch.float32
    torch.testing.assert_close(lattice.scores, expected.float(), rtol=1e-5, atol=1e-5)


def best_path(
    selector: CandidateSelector,
    hidden: torch.Tensor,
    anchor: int,
    candidates: torch.Tensor,
    logits: torch.Tensor,
) -> list[int]:
    """Return one block's greedy path, candidate by candidate and channel by channel."""
    path, previous = [], anchor
    for j in range(ROWS):
        gate = selector.hidden_projection.weight @ hidden[j]
        scores = []
        for b, token in enumerate(candidates[j].tolist()):
            score = float(logits[j, b])
            for r in range(RANK):
                left = selector.predecessor_codebook[previous, r] * gate[r]
                score += float(left * selector.successor_codebook[token, r])
            scores.append(score)
        previous = int(candidates[j, scores.index(max(scores))])
        path.append(previous)
    return path


@pytest.mark.parametrize("seed", range(4))
def test_greedy_path_is_that_of_a_loop_and_of_sglang(seed: int) -> None:
    ours = random_selector(torch.float64, seed)
    hidden, anchors, candidates, logits = random_blocks(torch.float64, seed)
    lattice = ours.lattice(hidden, anchors, candidates, logits)
    path = follow(lattice.scores.argmax(-1))
    tokens = candidates.gather(2, path.unsqueeze(2)).squeeze(2)
    expected = [
        best_path(ours, hidden[i], int(anchors[i]), candidates[i], logits[i]) for i in range(N)
    ]
    assert tokens.tolist() == expected
    assert path.any(), "the selector should change something"
    sampled, probs = their_selector(ours, torch.float64).sample_path(
        candidate_ids=candidates,
        scores=lattice.scores,
        uniforms=torch.rand(N, ROWS, generator=torch.Generator().manual_seed(seed)),
        temperatures=torch.ones(N, 1),
        greedy_mask=torch.ones(N, dtype=torch.bool),
    )
    assert torch.equal(tokens, sampled)
    assert torch.equal(probs.argmax(-1), path)


def test_path_goes_from_column_to_column() -> None:
    """Row 0 is read after the anchor, in column 0; each next one in the column of the last."""
    steps = torch.tensor([[[2, 0, 0], [1, 1, 0], [2, 1, 0]], [[0, 1, 1], [1, 2, 2], [0, 0, 1]]])
    assert follow(steps).tolist() == [[2, 0, 2], [0, 1, 0]]


def test_a_new_selector_leaves_the_logits() -> None:
    hidden, anchors, candidates, logits = random_blocks(torch.float32, 0)
    lattice = CandidateSelector(HIDDEN, VOCAB, RANK).lattice(hidden, anchors, candidates, logits)
    assert torch.equal(lattice.scores, logits.unsqueeze(2).expand(-1, -1, K, -1))


def test_gradients_are_the_same_bits_on_several_threads() -> None:
    """Codebook rows that repeat are summed in one order, so that a run can be resumed."""
    generator = torch.Generator().manual_seed(0)
    selector = CandidateSelector(HIDDEN, VOCAB, 64)
    torch.nn.init.normal_(selector.successor_codebook, generator=generator)
    torch.nn.init.normal_(selector.predecessor_codebook, generator=generator)
    hidden = torch.randn(4000, HIDDEN, generator=generator)
    before, after = torch.randint(VOCAB, (2, 4000, 4), generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = [
            torch.autograd.grad(
                selector.pair_scores(hidden, before, after).square().sum(),
                [selector.predecessor_codebook, selector.successor_codebook],
            )
            for _ in range(10)
        ]
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def random_conv(taps: int, dtype: torch.dtype) -> GroupedConv:
    conv = GroupedConv(HIDDEN, taps, 4).to(dtype)
    fill(conv, torch.Generator().manual_seed(taps))
    return conv


def through(conv: GroupedConv, x: torch.Tensor, sublayer: torch.Tensor) -> torch.Tensor:
    """Return x [..., B, H] through both convolutions and a linear map [H, H] between them."""
    inside, moving = conv.before(x)
    return conv.after(inside @ sublayer, moving)


def random_rows(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks [N, num_rows, H] and a linear map [H, H]."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(N, num_rows, HIDDEN, generator=generator, dtype=dtype)
    return x, torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=dtype) / HIDDEN**0.5


@each_type
@pytest.mark.parametrize(("block_size", "taps"), [(8, 2), (8, 4), (5, 3), (2, 4), (1, 2)])
def test_convolution_is_sglangs(dtype: torch.dtype, block_size: int, taps: int) -> None:
    ours = random_conv(taps, dtype)
    other = theirs.DFlashGroupedConv(HIDDEN, block_size, taps, 4).to(dtype)
    other.load_state_dict(ours.state_dict())
    x, sublayer = random_rows(block_size, dtype)
    with torch.no_grad():
        inside, coefficients = other.prepare(x.flatten(0, 1))  # [N*B, H]
        expected = other.finish(inside @ sublayer, coefficients).unflatten(0, (N, block_size))
    torch.testing.assert_close(ours.before(x)[0], inside.view_as(x))
    torch.testing.assert_close(through(ours, x, sublayer), expected)


def test_a_new_convolution_is_the_identity() -> None:
    conv = GroupedConv(HIDDEN, 3, 4)
    x, _ = random_rows(8, torch.float32)
    inside, moving = conv.before(x)
    assert torch.equal(inside, x)
    assert torch.equal(conv.after(x, moving), x)


@pytest.mark.parametrize("row", [0, 2, 6])
def test_a_row_reaches_the_rows_after_it_in_its_block_only(row: int) -> None:
    taps, end = 3, 8
    conv = random_conv(taps, torch.float64)
    x, sublayer = random_rows(end, torch.float64)
    changed = x.clone()
    changed[1, row] += 1.0
    differs = (conv.before(x)[0] != conv.before(changed)[0]).any(-1)
    assert differs.nonzero().tolist() == [[1, j] for j in range(row, min(row + taps, end))]
    differs = (through(conv, x, sublayer) != through(conv, changed, sublayer)).any(-1)
    assert differs.nonzero().tolist() == [[1, j] for j in range(row, min(row + 2 * taps - 1, end))]


def test_a_block_alone_is_as_among_others() -> None:
    conv = random_conv(2, torch.float64)
    x, sublayer = random_rows(8, torch.float64)
    torch.testing.assert_close(through(conv, x[1], sublayer), through(conv, x, sublayer)[1])
