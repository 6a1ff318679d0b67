# SPDX-License-Identifier: Apache-2.0
"""Acceptance on given texts, as a decoder would see it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_dflash.draft.path import proposer_of
from sglang_dflash.draft.proposer import VocabularyHead
from sglang_dflash.training.anchors import block_labels, every_anchor
from sglang_dflash.training.batches import collate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_dflash.training.captured import Text
    from sglang_dflash.training.objective import BlockLoss
    from sglang_dflash.training.shards import Corpus

__all__ = ["Acceptance", "decoding_walk", "measure"]

_ANCHORS_AT_ONCE = 64


@dataclass(frozen=True)
class Acceptance:
    """Figures of some texts.

    Attributes:
        tau: Acceptance length over greedy answers (all answers where none is greedy): tokens per
            step of a decoder that walks these texts with this draft.
        tau_sampled: The same over sampled answers, proposals being the draft's most likely
            tokens; 0.0 where there are none.
        tau_by_kind: The same over all answers to prompts from one source.
        accuracy: Share of right most likely tokens by position 1..B-1, over all anchors.
    """

    tau: float
    tau_sampled: float
    tau_by_kind: dict[str, float]
    accuracy: list[float]


@torch.no_grad()
def measure(
    loss: BlockLoss, head: torch.Tensor, corpus: Corpus, numbers: Sequence[int], block_size: int
) -> Acceptance:
    """Return the draft's acceptance on some texts, over the whole vocabulary.

    Args:
        loss: With the draft.
        head: [V, H], the target's.
        corpus: The texts.
        numbers: Which.
        block_size: B.
    """
    walks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    correct = torch.zeros(block_size - 1, dtype=torch.int64)
    counted = torch.zeros_like(correct)
    for number in numbers:
        info, text = corpus.infos[number], corpus.read(number)
        hits, known = _hits(loss, head, text, block_size)
        correct += hits.sum(0)
        counted += known.sum(0)
        walk = decoding_walk(hits)
        for group in ("sampled" if info.temperature > 0 else "greedy", f"kind {info.kind}"):
            walks[group].append(walk)
    by_group = {group: _tau(found) for group, found in walks.items()}
    return Acceptance(
        by_group.get("greedy", by_group.get("sampled", 0.0)),
        by_group.get("sampled", 0.0),
        {g.removeprefix("kind "): t for g, t in sorted(by_group.items()) if g.startswith("kind ")},
        (correct / counted.clamp(min=1)).tolist(),
    )


def decoding_walk(hits: torch.Tensor) -> tuple[int, int]:
    """Return tokens committed and steps taken by a decoder that walks a text.

    It stands at an anchor, keeps the right proposals up to the first wrong one, and goes on at
    the token after them.

    Args:
        hits: [A, B-1] bool, right proposals at each successive anchor of a text; False beyond it.
    """
    leading = hits.long().cumprod(dim=1).sum(dim=1).tolist()
    place = steps = 0
    while place < len(leading):
        place += leading[place] + 1
        steps += 1
    # The last block cannot commit more than the text has.
    return len(leading), steps


def _tau(walks: list[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in walks) / sum(steps for _, steps in walks)


def _hits(
    loss: BlockLoss, head: torch.Tensor, text: Text, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right proposals and labelled rows, [A, B-1] bool each, at all anchors of a text."""
    vocabulary = VocabularyHead(lambda rows: rows.to(head.dtype) @ head.T, len(head))
    proposer = proposer_of(loss.draft.candidate_selector, vocabulary, loss.draft.config)
    hits, knowns = [], []
    for anchors in every_anchor(text.start, len(text.tokens)).split(_ANCHORS_AT_ONCE):
        batch = collate([text], anchors[None], block_size).to(head.device)
        hidden = loss.hidden_states(batch)[0]  # [A, B, H]
        places, known = block_labels(batch.anchors, batch.lengths, block_size)
        tokens = batch.tokens[0][places[0]]
        own = batch.tokens[0][batch.anchors[0]]  # [A]
        parts = zip(hidden.split(8), own.split(8), anchors[:, None].split(8), strict=True)
        best = torch.cat([proposer.propose(x, a, None, at).tokens for x, a, at in parts])
        hits.append(((best == tokens) & known[0]).cpu())
        knowns.append(known[0].cpu())
    return torch.cat(hits), torch.cat(knowns)
