# SPDX-License-Identifier: Apache-2.0
"""Decisions that ranks would make differently: the first one's count, for clocks differ."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator

__all__ = ["FirstRank"]


class FirstRank:
    """What the first rank of a group says, to all of them; no option turns this off."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group

    @property
    def is_this(self) -> bool:
        """Whether this process is it."""
        return self._group.rank_in_group == 0

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Make `values` [...], of any shape, the first rank's, in place; the host does not wait."""
        if self._group.world_size > 1:
            self._group.broadcast(values, src=0)
        return values

    def numbers(self, values: list[int]) -> list[int]:
        """Return the first rank's numbers, from host to host: no device is waited for."""
        if self._group.world_size == 1:
            return values
        said = torch.tensor(values, dtype=torch.int64)
        torch.distributed.broadcast(said, src=self._group.ranks[0], group=self._group.cpu_group)
        return said.tolist()
