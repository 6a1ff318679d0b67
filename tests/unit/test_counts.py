# SPDX-License-Identifier: Apache-2.0
"""The counts of what requests have written, against plain lists."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from sglang_dflash.verify.counts import OutputCounts, OutputOptions

VOCAB, ROWS = 7, 5
PLAIN = OutputOptions(
    row=0, num_prompt_tokens=3, output_ids=(), frequency=0.0, presence=0.0, repetition=1.0,
    min_new_tokens=0,
)  # fmt: skip


def test_nothing_is_kept_for_requests_without_penalties() -> None:
    counts = OutputCounts(ROWS, VOCAB, "cpu")
    counts.admit([PLAIN, replace(PLAIN, row=2, min_new_tokens=4)])
    rows = torch.tensor([2, 0])
    counts.add(rows, torch.tensor([[1], [2]]), torch.tensor([1, 1]))
    assert counts.penalties(rows) is None
    assert [values.tolist() for values in counts.lengths(rows)] == [[3, 3], [4, 0]]


def test_counts_follow_requests_that_come_go_and_are_retracted() -> None:
    rng = random.Random(0)
    counts = OutputCounts(ROWS, VOCAB, "cpu")
    written: dict[int, list[int]] = {}
    frequency: dict[int, float] = {}
    for step in range(300):
        row = rng.randrange(ROWS)
        if row not in written or rng.random() < 0.1:  # a new request, or one that comes again
            output = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 9)))]
            frequency[row] = rng.choice((0.0, 0.3)) if step else 0.3
            counts.admit([replace(PLAIN, row=row, output_ids=output, frequency=frequency[row])])
            written[row] = output
        batch = rng.sample(sorted(written), k=rng.randint(1, len(written)))
        tokens = torch.tensor([[rng.randrange(VOCAB) for _ in range(4)] for _ in batch])
        committed = torch.tensor([rng.randint(1, 4) for _ in batch])
        counts.add(torch.tensor(batch), tokens, committed)
        for row, line, number in zip(batch, tokens.tolist(), committed.tolist(), strict=True):
            written[row] += line[:number]
        penalties = counts.penalties(torch.tensor(batch))
        assert penalties is not None
        assert torch.equal(
            penalties.frequency.flatten(), torch.tensor([frequency[row] for row in batch])
        )
        for row, found in zip(batch, penalties.sums, strict=True):
            if frequency[row]:
                sums = torch.zeros(VOCAB)
                for token in written[row]:
                    sums[token] += frequency[row]
                assert torch.equal(found, sums)
