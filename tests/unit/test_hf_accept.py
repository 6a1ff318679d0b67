# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling keeps the target's law: by enumeration, and by sampling a real pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from laws import chi_squared_p_value
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.hf import HFDraft, accept, generate, spec_generate
from sglang_dflash.hf.select import walk

Residual = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
VOCAB, NUM_PROPOSALS = 3, 3
RIGHT: Residual = accept.residual
MUTANTS: dict[str, Residual] = {
    "the target itself": lambda p, q: p,
    "the absolute difference": lambda p, q: (p - q).abs() / (p - q).abs().sum(),
    "not q": lambda p, q: (1 - q) / (1 - q).sum(),
}


def markov(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a target's law by previous token, and a draft's by position.

    Returns:
        p [V+1, V], row V given the anchor; q [NUM_PROPOSALS, V].
    """
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(VOCAB + 1, VOCAB, generator=generator, dtype=torch.float64)
    q = torch.rand(NUM_PROPOSALS, VOCAB, generator=generator, dtype=torch.float64)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def law_of_a_step(
    p: torch.Tensor, q: torch.Tensor, residual: Residual, *, shift: int = 0
) -> Counter[tuple[int, ...]]:
    """Return the probability of each possible committed sequence.

    Args:
        p: [V+1, V] target law by previous token.
        q: [NUM_PROPOSALS, V] draft law by position.
        residual: The rule after a refusal.
        shift: Rows by which a wrong verifier misses the refused one.
    """
    law: Counter[tuple[int, ...]] = Counter()
    for block in product(range(VOCAB), repeat=NUM_PROPOSALS):
        rows = [p[VOCAB], *(p[token] for token in block)]
        reached = float(torch.stack([q[j, x] for j, x in enumerate(block)]).prod())
        for j, token in enumerate(block):
            kept = accept.acceptance_probability(rows[j], q[j], token)
            if kept < 1:
                refused = residual(rows[j + shift], q[j])
                for other in range(VOCAB):
                    law[*block[:j], other] += reached * (1 - kept) * float(refused[other])
            reached *= kept
        for other in range(VOCAB):
            law[*block, other] += reached * float(rows[-1][other])
    return law


def error_of(law: Counter[tuple[int, ...]], p: torch.Tensor) -> float:
    """Extend each sequence by plain decoding to NUM_PROPOSALS + 1 tokens; compare with AR."""
    worst = 0.0
    for sequence in product(range(VOCAB), repeat=NUM_PROPOSALS + 1):
        previous = (VOCAB, *sequence[:-1])
        steps = [float(p[a, b]) for a, b in zip(previous, sequence, strict=True)]
        plain = torch.tensor(steps, dtype=torch.float64)
        ours = sum(
            law[sequence[:done]] * float(plain[done:].prod())
            for done in range(1, NUM_PROPOSALS + 2)
        )
        worst = max(worst, abs(ours - float(plain.prod())))
    return worst


@pytest.mark.parametrize("seed", range(4))
def test_committed_tokens_follow_the_target_exactly(seed: int) -> None:
    p, q = markov(seed)
    law = law_of_a_step(p, q, RIGHT)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert error_of(law, p) < 1e-12


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_residual_is_seen(name: str) -> None:
    p, q = markov(0)
    assert error_of(law_of_a_step(p, q, MUTANTS[name]), p) > 1e-3


def test_the_residual_of_the_next_row_is_seen() -> None:
    p, q = markov(0)
    assert error_of(law_of_a_step(p, q, RIGHT, shift=1), p) > 1e-3


def test_a_draft_that_equals_the_target_is_always_kept() -> None:
    probs = torch.full((5, 4), 0.25)
    proposals = torch.tensor([0, 1, 2, 3])
    committed = accept.accept_sampled(proposals, probs, probs[:-1])
    assert committed[:4] == [0, 1, 2, 3]
    assert len(committed) == 5
    assert torch.equal(accept.residual(probs[0], probs[0]), probs[0])


def test_what_the_target_never_says_is_never_kept() -> None:
    target_probs = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    draft_probs = torch.tensor([[1.0, 0.0]])
    assert accept.accept_sampled(torch.tensor([0]), target_probs, draft_probs) == [1]


@pytest.mark.parametrize(
    ("proposals", "choices", "committed"),
    [([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]), ([1, 0, 3], [1, 2, 3, 4], [1, 2]),
     ([0, 2, 3], [1, 2, 3, 4], [1])],
)  # fmt: skip
def test_greedy_commits_up_to_the_first_difference(
    proposals: list[int], choices: list[int], committed: list[int]
) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor(choices), 6).float()
    assert accept.accept_greedy(torch.tensor(proposals), logits) == committed


DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "selector_rank": 4,
    "selector_top_k": 3,
    "conv_kernel_size": 2,
    "conv_group_size": 8,
}


def small_pair(kind: str) -> tuple[HFDraft, LlamaForCausalLM]:
    """Return a target over five tokens and an untrained draft that disagrees with it."""
    sizes = {
        "vocab_size": 5, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).eval()
        config = DraftConfig.from_dict(
            sizes
            | {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 1, "block_size": 3}
            | {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0]}}
            | {"model_type": "qwen3"}
            | (DFLASH2 if kind == "dflash2" else {}),
            source="test",
        )
        draft = HFDraft(config).eval()
        for weight in [*target.parameters(), *draft.parameters()]:
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, 0, 1.5 * weight.shape[1] ** -0.5)
        if draft.candidate_selector is not None:  # far from the rows' own logits
            draft.candidate_selector.predecessor_codebook.data *= 4
    return draft, target


def walk_that_forgets_the_path(
    draft: HFDraft, hidden: torch.Tensor, logits: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a path, but say that each row was drawn by its own logits."""
    proposals, _ = walk(draft, hidden, logits, *others)
    return proposals, logits.softmax(-1)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("plain", "right"), ("plain", "wrong residual"),
     ("dflash2", "right"), ("dflash2", "wrong residual"), ("dflash2", "wrong law")],
)  # fmt: skip
def test_sampled_text_follows_the_target(
    kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joint law of the first three new tokens, 125 outcomes; the mutants show the power."""
    if rule == "wrong residual":
        monkeypatch.setattr(accept, "residual", MUTANTS["the target itself"])
    if rule == "wrong law":
        monkeypatch.setattr(generate, "walk", walk_that_forgets_the_path)
    draft, target = small_pair(kind)
    prompt = torch.tensor([[0, 3, 1]])
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(5, 5, 5, dtype=torch.int64)
    for _ in range(700):
        tokens = spec_generate(
            draft, target, prompt, 3, 1.0, stop_token_ids=(), generator=generator
        ).tokens
        counts[tokens] += 1
    p_value = chi_squared_p_value(counts.flatten(), law_of_three(target, prompt).flatten())
    assert (p_value > 1e-4) if rule == "right" else (p_value < 1e-8)


@torch.no_grad()
def law_of_three(target: LlamaForCausalLM, prompt: torch.Tensor) -> torch.Tensor:
    """Return [V, V, V] float64, the law of the next three tokens."""
    texts = torch.tensor(list(product(range(5), repeat=2)))  # [25, 2]
    logits = target(torch.cat((prompt.expand(25, -1), texts), dim=1)).logits.double()
    probs = logits[:, -3:].softmax(-1).view(5, 5, 3, 5)  # by first and second token
    first = probs[0, 0, 0]
    second = probs[:, 0, 1]
    return first[:, None, None] * second[:, :, None] * probs[:, :, 2]
