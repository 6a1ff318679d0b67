# SPDX-License-Identifier: Apache-2.0
"""The law of each row, against plain loops over one row at a time."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash.verify.logits import (
    Cuts,
    Penalties,
    forbid_early_stops,
    keep_most_likely,
    penalise,
    to_probs,
)

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
@pytest.mark.parametrize("late", [False, True])
def test_a_row_is_penalised_for_all_tokens_before_it(block_size: int, late: bool) -> None:
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
    out = logits.clone()
    penalise(out, proposals, Penalties(counts.to(torch.int32), *amounts))
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
    error = float((out - expected).abs().max())
    assert (error < 1e-12) == (not late), "a row must know its own block's tokens, and no later"


def test_stop_tokens_are_forbidden_up_to_the_minimum_and_no_further() -> None:
    logits = torch.zeros(3, 4, VOCAB)
    stop_bias = torch.zeros(3, VOCAB)
    stop_bias[:, [2, 5]] = -math.inf
    num_output, minimum = torch.tensor([1, 5, 9]), torch.tensor([3, 5, 100])
    forbid_early_stops(logits, stop_bias, num_output, minimum)
    forbidden = torch.isinf(logits)
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
    top_ks = torch.tensor([1, 3, 7, 5 if bounded else 1 << 30] * (rows // 4))
    top_ps = torch.tensor([1.0, 0.9, 0.5] * (rows // 3), dtype=torch.float64)
    min_ps = torch.tensor([0.0, 0.0, 0.0, 0.2, 0.05] * (rows // 5), dtype=torch.float64)
    out = logits.clone()
    to_probs(out, temperatures)
    torch.testing.assert_close(out, torch.softmax(logits / temperatures, -1))
    probs = out.clone()
    keep_most_likely(out, Cuts(top_ks, top_ps, min_ps, 7 if bounded else None))
    limits = zip(top_ks.tolist(), top_ps.tolist(), min_ps.tolist(), strict=True)
    expected = [cut_row(row.tolist(), *limit) for row, limit in zip(probs, limits, strict=True)]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))
