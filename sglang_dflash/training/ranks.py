# SPDX-License-Identifier: Apache-2.0
"""One process, or one of those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from sglang_dflash.training.settings import SettingsError

__all__ = ["Rank", "process_rank"]

_SET_BY_TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """A process among those that train together.

    Attributes:
        number: Of this one.
        count: Of all.
        device: Where it trains.
    """

    number: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this one writes and shows progress."""
        return self.number == 0

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes.

        Args:
            numbers: [N] float64 on the CPU.
        """
        if self.count == 1:
            return numbers
        moved = numbers.to(self.device)
        distributed.all_reduce(moved)
        return moved.cpu()


@contextmanager
def process_rank(device: str) -> Iterator[Rank]:
    """Join the other processes where torchrun started this one.

    Args:
        device: `cpu`, `cuda`, or `auto` for a GPU where there is one.

    Raises:
        SettingsError: there is no GPU, or the environment names some processes but not this one.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise SettingsError("--device cuda: torch sees no CUDA device here; use auto or cpu")
    kind = ("cuda" if has_gpu else "cpu") if device == "auto" else device
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Rank(0, 1, torch.device(kind))
        return
    missing = [name for name in _SET_BY_TORCHRUN if name not in os.environ]
    if missing:
        raise SettingsError(
            f"WORLD_SIZE is {count} in the environment, and {', '.join(missing)} not set: start "
            "the processes by torchrun, or unset WORLD_SIZE to train with one"
        )
    local = int(os.environ["LOCAL_RANK"])
    if kind == "cuda":
        torch.cuda.set_device(local)
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        where = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        yield Rank(distributed.get_rank(), count, where)
    finally:
        distributed.destroy_process_group()
