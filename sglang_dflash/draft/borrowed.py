# SPDX-License-Identifier: Apache-2.0
"""A draft's copies of the embedding and the output head that it borrows from its target.

Some trainers save them. Nothing is lost where they equal the target's; where they differ the draft
was trained with parts of its own, and runs without them.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open

from sglang_dflash.draft.weights import BORROWED, canonical_weight_name, weight_files
from sglang_dflash.errors import DRAFT_OPTION, UnsupportedCheckpoint

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BorrowedCopies"]

logger = logging.getLogger(__name__)

_CHUNK_ROWS = 4096  # read and compared at a time, so that no second copy is ever held
_DENSE = (torch.float16, torch.bfloat16, torch.float32)


class _Shard(NamedTuple):
    """Rows of a weight that a rank has."""

    weight: torch.Tensor  # [num_rows and padding, H]
    first_row: int
    num_rows: int


class BorrowedCopies:
    """What of its target's a draft's folder holds again."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._places: dict[str, tuple[Path, str]] = {}
        for file in weight_files(folder):
            with safe_open(file, "pt") as stored:
                names = {canonical_weight_name(name): name for name in stored.keys()}  # noqa: SIM118
            self._places |= {c: (file, names[c]) for c in BORROWED if c in names}
        self._equal: weakref.ref[nn.Module] | None = None

    def check(self, embedding: nn.Module, head: nn.Module) -> None:
        """Refuse copies that differ from the target's weights.

        Args:
            embedding: The target's, or this rank's shard of it as SGLang splits it; `weight` is
                [V, H].
            head: Its output head, likewise.

        Raises:
            UnsupportedCheckpoint: a copy has other numbers, or other rows.
        """
        if self._equal is not None and self._equal() is embedding:
            return
        for name, module in zip(BORROWED, (embedding, head), strict=True):
            if name in self._places:
                self._check(name, module)
        self._equal = weakref.ref(embedding)

    def _check(self, name: str, module: nn.Module) -> None:
        shard = _shard_of(module)
        if shard is None:
            logger.warning(
                "%s %s: its %s cannot be compared with the target's, which is quantised; the "
                "target's is used",
                DRAFT_OPTION, self._folder, name,
            )  # fmt: skip
            return
        file, stored_name = self._places[name]
        with safe_open(file, "pt") as stored:
            rows = stored.get_slice(stored_name)
            shape = rows.get_shape()
            own = [shard.first_row + shard.num_rows, shard.weight.shape[1]]
            is_equal = shape[1] == own[1] and shape[0] >= own[0]
            for start in range(0, shard.num_rows, _CHUNK_ROWS):
                if not is_equal:
                    break
                end = min(start + _CHUNK_ROWS, shard.num_rows)
                copy = rows[shard.first_row + start : shard.first_row + end]
                is_equal = _are_equal(copy, shard.weight[start:end])
        if not is_equal:
            raise UnsupportedCheckpoint(
                f"{self._folder}: its {name} {shape} differs from the target's, which "
                "drafts borrow: it was made for another target or trained with one of its own. Use "
                "a draft made for this target, one without such a part.",
                option=DRAFT_OPTION,
            )


def _are_equal(copy: torch.Tensor, served: torch.Tensor) -> bool:
    """Return whether two weights are equal once the finer one is rounded as the other is."""
    copy = copy.to(served.device)
    return torch.equal(copy.to(served.dtype), served) or torch.equal(served.to(copy.dtype), copy)


def _shard_of(module: nn.Module) -> _Shard | None:
    """Return the rows that a layer has, or None where they are not plain numbers."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2 or weight.dtype not in _DENSE:
        return None
    split = getattr(module, "shard_indices", None)  # of SGLang's VocabParallelEmbedding
    if split is None:
        return _Shard(weight.detach(), 0, len(weight))
    return _Shard(weight.detach(), split.org_vocab_start_index, split.num_org_elements)
