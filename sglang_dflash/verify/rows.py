# SPDX-License-Identifier: Apache-2.0
"""Which rows of n blocks the target verifies: the first few of each, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from sglang_dflash.verify.transfer import to_device

__all__ = ["Rows"]


@dataclass(frozen=True, eq=False)
class Rows:
    """The M verified rows, request after request, each request's in order.

    Most steps have rows that were made before: what follows from them is worth keeping.

    Attributes:
        widths: [n] int64 in 1..B, rows of each request, the anchor's included.
        starts: [n] int64, the first row of each request.
        request: [M] int64, whose row it is.
        offset: [M] int64, which row of the block it is: 0 is the anchor's.
        known_widths: the widths on the host; None where the device chose them.
        block_size: B.
    """

    widths: torch.Tensor
    starts: torch.Tensor
    request: torch.Tensor
    offset: torch.Tensor
    known_widths: tuple[int, ...] | None
    block_size: int

    @classmethod
    def of(cls, widths: list[int], block_size: int, device: torch.device | str) -> Rows:
        """Return the rows of given widths; the same object for the same widths, as long as kept."""
        return _rows(tuple(widths), block_size, device)

    @classmethod
    def _make(cls, widths: tuple[int, ...], block_size: int, device: torch.device | str) -> Rows:
        made = cls.chosen_on_device(torch.tensor(widths), sum(widths), block_size)  # the host here
        by_request = to_device(torch.stack([made.widths, made.starts]), device)
        by_row = to_device(torch.stack([made.request, made.offset]), device)
        return cls(*by_request, *by_row, widths, block_size)

    @classmethod
    def chosen_on_device(cls, widths: torch.Tensor, num_rows: int, block_size: int) -> Rows:
        """Return the rows of widths [n] int64 that add up to `num_rows`, without a look at them."""
        device = widths.device
        starts = widths.cumsum(0) - widths
        numbers = torch.arange(len(widths), device=device)
        # Given the size of its output, this does not wait for the device.
        request = torch.repeat_interleave(numbers, widths, output_size=num_rows)
        offset = torch.arange(num_rows, device=device) - starts[request]
        return cls(widths, starts, request, offset, None, block_size)

    def __len__(self) -> int:
        """Return M."""
        return len(self.request)

    @cached_property
    def widths_cpu(self) -> tuple[int, ...]:
        """The widths on the host; waits for the device where it chose them."""
        return tuple(self.widths.tolist()) if self.known_widths is None else self.known_widths

    @property
    def widest(self) -> int:
        """No request has more rows; B where the host does not know better."""
        return self.block_size if self.known_widths is None else max(self.known_widths)

    @property
    def are_whole_blocks(self) -> bool:
        """Whether every row of every block is verified."""
        return len(self) == len(self.widths) * self.block_size

    @cached_property
    def columns(self) -> torch.Tensor | None:
        """[M] int64, the rows' places among the n*B of whole blocks; None where they are all."""
        return None if self.are_whole_blocks else self.columns_of_all

    @property
    def columns_of_all(self) -> torch.Tensor:
        """[M] int64, the same of whole blocks too."""
        return self.request * self.block_size + self.offset

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return [M, ...]: the rows' entries of `values` [n, B, ...]."""
        if self.are_whole_blocks:
            return values.flatten(0, 1)
        return values[self.request, self.offset]

    def each(self, values: torch.Tensor) -> torch.Tensor:
        """Return [M, ...]: for each row its request's entry of `values` [n, ...]."""
        return values[self.request]


@lru_cache(maxsize=256)  # most steps have whole blocks, or one row each
def _rows(widths: tuple[int, ...], block_size: int, device: torch.device | str) -> Rows:
    return Rows._make(widths, block_size, device)
