# SPDX-License-Identifier: Apache-2.0
"""The one-pass loss against torch's own, and the labels of a batch against loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from corpora import HIDDEN, VOCAB, config_of, made_up_corpus, random_draft

import sglang_dflash.training.loss
from sglang_dflash.training.batches import Order, draw_batch
from sglang_dflash.training.loss import RowLabels, label_cross_entropy, position_weights
from sglang_dflash.training.objective import BlockLoss
from sglang_dflash.training.settings import LoopSettings


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, RowLabels, torch.Tensor]:
    """Return hidden states, head, soft labels and weights, float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((70, 8), dtype=torch.float64, generator=generator)
    head = torch.randn((31, 8), dtype=torch.float64, generator=generator)
    ids = torch.rand((70, 31), generator=generator).topk(3).indices
    probs = torch.rand((70, 3), generator=generator, dtype=torch.float64)
    labels = RowLabels(ids, probs / probs.sum(-1, keepdim=True))
    return hidden, head, labels, torch.rand(70, generator=generator, dtype=torch.float64) + 0.1


def by_torch(
    hidden: torch.Tensor, head: torch.Tensor, labels: RowLabels, weights: torch.Tensor
) -> torch.Tensor:
    laws = torch.zeros(len(hidden), len(head), dtype=hidden.dtype)
    laws.scatter_add_(1, labels.ids, labels.probs)
    each = F.cross_entropy(hidden @ head.T, laws, reduction="none")
    return (each * weights).sum() / weights.sum()


@pytest.mark.parametrize("piece", [1, 2**22])
def test_loss_and_gradient_are_those_of_torch(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_dflash.training.loss, "_PIECE_LOGITS", {"cpu": piece})
    hidden, head, labels, weights = rows()
    hidden.requires_grad_()
    loss, best = label_cross_entropy(hidden, head, labels, weights)
    (gradient,) = torch.autograd.grad(3 * loss, hidden)
    expected = by_torch(hidden, head, labels, weights)
    (expected_gradient,) = torch.autograd.grad(3 * expected, hidden)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)
    assert torch.equal(best, (hidden @ head.T).argmax(-1))


def test_a_token_twice_in_a_label_counts_twice() -> None:
    hidden, head, _, weights = rows()
    hidden.requires_grad_()
    ids = torch.zeros((70, 2), dtype=torch.int64)
    twice = RowLabels(ids, torch.full((70, 2), 0.5))
    once = RowLabels(ids[:, :1], torch.ones(70, 1))
    gradients = [
        torch.autograd.grad(label_cross_entropy(hidden, head, labels, weights)[0], hidden)[0]
        for labels in (twice, once)
    ]
    torch.testing.assert_close(*gradients)


def test_narrow_products_keep_the_gradient_of_nearly_certain_rows() -> None:
    """Where p is 0.999, a bfloat16 p - 1 would be 0 or twice too large."""
    head = torch.eye(8)[:4].bfloat16()
    hidden = torch.zeros(1, 8)
    hidden[0, 0] = 8.0
    hidden.requires_grad_()
    labels = RowLabels(torch.zeros((1, 1), dtype=torch.int64), torch.ones(1, 1))
    loss, _ = label_cross_entropy(hidden, head, labels, torch.ones(1))
    (gradient,) = torch.autograd.grad(loss, hidden)
    certain = 1 / (1 + 3 * math.exp(-8.0))
    assert float(loss.detach()) == pytest.approx(-math.log(certain), rel=1e-3)
    assert float(gradient[0, 0]) == pytest.approx(certain - 1, rel=1e-2)


@pytest.mark.parametrize(("block_size", "decay"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_weights_fall_as_published(block_size: int, decay: float) -> None:
    assert LoopSettings().decay_of(block_size) == decay
    weights = position_weights(block_size, decay)
    expected = [math.exp(-(k - 1) / decay) for k in range(1, block_size)]
    assert weights.tolist() == pytest.approx(expected)


def loss_by_loops(module: BlockLoss, batch: Any, head: torch.Tensor, decay: float) -> float:
    """Return the loss label by label; the text is read as a person would."""
    hidden = module.hidden_states(batch)
    total = weight_sum = 0.0
    for text in range(len(batch.tokens)):
        for block, anchor in enumerate(batch.anchors[text].tolist()):
            for k in range(1, batch.block_size):
                if anchor < 0 or anchor + k >= batch.lengths[text]:
                    continue
                token = int(batch.tokens[text, anchor + k])
                law = torch.log_softmax(hidden[text, block, k] @ head.T, dim=-1)
                weight = math.exp(-(k - 1) / decay)
                total -= weight * float(law[token])
                weight_sum += weight
    return total / weight_sum


def test_row_k_learns_the_token_k_after_the_anchor(tmp_path: Path) -> None:
    corpus = made_up_corpus(tmp_path)
    settings = LoopSettings(texts_per_batch=3, anchors_per_text=5, dtype="float32")
    batch = draw_batch(corpus, Order(corpus, 3, 0), 1, 4, settings)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn((VOCAB, HIDDEN), generator=generator)
    head = torch.randn((VOCAB, HIDDEN), generator=generator)
    module = BlockLoss(random_draft(config_of()), embedding, head, settings)
    with torch.no_grad():
        result = module(batch)
        expected = loss_by_loops(module, batch, head, settings.decay_of(4))
    assert float(result.loss) == pytest.approx(expected, rel=1e-5)
    assert bool((result.correct <= result.counted).all())
    assert int(result.counted[0]) == int((batch.anchors >= 0).sum())


def test_softmax_over_seen_tokens_is_that_of_a_smaller_head(tmp_path: Path) -> None:
    corpus = made_up_corpus(tmp_path)
    settings = LoopSettings(texts_per_batch=3, anchors_per_text=5, dtype="float32", soft_share=0.5)
    batch = draw_batch(corpus, Order(corpus, 3, 0), 0, 4, settings)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn((VOCAB, HIDDEN), generator=generator)
    head = torch.randn((VOCAB, HIDDEN), generator=generator)
    draft = random_draft(config_of())
    everything = torch.arange(VOCAB)
    seen = corpus.vocabulary(corpus.split(held_out=False))
    assert len(seen) < VOCAB
    unsampled = batch._replace(uniforms=torch.empty(0))
    with torch.no_grad():
        whole, same = (
            BlockLoss(draft, embedding, head, settings, vocabulary)(batch)
            for vocabulary in (None, everything)
        )
        module = BlockLoss(draft, embedding, head, settings, seen)
        fewer, sampled = module(unsampled), module(batch)
        number = VOCAB - len(seen)
        each_once = module(batch._replace(uniforms=(torch.arange(number) + 0.5) / number))
    assert float(same.loss) == pytest.approx(float(whole.loss), rel=1e-6)
    assert float(fewer.loss) < 0.99 * float(whole.loss)
    # Soft labels on unseen tokens are left out, so that these need not be equal.
    assert float(each_once.loss) == pytest.approx(float(whole.loss), rel=0.1)
    assert float(sampled.loss) == pytest.approx(float(each_once.loss), rel=0.02)


def test_soft_labels_are_what_the_target_said_one_token_before(tmp_path: Path) -> None:
    corpus = made_up_corpus(tmp_path)
    settings = LoopSettings(texts_per_batch=3, dtype="float32", soft_share=0.75)
    batch = draw_batch(corpus, Order(corpus, 3, 0), 0, 4, settings)
    module = BlockLoss(
        random_draft(config_of()), torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN), settings
    )
    text, position = torch.tensor([1]), torch.tensor([9])
    token = batch.tokens[1, 9]
    labels = module._labels(batch, text, position, token[None])
    said = batch.law_logprobs[1, 8].softmax(-1)
    for i, number in enumerate(batch.law_ids[1, 8].tolist()):
        expected = 0.75 * float(said[i]) + 0.25 * (number == int(token))
        assert float(labels.probs[0, labels.ids[0] == number].sum()) == pytest.approx(expected)
    assert float(labels.probs.sum()) == pytest.approx(1.0)
