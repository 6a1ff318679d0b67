# SPDX-License-Identifier: Apache-2.0
"""Which blocks a step trains on."""

from __future__ import annotations

from pathlib import Path

import torch
from corpora import made_up_corpus

from sglang_dflash.training.anchors import block_labels, draw_anchors, every_anchor
from sglang_dflash.training.batches import Order, draw_batch
from sglang_dflash.training.measure import decoding_walk
from sglang_dflash.training.settings import LoopSettings

STARTS, LENGTHS = torch.tensor([5, 3, 9]), torch.tensor([40, 7, 11])


def drawn(seed: int, num_anchors: int = 8) -> torch.Tensor:
    return draw_anchors(STARTS, LENGTHS, num_anchors, torch.Generator().manual_seed(seed))


def test_anchors_are_answer_tokens_that_another_follows() -> None:
    for seed in range(50):
        for row, start, length in zip(
            drawn(seed).tolist(), STARTS.tolist(), LENGTHS.tolist(), strict=True
        ):
            anchors = [a for a in row if a >= 0]
            assert anchors == sorted(set(anchors))
            assert start <= anchors[0]
            assert anchors[-1] <= length - 2
            assert row[len(anchors) :] == [-1] * (len(row) - len(anchors))
            assert len(anchors) == min(8, length - 1 - start)


def test_all_anchors_are_drawn_equally_often() -> None:
    counts = torch.zeros(40)
    for seed in range(600):
        counts[drawn(seed)[0]] += 1
    assert not counts[:5].any()
    assert not counts[39:].any()
    # 34 anchors, 8 of them drawn: 141 +- 10 each.
    assert float(counts[5:39].min()) > 90
    assert float(counts[5:39].max()) < 200


def test_labels_end_with_the_text() -> None:
    labels = block_labels(torch.tensor([[2, 5, -1]]), torch.tensor([8]), 4)
    assert labels.positions[0, :2].tolist() == [[3, 4, 5], [6, 7, 7]]
    assert labels.known[0].tolist() == [[True] * 3, [True, True, False], [False] * 3]


def test_a_walk_jumps_over_accepted_tokens() -> None:
    hits = torch.zeros(8, 3, dtype=torch.bool)
    hits[0, :2] = True  # commits 3 and stands at 3
    hits[3, 1:] = True  # its first proposal is wrong: commits 1
    hits[4, :3] = True  # commits 4: the end
    assert decoding_walk(hits) == (8, 3)


def test_every_text_comes_once_an_epoch_and_in_another_order_in_the_next(tmp_path: Path) -> None:
    corpus = made_up_corpus(tmp_path, num_texts=14)
    order = Order(corpus, 3, seed=1)
    assert order.batches_per_epoch == 4
    epochs = [
        [i for batch in range(4 * epoch, 4 * epoch + 4) for i in order.texts_of(batch)]
        for epoch in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == corpus.split(held_out=False)
    assert epochs[0] != epochs[1]
    assert order.texts_of(5) == Order(corpus, 3, seed=1).texts_of(5)


def test_a_batch_is_a_function_of_its_number(tmp_path: Path) -> None:
    corpus = made_up_corpus(tmp_path)
    settings = LoopSettings(texts_per_batch=3, anchors_per_text=5)
    order = Order(corpus, 3, 0)
    first, again, later = (draw_batch(corpus, order, i, 4, settings) for i in (2, 2, 2 + 300))
    assert torch.equal(first.anchors, again.anchors)
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.anchors, later.anchors)
    assert first.features.shape[1] == int(first.anchors.max())


def test_short_blocks_keep_the_rows_of_a_step(tmp_path: Path) -> None:
    corpus = made_up_corpus(tmp_path)
    settings = LoopSettings(
        texts_per_batch=3, anchors_per_text=2, short_block_size=2, short_block_share=0.5
    )
    order = Order(corpus, 3, 0)
    shapes = {
        (batch.block_size, batch.anchors.shape[1])
        for batch in (draw_batch(corpus, order, i, 4, settings) for i in range(20))
    }
    assert shapes == {(4, 2), (2, 4)}


def test_measuring_uses_every_anchor() -> None:
    assert every_anchor(3, 7).tolist() == [3, 4, 5]
