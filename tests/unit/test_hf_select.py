# SPDX-License-Identifier: Apache-2.0
"""A DFlash2 draft's proposals: the reference's loop, the served lattice, and the law of a draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from laws import chi_squared_p_value

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.selector import Lattice, follow
from sglang_dflash.hf import HFDraft
from sglang_dflash.hf.select import successors, walk

ROWS, VOCAB, K, ANCHOR = 5, 30, 4, 7


class Rows(NamedTuple):
    """A draft and what it gave for one block: hidden [ROWS, H], logits [ROWS, V]."""

    draft: HFDraft
    hidden: torch.Tensor
    logits: torch.Tensor


def random_rows(seed: int, **changes: Any) -> Rows:
    config = DraftConfig.from_dict(
        {
            "architectures": ["DFlash2DraftModel"], "hidden_size": 16, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "vocab_size": VOCAB, "selector_rank": 6, "selector_top_k": K,
            "model_type": "qwen3",
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]},
        }
        | changes,
        source="test",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    draft = HFDraft(config).requires_grad_(False)
    for parameter in draft.parameters():
        parameter.normal_(0, 0.6, generator=generator)
    hidden = torch.randn(ROWS, 16, generator=generator)
    return Rows(draft, hidden, torch.randn(ROWS, VOCAB, generator=generator))


def lattice_of(rows: Rows) -> Lattice:
    """Return the served form's lattice of one block, where logits are not changed."""
    own, tokens = rows.logits.topk(K)
    selector = rows.draft.candidate_selector
    assert selector is not None
    return selector.lattice(rows.hidden[None], torch.tensor([ANCHOR]), tokens[None], own[None])


@pytest.mark.parametrize("seed", range(5))
def test_greedy_walk_is_the_lattices_best_path(seed: int) -> None:
    rows = random_rows(seed)
    proposals, probs = walk(*rows, ANCHOR, 0.0)
    lattice = lattice_of(rows)
    path = follow(lattice.scores.argmax(-1))
    assert torch.equal(proposals, lattice.tokens.gather(2, path.unsqueeze(2))[0, :, 0])
    assert probs is None
    assert not torch.equal(proposals, rows.logits.argmax(-1)), "the selector changes something"
    cold, _ = walk(*rows, ANCHOR, 1e-4, torch.Generator().manual_seed(0))
    assert torch.equal(cold, proposals)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_drawn_walk_has_the_laws_along_its_path(temperature: float) -> None:
    rows = random_rows(0)
    lattice = lattice_of(rows)
    generator = torch.Generator().manual_seed(1)
    walks = set()
    for _ in range(20):
        proposals, probs = walk(*rows, ANCHOR, temperature, generator)
        assert probs is not None
        before = 0
        for j, token in enumerate(proposals.tolist()):
            expected = torch.zeros(VOCAB)
            law = torch.softmax(lattice.scores[0, j, before] / temperature, -1)
            expected[lattice.tokens[0, j]] = law
            torch.testing.assert_close(probs[j], expected)
            before = lattice.tokens[0, j].tolist().index(token)
        walks.add(tuple(proposals.tolist()))
    assert len(walks) > 5


def test_drawn_walk_follows_its_law() -> None:
    """The joint law of two proposals: the second's row hangs on the first."""
    draft, hidden, logits = random_rows(2)
    first = successors(draft, hidden[0], logits[0], ANCHOR)
    law = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for token, p in zip(first.tokens.tolist(), first.scores.double().softmax(-1), strict=True):
        second = successors(draft, hidden[1], logits[1], token)
        law[token, second.tokens] = p * second.scores.double().softmax(-1)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    generator = torch.Generator().manual_seed(3)
    for _ in range(1500):
        proposals, _ = walk(draft, hidden[:2], logits[:2], ANCHOR, 1.0, generator)
        counts[tuple(proposals.tolist())] += 1
    assert chi_squared_p_value(counts.flatten(), law.flatten()) > 1e-4
    independent = law.sum(1, keepdim=True) * law.sum(0)
    assert chi_squared_p_value(counts.flatten(), independent.flatten()) < 1e-8


def test_candidates_logits_are_scaled_then_capped() -> None:
    rows = random_rows(4, output_multiplier=2.0, final_logit_softcapping=1.5)
    own, tokens = rows.logits[0].topk(K)
    changed = [1.5 * torch.tanh(torch.tensor(2.0 * x / 1.5)) for x in own.tolist()]
    plain = random_rows(4)
    got = successors(rows.draft, rows.hidden[0], rows.logits[0], ANCHOR)
    kept = successors(plain.draft, plain.hidden[0], plain.logits[0], ANCHOR)
    assert torch.equal(got.tokens, tokens)
    torch.testing.assert_close(got.scores - kept.scores, torch.stack(changed) - own)


def test_all_candidates_are_the_rows_best() -> None:
    draft, hidden, logits = random_rows(5)
    whole = HFDraft(replace(draft.config, selector_top_k=VOCAB)).requires_grad_(False)
    whole.load_state_dict(draft.state_dict())
    few = successors(draft, hidden[0], logits[0], ANCHOR)
    every = successors(whole, hidden[0], logits[0], ANCHOR)
    assert sorted(every.tokens.tolist()) == list(range(VOCAB))
    torch.testing.assert_close(every.scores[:K], few.scores)
