# SPDX-License-Identifier: Apache-2.0
"""The rows of the target's output head that are in a token map."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch.nn import functional

from sglang_dflash.cpu.linear import PackedEmbeddingMethod, PackedWeight, packed_linear

__all__ = ["HotHead", "note_weight_update"]

_updates = [0]  # of weights since the start


def note_weight_update() -> None:
    """Say that a model's weights were written: SGLang does so where no version counts it."""
    _updates[0] += 1


class HotHead:
    """This rank's rows of the output head that are in a token map, as a weight of their own.

    Every rank has as many rows, so that their best tokens can be gathered; those that fill a rank
    up have a logit of minus infinity.

    Attributes:
        token_ids: [k] int64, the vocabulary id of each row.
    """

    def __init__(self, head: VocabParallelEmbedding, token_map: torch.Tensor, tp_size: int) -> None:
        """Cut the rows out.

        Args:
            head: the target's output head; `can_cut` holds.
            token_map: [K] int64, rising.
            tp_size: ranks that the head is split over.
        """
        self._head, weight = head, head.weight
        first = head.shard_indices.org_vocab_start_index
        owners = token_map // head.num_embeddings_per_partition
        counts = owners.bincount(minlength=tp_size)
        own = token_map[owners == first // head.num_embeddings_per_partition]
        missing = int(counts.max()) - len(own)
        self.token_ids = torch.cat([own, own.new_full((missing,), first)]).to(weight.device)
        self._rows = self.token_ids - first
        self._bias: torch.Tensor | None = None
        if missing:
            self._bias = torch.zeros(len(self.token_ids), dtype=weight.dtype, device=weight.device)
            self._bias[len(own) :] = float("-inf")
        self._product, self._version = self._cut()

    @staticmethod
    def can_cut(head: VocabParallelEmbedding) -> bool:
        """Whether the head's rows can be taken one by one: a quantised one's cannot."""
        return isinstance(head.quant_method, UnquantizedEmbeddingMethod)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [R, k] logits of hidden rows [R, H]."""
        if self._version != _updates[0]:
            self._product, self._version = self._cut()
        return self._product(rows.to(self._head.weight.dtype))

    def _cut(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
        weight = self._head.weight.detach()[self._rows]
        version = _updates[0]
        if isinstance(self._head.quant_method, PackedEmbeddingMethod):
            packed = PackedWeight(weight)
            return lambda rows: packed_linear(rows, packed.tensor, self._bias), version
        return lambda rows: functional.linear(rows, weight, self._bias), version
