# SPDX-License-Identifier: Apache-2.0
"""Which texts and blocks a step trains on: a function of its number, so that resuming is exact."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_dflash.training.anchors import draw_anchors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_dflash.training.captured import Text
    from sglang_dflash.training.settings import LoopSettings
    from sglang_dflash.training.shards import Corpus

__all__ = ["Batch", "Order", "collate", "draw_batch"]

_SORTED_BATCHES = (
    16  # batches whose texts are sorted by length together: random enough, little padding
)


class Batch(NamedTuple):
    """Some texts and blocks of them.

    Attributes:
        tokens: [n, T] int64, padded with 0.
        lengths: [n] int64.
        anchors: [n, A] int64, rising, padded with -1.
        features: [n, C, K*H] bfloat16, C the last anchor's position.
        law_ids: [n, T, k] int64.
        law_logprobs: [n, T, k] float32.
        block_size: B of these blocks.
        uniforms: [S] float32 in [0, 1), by which the loss picks unseen tokens; [0] picks none.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    anchors: torch.Tensor
    features: torch.Tensor
    law_ids: torch.Tensor
    law_logprobs: torch.Tensor
    block_size: int
    uniforms: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        tensors = {k: v.to(device) for k, v in self._asdict().items() if k != "block_size"}
        return Batch(block_size=self.block_size, **tensors)


class Order:
    """Texts of each batch: all of them once an epoch, in random batches of like lengths."""

    def __init__(self, corpus: Corpus, batch_size: int, seed: int) -> None:
        self._numbers = corpus.split(held_out=False)
        self._lengths = [corpus.infos[i].length for i in self._numbers]
        self._batch_size = min(batch_size, len(self._numbers))
        self._seed = seed
        self._epoch = lru_cache(maxsize=1)(self._batches_of)

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches that the texts fill."""
        return len(self._numbers) // self._batch_size

    def texts_of(self, batch: int) -> list[int]:
        """Return the numbers of a batch's texts."""
        epoch, place = divmod(batch, self.batches_per_epoch)
        return self._epoch(epoch)[place]

    def _batches_of(self, epoch: int) -> list[list[int]]:
        generator = _generator(self._seed, "order", epoch)
        mixed = torch.randperm(len(self._numbers), generator=generator).tolist()
        size, pool = self._batch_size, self._batch_size * _SORTED_BATCHES
        batches = []
        for first in range(0, len(mixed), pool):
            part = sorted(mixed[first : first + pool], key=lambda i: self._lengths[i])
            batches += [part[i : i + size] for i in range(0, len(part) - size + 1, size)]
        mixed_again = torch.randperm(len(batches), generator=generator).tolist()
        return [[self._numbers[i] for i in batches[place]] for place in mixed_again]


def draw_batch(
    corpus: Corpus, order: Order, number: int, block_size: int, settings: LoopSettings
) -> Batch:
    """Return a batch by its number, its anchors drawn anew each epoch.

    Args:
        corpus: The texts.
        order: Which of them.
        number: Of the batch, over all steps and ranks.
        block_size: The draft's B; a share of the batches has short blocks instead.
        settings: How many blocks, and how short.
    """
    generator = _generator(settings.seed, "anchors", number)
    num_anchors = settings.anchors_per_text
    if float(torch.rand((), generator=generator)) < settings.short_block_share:
        # As many rows as the whole blocks have.
        num_anchors = num_anchors * block_size // settings.short_block_size
        block_size = settings.short_block_size
    texts = [corpus.read(i) for i in order.texts_of(number)]
    starts = torch.tensor([text.start for text in texts])
    lengths = torch.tensor([len(text.tokens) for text in texts])
    anchors = draw_anchors(starts, lengths, num_anchors, generator)
    uniforms = torch.rand(settings.unseen_samples, generator=generator)
    return collate(texts, anchors, block_size)._replace(uniforms=uniforms)


def collate(texts: Sequence[Text], anchors: torch.Tensor, block_size: int) -> Batch:
    """Return texts side by side, as far as their blocks need them.

    Args:
        texts: n of them.
        anchors: [n, A] int64, rising, padded with -1.
        block_size: B.
    """
    lengths = torch.tensor([len(text.tokens) for text in texts])
    longest, context_len = int(lengths.max()), int(anchors.max())
    first = texts[0]
    shape = (len(texts), longest)
    tokens = torch.zeros(shape, dtype=torch.int64)
    features = first.features.new_zeros((len(texts), context_len, first.features.shape[1]))
    law_ids = torch.zeros((*shape, first.law_ids.shape[1]), dtype=torch.int64)
    law_logprobs = torch.zeros((*shape, first.law_ids.shape[1]))
    for row, text in enumerate(texts):
        length = len(text.tokens)
        tokens[row, :length] = text.tokens
        features[row, :length] = text.features[:context_len]
        law_ids[row, :length] = text.law_ids
        law_logprobs[row, :length] = text.law_logprobs
    none = torch.empty(0)
    return Batch(tokens, lengths, anchors, features, law_ids, law_logprobs, block_size, none)


def _generator(seed: int, purpose: str, number: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
