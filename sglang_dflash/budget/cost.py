# SPDX-License-Identifier: Apache-2.0
"""What a step costs in seconds, measured on the running engine."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.budget.surface import TimeSurface, half_octaves

__all__ = ["CostModel", "StepPart", "SweepPoint", "sweep_points"]

Array = NDArray[np.float64]

StepPart = Literal["draft", "target"]
"""`draft`: the draft pass over the first rows of each block, its head and the choice of widths.
`target`: all else of a step, over any rows: verify, decision, injection, the scheduler. A plain
step is a target part of one row a request."""


class SweepPoint(NamedTuple):
    """What to measure at start-up: a part of a step, requests, and rows of all together."""

    part: StepPart
    num_requests: int
    num_rows: int


class CostModel:
    """Seconds of each part of a step as a function of requests, rows and context tokens.

    Nothing is assumed of the machine: a start-up sweep (`sweep_points`) seeds it and every step
    keeps it current. Estimates never fall as rows grow at a number of requests, nor as requests
    grow at a number of rows per request, the context being the same. Leave out steps that did other
    work, a prefill above all; a few that slip in are clipped.

    Args:
        max_requests: the most requests of one step; more are scaled in proportion.
        block_size: B.
        window: effective number of samples that a point remembers.
    """

    def __init__(self, max_requests: int, block_size: int, window: float = 32.0) -> None:
        self.block_size = block_size
        requests = half_octaves(max_requests)
        self._surfaces = {
            "draft": TimeSurface(requests, half_octaves(block_size)[1:], window),
            "target": TimeSurface(requests, half_octaves(block_size), window),
        }

    def observe(
        self, part: StepPart, n: int, num_rows: int, context_tokens: float, seconds: float
    ) -> None:
        """Take in a measured part of a step.

        Args:
            part: which.
            n: requests.
            num_rows: its rows of all requests together.
            context_tokens: of all requests together, the block's own positions included.
            seconds: wall time, above 0; other values are ignored.
        """
        if not 0 < seconds < np.inf:
            return
        scale = self._beyond(n)
        self._surfaces[part].observe(n, num_rows / n, seconds / scale, context_tokens / scale)

    def curve(
        self, part: StepPart, n: int, rows: NDArray[np.int64], context_tokens: float | None = None
    ) -> Array:
        """Return the seconds of a part of a step for each number of rows.

        Args:
            part: which.
            n: requests.
            rows: [k] rows in all, n..n*B.
            context_tokens: tokens of all requests together; None is what was usual.

        Raises:
            ValueError: this part was never measured.
        """
        surface = self._surfaces[part]
        if not surface.has_samples:
            raise ValueError(f"no {part} pass was measured yet: run the sweep, or one such pass")
        widths = np.asarray(rows, dtype=np.float64) / n
        scale = self._beyond(n)
        context = None if context_tokens is None else context_tokens / scale
        return surface.seconds(n, widths, context) * scale

    def seconds(
        self, part: StepPart, n: int, num_rows: int, context_tokens: float | None = None
    ) -> float:
        """Return the seconds for one number of rows; see `curve`."""
        return float(self.curve(part, n, np.array([num_rows]), context_tokens)[0])

    @property
    def doubt(self) -> float:
        """Differences of a step's times below this share of them may be chance."""
        return self._surfaces["target"].doubt

    def samples(self, part: StepPart, n: int, num_rows: int) -> float:
        """Return how many remembered samples back the estimate at a point; 0 is extrapolation."""
        return self._surfaces[part].samples_at(n, num_rows / n)

    def knows(self, part: StepPart) -> bool:
        """Whether this part was ever measured."""
        return self._surfaces[part].has_samples

    def _beyond(self, n: int) -> float:
        return max(1.0, n / self._surfaces["target"].requests[-1])


def sweep_points(max_requests: int, block_size: int) -> list[SweepPoint]:
    """Return what to measure at start-up: first the narrowest and the widest, each cheapest first.

    Rows get cheaper by the dozen: a price beyond what was measured is a guess too high, one between
    is a good one. So what time is too short for had better lie between.

    Requests in powers of two, 1, 2, 3, 4, 6, ... and B rows of each; a draft pass has two at least.
    Give `CostModel.observe` the median of a few runs of each: it takes the first at its word.
    """
    widths = half_octaves(block_size).astype(int).tolist()
    points = [
        SweepPoint(part, n, n * width)
        for part in get_args(StepPart)
        for n in _powers_of_two(max_requests)
        for width in widths[part == "draft" :]
    ]
    between = range(3, block_size)
    return sorted(
        points,
        key=lambda p: (p.num_rows // p.num_requests in between, p.num_rows, p.part),
    )


def _powers_of_two(last: int) -> list[int]:
    return [*(1 << i for i in range((last - 1).bit_length())), last]
