# SPDX-License-Identifier: Apache-2.0
"""The numbers of rows that verify graphs were captured for."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        """Return the rows of the graph that takes so many of n requests; themselves without one.

        SGLang gives a graph's empty rows to empty requests; a full one has none, and would give
        them to its last.
        """
        count = self._graph(n, num_rows)
        return num_rows if n == self.most_requests and count > num_rows else count

    def filled(self, n: int, num_rows: int, most: int) -> int:
        """Return how many rows cost no more than `num_rows`, `most` at most.

        A graph's empty rows take as long as full ones.

        Args:
            n: requests.
            num_rows: in all, at most `most`.
            most: rows that have proposals, n * w.
        """
        return min(self._graph(n, num_rows), most)

    def _graph(self, n: int, num_rows: int) -> int:
        place = bisect_left(self.counts, num_rows)
        fits = place < len(self.counts) and n <= self.most_requests
        return self.counts[place] if fits else num_rows

    def all_filled(self, n: int, num_rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return `filled` of each of [k] rising numbers, the last of them the most; None: as is."""
        if not self.counts or n > self.most_requests:
            return None
        counts = np.array([*self.counts, np.iinfo(np.int64).max])
        padded = counts[np.searchsorted(counts, num_rows)]
        padded = np.where(num_rows > self.counts[-1], num_rows, padded)
        return np.minimum(padded, num_rows[-1])


NO_BUCKETS = RowBuckets()
