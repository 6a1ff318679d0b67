# SPDX-License-Identifier: Apache-2.0
"""The numbers of rows that verify graphs were captured for."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

__all__ = ["NO_BUCKETS", "RowBuckets"]


class RowBuckets(NamedTuple):
    """SGLang captures its ragged verify graphs by rows: a step takes the next larger one.

    Attributes:
        counts: rising; none where steps run without graphs, or graphs of their own size.
        most_requests: that the graphs have room for.
    """

    counts: tuple[int, ...] = ()
    most_requests: int = 0

    def padded(self, n: int, num_rows: int) -> int:
        """Return the rows of the forward that verifies so many of n requests: a graph's, or theirs.

        SGLang gives a graph's empty rows to empty requests; a full one has none, and would give
        them to its last.
        """
        count = self._graph(n, num_rows)
        return num_rows if n == self.most_requests and count > num_rows else count

    def layout_size(self, size: int) -> int:
        """Return what a layout calls a forward of `size` rows.

        Beyond every graph where none has that size: SGLang's runner would take the next larger one
        and find the rows missing.
        """
        if not self.counts or size in self.counts:
            return size
        return max(size, self.counts[-1] + 1)

    def filled(self, n: int, num_rows: int, most: int) -> int:
        """Return how many rows cost no more than `num_rows`, `most` at most.

        A graph's empty rows take as long as full ones.

        Args:
            n: requests.
            num_rows: in all, at most `most`.
            most: rows that have proposals, n * w.
        """
        return min(self._graph(n, num_rows), most)

    def plain_widths(self, n: int, widest: int) -> list[int]:
        """Return the widths of a step without the draft: 1, but where no graph has as few rows.

        Where requests fill a graph there is no empty one for its empty rows to go to: they are
        given out, and verify proposals that were never made, which takes no longer.

        Args:
            n: requests.
            widest: rows of a request at most.
        """
        count = self._graph(n, n)
        if n != self.most_requests or count > n * widest:
            return [1] * n
        more, rest = divmod(count - n, n)
        return [1 + more + (i < rest) for i in range(n)]

    def _graph(self, n: int, num_rows: int) -> int:
        place = bisect_left(self.counts, num_rows)
        fits = place < len(self.counts) and n <= self.most_requests
        return self.counts[place] if fits else num_rows


NO_BUCKETS = RowBuckets()
