# SPDX-License-Identifier: Apache-2.0
"""Does a sample follow a law? A chi-squared test, small targets, and wrong rules to be caught."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from sglang_dflash.verify.accept import (
    Acceptance,
    Chances,
    DraftProbs,
    accept_block,
    accept_rejection,
    block_chances,
    last_law,
    rejection_chances,
)

__all__ = [
    "BLOCK",
    "MUTANTS",
    "REJECTION",
    "Rule",
    "SmallTarget",
    "Tree",
    "assert_follows",
    "chi_squared_p_value",
    "grow",
    "point_mass",
    "two_sample_p_value",
]

_SMALLEST_BIN = 5.0  # expected counts below this are merged


def chi_squared_p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Return how probable counts at least this far from a law are.

    Args:
        counts: [bins] int64, how often each outcome came.
        law: [bins] float64, its probabilities; sums to 1.
    """
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    counts, law = counts[law > 0].double(), law[law > 0].double()
    expected = law * counts.sum()
    order = expected.argsort(descending=True)
    expected, counts = expected[order], counts[order]
    num_large = int((expected >= _SMALLEST_BIN).sum())
    bins = [(counts[i], expected[i]) for i in range(num_large)]
    if num_large < len(expected):
        rest = (counts[num_large:].sum(), expected[num_large:].sum())
        if rest[1] < _SMALLEST_BIN and bins:  # too small even together
            last = bins.pop()
            rest = (rest[0] + last[0], rest[1] + last[1])
        bins.append(rest)
    statistic = sum(float((c - e) ** 2 / e) for c, e in bins)
    degrees = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    assert degrees > 0, "the law has one bin: nothing to test"
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, half))


def assert_follows(counts: torch.Tensor, law: torch.Tensor, alpha: float = 1e-8) -> None:
    """Fail where counts are too far from a law to have come from it.

    Args:
        counts: [bins] int64, how often each outcome came.
        law: [bins] float64, its probabilities; sums to 1.
        alpha: How often a right rule may fail.
    """
    p_value = chi_squared_p_value(counts, law)
    assert p_value >= alpha, f"p = {p_value:.3g} for {int(counts.sum())} samples"


@dataclass(frozen=True)
class SmallTarget:
    """A target in plain Python whose next law depends on the last token, and on all by penalties.

    Attributes:
        logits: Row v: logits after token v. The last row: after the prompt, an empty text.
        frequency: Subtracted once for each time a token was said.
        presence: Subtracted once for each token that was said.
        repetition: Logits of tokens that were said are divided by it, multiplied where negative.
        late: How many of the last tokens the penalties overlook. Right: 0.
        temperature: Divides the logits.
        top_k: How many tokens stay possible; 0 for all.
        top_p: The likeliest tokens stay, up to the one that reaches this sum.
        min_p: Tokens stay whose probability is at least this part of the largest.
    """

    logits: Sequence[Sequence[float]]
    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    late: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def law_after(self, text: tuple[int, ...]) -> list[float]:
        """Return the law of the token after a text."""
        logits = list(self.logits[text[-1] if text else -1])
        counted = text[: len(text) - self.late] if len(text) > self.late else ()
        for token in set(counted):
            logit = logits[token]
            logit = logit / self.repetition if logit > 0 else logit * self.repetition
            logits[token] = logit - self.frequency * counted.count(token) - self.presence
        weights = [math.exp(logit / self.temperature) for logit in logits]
        probs = [weight / sum(weights) for weight in weights]
        kept = self._kept(probs)
        total = sum(probs[token] for token in kept)
        return [p / total if token in kept else 0.0 for token, p in enumerate(probs)]

    def _kept(self, probs: list[float]) -> set[int]:
        """Return the tokens that top-k, top-p and min-p leave."""
        order = sorted(range(len(probs)), key=lambda token: -probs[token])
        kept, reached = set(), 0.0
        for token in order[: self.top_k or None]:
            if reached >= self.top_p or probs[token] < self.min_p * probs[order[0]]:
                break
            kept.add(token)
            reached += probs[token]
        return kept


class Tree(NamedTuple):
    """The laws after all texts up to a depth; text () is node 0.

    Attributes:
        probs: [nodes, V] float64.
        depth: Tokens of the longest texts that have a row.
    """

    probs: torch.Tensor
    depth: int

    def child(self, nodes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the nodes of [...] texts with [...] tokens appended."""
        return nodes * self.probs.shape[1] + 1 + tokens

    def along(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [n, T+1, V], the laws before, between and after tokens [n, T]."""
        nodes = [torch.zeros(len(tokens), dtype=torch.int64)]
        for column in tokens.unbind(1):
            nodes.append(self.child(nodes[-1], column))
        return self.probs[torch.stack(nodes, dim=1)]

    def law_of_texts(self, nodes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return [V ** (depth+1)], the law of texts that plain decoding makes of begun ones.

        Args:
            nodes: [N] int64, the begun texts; 1 to depth+1 tokens, or 0 for none.
            weights: [N] float64, their probabilities.
        """
        num_nodes, vocab = self.probs.shape
        mass = torch.zeros(num_nodes * vocab + 1, dtype=torch.float64)
        mass.index_add_(0, nodes, weights)
        for node in range(num_nodes):
            mass[node * vocab + 1 : (node + 1) * vocab + 1] += mass[node] * self.probs[node]
        return mass[-(vocab ** (self.depth + 1)) :]


def grow(law_after: Callable[[tuple[int, ...]], list[float]], vocab: int, depth: int) -> Tree:
    """Return the laws after all texts of up to `depth` tokens."""
    texts = (text for t in range(depth + 1) for text in product(range(vocab), repeat=t))
    return Tree(torch.tensor([law_after(text) for text in texts], dtype=torch.float64), depth)


class Rule(NamedTuple):
    """A way to accept: the coins, and what follows from them."""

    chances: Callable[..., Chances]
    accept: Callable[..., Acceptance]


REJECTION = Rule(rejection_chances, accept_rejection)
BLOCK = Rule(block_chances, accept_block)


def point_mass(proposals: torch.Tensor) -> DraftProbs:
    """Return q of proposals [n, B-1] that were not drawn."""
    token_ids = proposals.clamp(min=0).unsqueeze(2)
    return DraftProbs(token_ids, torch.ones_like(token_ids, dtype=torch.float64))


def _ratio_forgotten(rule: Rule) -> Rule:
    """Keep with p instead of p/q."""

    def chances(proposals: torch.Tensor, draft: DraftProbs, *rows: torch.Tensor) -> Chances:
        return rule.chances(proposals, point_mass(proposals), *rows)

    def accept(
        proposals: torch.Tensor,
        draft: DraftProbs,
        target_probs: torch.Tensor,
        uniforms: torch.Tensor,
        *rows: torch.Tensor,
    ) -> Acceptance:
        kept = rule.accept(proposals, point_mass(proposals), target_probs, uniforms, *rows)
        scale = rule.chances(proposals, draft, target_probs, *rows).scale
        law = last_law(kept.num_accepted, scale, draft, target_probs, *rows)
        return kept._replace(last_law=law)

    return Rule(chances, accept)


def _not_subtracted(rule: Rule) -> Rule:
    """Draw the token after a refusal from p."""

    def accept(
        proposals: torch.Tensor,
        draft: DraftProbs,
        target_probs: torch.Tensor,
        uniforms: torch.Tensor,
        row_starts: torch.Tensor,
        widths: torch.Tensor,
    ) -> Acceptance:
        kept = rule.accept(proposals, draft, target_probs, uniforms, row_starts, widths)
        return kept._replace(last_law=target_probs[row_starts + kept.num_accepted])

    return rule._replace(accept=accept)


def _wrong_row(shift: int) -> Callable[[Rule], Rule]:
    """Subtract from the target's law of another row."""

    def mutate(rule: Rule) -> Rule:
        def accept(
            proposals: torch.Tensor,
            draft: DraftProbs,
            target_probs: torch.Tensor,
            uniforms: torch.Tensor,
            row_starts: torch.Tensor,
            widths: torch.Tensor,
        ) -> Acceptance:
            rows = (row_starts, widths)
            count = rule.accept(proposals, draft, target_probs, uniforms, *rows).num_accepted
            scale = rule.chances(proposals, draft, target_probs, *rows).scale
            wrong = (count + shift).clamp(min=0).where(count < widths - 1, count)
            law = last_law(count, scale, draft, target_probs, row_starts + wrong - count, widths)
            return Acceptance(count, law)

        return rule._replace(accept=accept)

    return mutate


MUTANTS: dict[str, Callable[[Rule], Rule]] = {
    "p/q forgotten": _ratio_forgotten,
    "residual not subtracted": _not_subtracted,
    "residual of the next row": _wrong_row(1),
    "residual of the row before": _wrong_row(-1),
}


def two_sample_p_value(first: list[int], second: list[int]) -> float:
    """Return how probable two samples at least this far apart are, had they one law.

    Args:
        first: how often each outcome came.
        second: the same outcomes in another sample.
    """
    counts = torch.tensor([first, second], dtype=torch.float64)
    totals = counts.sum(dim=1, keepdim=True)
    law = counts.sum(dim=0) / counts.sum()
    large = (law * totals).amin(dim=0) >= _SMALLEST_BIN
    merged = torch.cat([counts[:, large], counts[:, ~large].sum(dim=1, keepdim=True)], dim=1)
    merged = merged[:, merged.sum(dim=0) > 0]
    expected = merged.sum(dim=0) / merged.sum() * totals
    statistic = ((merged - expected) ** 2 / expected).sum()
    degrees = torch.tensor(float(merged.shape[1] - 1), dtype=torch.float64)
    assert degrees > 0, "one bin: nothing to test"
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))
