# SPDX-License-Identifier: Apache-2.0
"""The one-pass loss against torch's own, and the labels of a batch against loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from corpora import DFLASH2, HIDDEN, VOCAB, config_of, made_up_corpus, random_draft

import sglang_dflash.training.loss
from sglang_dflash.training.batches import Order, draw_batch
from sglang_dflash.training.loss import RowLabels, label_cross_entropy
from sglang_dflash.training.model import BlockDraft
from sglang_dflash.training.objective import BlockLoss
from sglang_dflash.training.settings import LoopSettings

SELECTOR_WEIGHT = 0.4


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, RowLabels, torch.Tensor]:
    """Return hidden states, head, soft labels and weights, float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((70, 8), dtype=torch.float64, generator=generator)
    head = torch.randn((31, 8), dtype=torch.float64, generator=generator)
    ids = torch.rand((70, 31), generator=generator).topk(3).indices
    probs = torch.rand((70, 3), generator=generator, dtype=torch.float64)
    tokens = torch.randint(31, (70,), generator=generator)
    labels = RowLabels(tokens, ids, probs / probs.sum(-1, keepdim=True))
    return hidden, head, labels, torch.rand(70, generator=generator, dtype=torch.float64) + 0.1


def by_torch(logits: torch.Tensor, labels: RowLabels) -> torch.Tensor:
    laws = torch.zeros_like(logits).scatter_add_(1, labels.ids, labels.probs)
    return F.cross_entropy(logits, laws, reduction="none")


@pytest.mark.parametrize("piece", [1, 2**22])
def test_losses_and_gradients_are_those_of_torch(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_dflash.training.loss, "_PIECE_LOGITS", {"cpu": piece})
    hidden, head, labels, weights = rows()
    hidden.requires_grad_()
    found = label_cross_entropy(hidden, head, labels)
    (gradient,) = torch.autograd.grad(found.losses, hidden, weights)
    logits = hidden @ head.T
    expected = by_torch(logits, labels)
    (expected_gradient,) = torch.autograd.grad(expected, hidden, weights, retain_graph=True)
    torch.testing.assert_close(found.losses, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)
    of_text = logits.log_softmax(-1)[torch.arange(70), labels.tokens].detach()
    torch.testing.assert_close(found.log_probs, of_text, rtol=1e-12, atol=0)
    assert torch.equal(found.best[:, 0], logits.argmax(-1))
    assert found.losses.requires_grad
    assert not found.log_probs.requires_grad


def test_the_likeliest_tokens_are_those_asked_for() -> None:
    hidden, head, labels, _ = rows()
    found = label_cross_entropy(hidden, head, labels, num_best=4, best_below=20)
    assert torch.equal(found.best, (hidden @ head[:20].T).topk(4).indices)


def test_a_token_twice_in_a_label_counts_twice() -> None:
    hidden, head, made_up, weights = rows()
    hidden.requires_grad_()
    ids = torch.zeros((70, 2), dtype=torch.int64)
    twice = RowLabels(made_up.tokens, ids, torch.full((70, 2), 0.5))
    once = RowLabels(made_up.tokens, ids[:, :1], torch.ones(70, 1))
    gradients = [
        torch.autograd.grad(label_cross_entropy(hidden, head, labels).losses, hidden, weights)[0]
        for labels in (twice, once)
    ]
    torch.testing.assert_close(*gradients)


def test_narrow_products_keep_the_gradient_of_nearly_certain_rows() -> None:
    """Where p is 0.999, a bfloat16 p - 1 would be 0 or twice too large."""
    head = torch.eye(8)[:4].bfloat16()
    hidden = torch.zeros(1, 8)
    hidden[0, 0] = 8.0
    hidden.requires_grad_()
    ids = torch.zeros((1, 1), dtype=torch.int64)
    found = label_cross_entropy(hidden, head, RowLabels(ids[0], ids, torch.ones(1, 1)))
    (gradient,) = torch.autograd.grad(found.losses.sum(), hidden)
    certain = 1 / (1 + 3 * math.exp(-8.0))
    assert float(found.losses.detach()) == pytest.approx(-math.log(certain), rel=1e-3)
    assert float(found.log_probs) == pytest.approx(math.log(certain), rel=1e-3)
    assert float(gradient[0, 0]) == pytest.approx(certain - 1, rel=1e-2)


class Text(NamedTuple):
    """The text's token that a row should say, and the one before it."""

    before: int
    token: int


class Row(NamedTuple):
    """A row with a label, float64 scalars: its cross-entropy, and the text's log-probability."""

    loss: torch.Tensor
    log_prob: torch.Tensor


def chosen_by_loops(
    draft: BlockDraft, hidden: torch.Tensor, logits: torch.Tensor, law: torch.Tensor, text: Text
) -> Row:
    """Return what the selector says of one row, [H] hidden and [V] logits, with a law [V]."""
    candidates = logits.topk(draft.config.selector_top_k).indices.tolist()
    is_candidate = text.token in candidates
    if not is_candidate:
        candidates[-1] = text.token
    ids = torch.tensor(candidates)
    selector = draft.candidate_selector
    assert selector is not None
    gate = selector.predecessor_codebook[text.before] * selector.hidden_projection(hidden)
    log_probs = (logits[ids] + selector.successor_codebook[ids] @ gate).log_softmax(-1)
    loss = -(law[ids] / law[ids].sum() * log_probs).sum()
    own = log_probs[candidates.index(text.token)]
    return Row(loss, own if is_candidate else own - torch.inf)


def blocks_by_loops(module: BlockLoss, batch: Any, head: torch.Tensor, share: float) -> list:
    """Return the labelled rows of each block; the text is read as a person would."""
    hidden = module.hidden_states(batch)
    blocks = []
    for text in range(len(batch.tokens)):
        for block, anchor in enumerate(batch.anchors[text].tolist()):
            own = []
            for k in range(1, batch.block_size):
                if anchor < 0 or anchor + k >= batch.lengths[text]:
                    continue
                logits = hidden[text, block, k] @ head.T
                place = Text(*batch.tokens[text, anchor + k - 1 : anchor + k + 1].tolist())
                said = batch.law_logprobs[text, anchor + k - 1].double().softmax(-1)
                law = torch.zeros(VOCAB, dtype=torch.float64)
                law[place.token] = 1 - share
                law.index_add_(0, batch.law_ids[text, anchor + k - 1].long(), share * said)
                log_probs = torch.log_softmax(logits, dim=-1)
                row = Row(-(law * log_probs).sum(), log_probs[place.token])
                if module.draft.candidate_selector is not None:
                    chosen = chosen_by_loops(
                        module.draft, hidden[text, block, k], logits, law, place
                    )
                    row = chosen._replace(loss=row.loss + SELECTOR_WEIGHT * chosen.loss)
                own.append(row)
            if own:
                blocks.append(own)
    return blocks


def decay_by_loops(blocks: list[list[Row]], decay: float) -> torch.Tensor:
    weighted = [(math.exp(-k / decay), row.loss) for own in blocks for k, row in enumerate(own)]
    return sum(w * loss for w, loss in weighted) / sum(w for w, _ in weighted)


def dpace_by_loops(blocks: list[list[Row]], alpha: float) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for own in blocks:
        smoothed = [(1 - alpha) * math.exp(row.log_prob.detach()) + alpha for row in own]
        for j, row in enumerate(own):
            credit = sum(math.prod(smoothed[: m + 1]) for m in range(j, len(own)))
            total = total + credit * row.loss
    return total / len(blocks)


@pytest.mark.parametrize("changes", [{}, DFLASH2], ids=["DFlash", "DFlash2"])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_loss_and_gradient_are_those_of_a_plain_formula(
    weights: str, share: float, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Row k learns the token k after the anchor, and weighs what it should."""
    corpus = made_up_corpus(tmp_path)
    settings = LoopSettings(
        texts_per_batch=3,
        anchors_per_text=12,
        dtype="float32",
        soft_share=share,
        position_weights=weights,  # type: ignore[arg-type]
        dpace_alpha=0.3,
        selector_weight=SELECTOR_WEIGHT,
    )
    batch = draw_batch(corpus, Order(corpus, 3, 0), 1, 4, settings)
    generator = torch.Generator().manual_seed(0)
    shape = (VOCAB, HIDDEN)
    embedding, head = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
    module = BlockLoss(random_draft(config_of(**changes)).double(), embedding, head, settings)
    result = module(batch)
    blocks = blocks_by_loops(module, batch, head, share)
    assert {len(own) for own in blocks} == {1, 2, 3}, "some blocks are cut"
    if weights == "decay":
        expected = decay_by_loops(blocks, settings.decay_of(4))
    else:
        expected = dpace_by_loops(blocks, 0.3)
    parameters = list(module.draft.parameters())
    gradients, expected_gradients = (
        torch.autograd.grad(loss, parameters) for loss in (result.loss, expected)
    )
    # Weights of `decay` and soft labels are float32.
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)
    assert bool((result.correct <= result.counted).all())
    assert int(result.counted[0]) == int((batch.anchors >= 0).sum()) == len(blocks)


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
