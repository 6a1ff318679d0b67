# SPDX-License-Identifier: Apache-2.0
"""The law of each row, against plain loops over one row at a time."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from sglang_dflash.verify.logits import (
    Cuts,
    Penalties,
    Renorms,
    add_bias,
    forbid_early_stops,
    keep_by_value,
    keep_most_likely,
    penalise,
    to_probs,
)
from sglang_dflash.verify.rows import Rows

VOCAB = 11


def penalised_row(
    logits: list[float], output: list[int], frequency: float, presence: float, repetition: float
) -> list[float]:
    """What one request's sampler sees after `output`."""
    result = []
    for token, logit in enumerate(logits):
        count = output.count(token)
        less = logit - frequency * count - presence * (count > 0)
        if count:
            less = less * repetition if less < 0 else less / repetition
        result.append(less)
    return result


@pytest.mark.parametrize("block_size", [2, 3, 8])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_row_is_penalised_for_all_tokens_before_it(
    block_size: int, ragged: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_dflash.verify.logits._CHUNK_BYTES", 5 * VOCAB * 8)
    generator = torch.Generator().manual_seed(block_size)
    n = 40
    outputs = [
        torch.randint(VOCAB, (1 + i % 6,), generator=generator).tolist() for i in range(n)
    ]  # the anchor is the last of each
    proposals = torch.randint(VOCAB, (n, block_size - 1), generator=generator)
    logits = torch.randn(n, block_size, VOCAB, generator=generator, dtype=torch.float64)
    amounts = torch.rand(3, n, 1, generator=generator, dtype=torch.float64)
    amounts[2] += 0.6
    amounts[:, ::4] = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).view(3, 1, 1)
    counts = torch.stack([torch.bincount(torch.tensor(o), minlength=VOCAB) for o in outputs])
    widths = [1 + (i * 5) % block_size if ragged else block_size for i in range(n)]
    rows = Rows.of(widths, block_size, "cpu")
    out = rows.take(logits).clone()
    penalise(out, rows, proposals, Penalties(counts * Penalties.step(amounts[0]), *amounts))
    expected = torch.tensor(
        [
            [
                penalised_row(
                    logits[i, j].tolist(),
                    outputs[i] + proposals[i, : max(0, j - late)].tolist(),
                    *amounts[:, i, 0].tolist(),
                )
                for j in range(block_size)
            ]
            for i in range(n)
        ],
        dtype=torch.float64,
    )
    error = float((out - rows.take(expected)).abs().max())
    assert (error < 1e-12) == (not late), "a row must know its own block's tokens, and no later"


def test_a_frequency_penalty_is_added_up_one_by_one() -> None:
    """As SGLang does: in float32 three times 0.3 is another number than 0.3 + 0.3 + 0.3."""
    frequency, none = torch.tensor([[0.3]]), torch.tensor([[0.0]])
    proposals = torch.full((1, 7), 4)
    out = torch.zeros(8, VOCAB)
    sums = torch.zeros(1, VOCAB)
    penalise(out, Rows.of([8], 8, "cpu"), proposals, Penalties(sums, frequency, none, none + 1))
    added = torch.zeros(1)
    for row in out:
        assert torch.equal(row[4:5], -added)
        added += frequency[0]
    assert added != 8 * frequency[0]


def test_stop_tokens_are_forbidden_up_to_the_minimum_and_no_further() -> None:
    rows = Rows.of([4, 4, 4], 4, "cpu")
    logits = torch.zeros(12, VOCAB)
    stop_bias = torch.zeros(3, VOCAB)
    stop_bias[:, [2, 5]] = -math.inf
    num_output, minimum = torch.tensor([1, 5, 9]), torch.tensor([3, 5, 100])
    forbid_early_stops(logits, rows, stop_bias, num_output, minimum)
    forbidden = torch.isinf(logits).view(3, 4, VOCAB)
    assert not forbidden[..., [t for t in range(VOCAB) if t not in (2, 5)]].any()
    # Row j of a request with m tokens decides about its token number m + j, counted from 0.
    expected = [[True, True, False, False], [False] * 4, [True] * 4]
    assert forbidden[..., 2].tolist() == forbidden[..., 5].tolist() == expected


def cut_row(probs: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """What top-k, top-p and min-p leave of one row."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, before = [0.0] * len(probs), 0.0
    for rank, token in enumerate(order):
        if rank < top_k and before <= top_p:
            kept[token] = probs[token]
        before += probs[token]
    best = max(kept)
    kept = [p if p >= best * min_p else 0.0 for p in kept]
    return [p / sum(kept) for p in kept]


def cuts_of(rows: int, *, bounded: bool) -> Cuts:
    """Limits that mix, the first row's greedy."""
    top_ks = torch.tensor([1, 3, 7, 5 if bounded else 1 << 30] * (rows // 4))
    top_ps = torch.tensor([1.0, 0.9, 0.5] * (rows // 3), dtype=torch.float64)
    min_ps = torch.tensor([0.0, 0.0, 0.0, 0.2, 0.05] * (rows // 5), dtype=torch.float64)
    return Cuts(top_ks, top_ps, min_ps, 7 if bounded else None)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_cuts_are_those_of_one_row_alone(
    bounded: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_dflash.verify.logits._CHUNK_BYTES", chunk * VOCAB * 8 * 4)
    generator = torch.Generator().manual_seed(3)
    rows = 60
    logits = 2 * torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)
    temperatures = 0.3 + torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    cuts = cuts_of(rows, bounded=bounded)
    out = logits.clone()
    to_probs(out, temperatures)
    torch.testing.assert_close(out, torch.softmax(logits / temperatures, -1))
    probs = out.clone()
    keep_most_likely(out, cuts)
    limits = zip(*(values.tolist() for values in cuts[:3]), strict=True)
    expected = [cut_row(row.tolist(), *limit) for row, limit in zip(probs, limits, strict=True)]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))


def test_only_rows_with_a_cut_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request with top-p must not make all rows of a busy step pay for a sort."""
    sort, sorted_rows = torch.Tensor.sort, []

    def counted(rows: torch.Tensor, **options: Any) -> Any:
        sorted_rows.extend(rows.tolist())
        return sort(rows, **options)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    everything = 1 << 30
    cuts = Cuts(
        torch.tensor([1, everything, 1, everything, everything, 4]),
        torch.tensor([1.0, 1.0, 0.5, 0.5, 1.0, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.0]),
        None,
    )
    probs = torch.softmax(torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)), -1)
    probs[2] = probs[2].round(decimals=1)  # its best tie
    out = probs.clone()
    keep_most_likely(out, cuts)
    assert sorted_rows == [row.tolist() for row in probs[3:]]
    assert torch.equal(out[1], probs[1])
    for row in (0, 2):
        assert out[row].tolist() == [float(token == probs[row].argmax()) for token in range(VOCAB)]


def value_kept(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Whether a token is drawn by flashinfer's joint rule: its more probable ones are few."""
    above = probs.unsqueeze(0) > probs.unsqueeze(1)  # [token, other]
    return (above.sum(1) < top_k) & ((above * probs).sum(1) < top_p)


def renorm(rows: torch.Tensor, limits: torch.Tensor, *, by_rank: bool) -> torch.Tensor:
    """What SGLang's renorm kernels do."""
    assert rows.is_contiguous()
    all_of_them = 1 << 30, 1.5
    kept = []
    for row, limit in zip(rows, limits.tolist(), strict=True):
        own = (int(limit), all_of_them[1]) if by_rank else (all_of_them[0], limit)
        kept.append(row * value_kept(row, *own))
    stacked = torch.stack(kept)
    return stacked / stacked.sum(1, keepdim=True)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("chunk", [1, 1000])
def test_cuts_by_value_keep_what_ties_and_sort_nothing(
    in_turn: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_dflash.verify.logits._CHUNK_BYTES", chunk * VOCAB * 8 * 3)
    for name in ("sort", "topk"):
        monkeypatch.setattr(torch.Tensor, name, None)
    generator = torch.Generator().manual_seed(4)
    # As coarse as bfloat16's: many tie.
    logits = torch.randn(60, VOCAB, generator=generator, dtype=torch.float64).mul(2).round() / 2
    probs = torch.softmax(logits, -1)
    cuts = cuts_of(60, bounded=False)
    renorms = Renorms(partial(renorm, by_rank=True), partial(renorm, by_rank=False))
    out = torch.cat([probs, probs], dim=1)[:, :VOCAB]  # of a padded vocabulary
    keep_by_value(out, cuts, renorms, in_turn=in_turn)
    num_tied = 0
    limits = zip(*(values.tolist() for values in cuts[:3]), strict=True)
    for row, got, (top_k, top_p, min_p) in zip(probs, out, limits, strict=True):
        if top_k == 1:
            assert got.tolist() == [float(token == row.argmax()) for token in range(VOCAB)]
            continue
        if in_turn:
            kept = row * value_kept(row, top_k, 1.5)
            kept = kept / kept.sum()
            kept = kept * value_kept(kept, 1 << 30, top_p)
            kept = kept * (kept >= kept.max() * min_p)
        else:
            kept = row * value_kept(row, top_k, top_p)
        num_tied += int((kept > 0).sum()) > top_k
        torch.testing.assert_close(got, kept / kept.sum())
    assert num_tied > 5, "else a cut by rank would do as well"


def test_a_bias_is_its_requests_own() -> None:
    rows = Rows.of([2, 1, 3], 3, "cpu")
    bias = torch.arange(3.0).unsqueeze(1).expand(3, VOCAB)
    out = torch.zeros(6, VOCAB)
    add_bias(out, rows, bias)
    assert out[:, 0].tolist() == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("widths", [[3, 3], [1, 3], [2, 1, 3, 1]])
def test_rows_take_each_requests_first(widths: list[int]) -> None:
    rows = Rows.of(widths, 3, "cpu")
    block = torch.arange(3 * len(widths)).view(-1, 3)
    taken = [block[i, j].item() for i, width in enumerate(widths) for j in range(width)]
    assert rows.take(block).tolist() == taken
    assert len(rows) == len(taken) == int(rows.starts[-1]) + widths[-1]


def test_a_row_in_which_all_is_forbidden_is_token_0() -> None:
    out = torch.tensor([[-math.inf] * 4, [0.0, -math.inf, 0.0, -math.inf]])
    to_probs(out, torch.ones(2, 1))
    assert out.tolist() == [[1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]]
