# SPDX-License-Identifier: Apache-2.0
"""What a step costs in seconds, measured on the running engine."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.budget.surface import TimeSurface, half_octaves

__all__ = ["CostModel", "StepKind", "SweepPoint", "sweep_points"]

Array = NDArray[np.float64]

StepKind = Literal["plain", "draft"]
"""`plain`: one row a request, no draft pass. `draft`: a draft pass, then any rows. Both inject."""

_CONTEXT_KEEP = 0.98
_CONTEXT_RIDGE = 2.0 * 256**2  # tokens^2: less variation than this says nothing
_LARGEST_CONTEXT_SHARE = 0.5  # of the time at the usual context


class SweepPoint(NamedTuple):
    """A step to measure at start-up: `num_requests` requests, `num_rows` verified rows in all."""

    kind: StepKind
    num_requests: int
    num_rows: int


class CostModel:
    """Seconds of a step as a function of kind, requests, verified rows and context tokens.

    Nothing is assumed of the machine: a start-up sweep (`sweep_points`) seeds it and every step
    keeps it current. Estimates never fall as rows grow at a number of requests, nor as requests
    grow at a number of rows per request. Leave out steps that did other work, a prefill above all;
    a few that slip in are clipped.

    Args:
        max_requests: the most requests of one step; more are scaled in proportion.
        block_size: B.
        window: effective number of samples that a point remembers.
    """

    def __init__(self, max_requests: int, block_size: int, window: float = 32.0) -> None:
        self.block_size = block_size
        requests = half_octaves(max_requests)
        self._surfaces = {
            "plain": TimeSurface(requests, np.ones(1), window),
            "draft": TimeSurface(requests, half_octaves(block_size), window),
        }
        self._per_context = {kind: _ContextSlope() for kind in get_args(StepKind)}

    def observe(
        self, kind: StepKind, n: int, num_rows: int, context_tokens: float, seconds: float
    ) -> None:
        """Take in a measured step.

        Args:
            kind: whether the draft ran.
            n: requests.
            num_rows: M, verified rows in all; n for a plain step.
            context_tokens: tokens of all requests together before the step.
            seconds: wall time of the step, above 0; other values are ignored.
        """
        if not 0 < seconds < np.inf:
            return
        surface, slope = self._surfaces[kind], self._per_context[kind]
        width, scale = num_rows / n, self._beyond(n)
        usual = surface.context_at(n, np.array([width]))[0]
        deviation = context_tokens - usual if surface.has_samples else 0.0
        shift = slope.seconds_per_token * deviation
        # The surface stands for the usual context, which follows what comes in.
        level = max(seconds - shift, seconds * _LARGEST_CONTEXT_SHARE) / scale
        residual = surface.observe(n, width, level, context_tokens) * scale
        slope.observe(deviation, residual + shift)

    def curve(
        self, kind: StepKind, n: int, rows: NDArray[np.int64], context_tokens: float | None = None
    ) -> Array:
        """Return the seconds of a step for each number of verified rows.

        Args:
            kind: whether the draft runs.
            n: requests.
            rows: [k] verified rows in all, n..n*B.
            context_tokens: tokens of all requests together; None is what was usual.

        Raises:
            ValueError: no step of this kind was ever measured.
        """
        surface = self._surfaces[kind]
        if not surface.has_samples:
            raise ValueError(f"no {kind} step was measured yet: run the sweep, or one such step")
        widths = np.asarray(rows, dtype=np.float64) / n
        seconds = surface.seconds(n, widths) * self._beyond(n)
        if context_tokens is None:
            return seconds
        # One deviation for all rows: a curve shifted as a whole stays monotone.
        deviation = context_tokens - surface.context_at(n, widths).mean()
        limit = _LARGEST_CONTEXT_SHARE * seconds.min()
        shift = self._per_context[kind].seconds_per_token * deviation
        return seconds + float(np.clip(shift, -limit, limit))

    def seconds(
        self, kind: StepKind, n: int, num_rows: int, context_tokens: float | None = None
    ) -> float:
        """Return the seconds of one step; see `curve`."""
        return float(self.curve(kind, n, np.array([num_rows]), context_tokens)[0])

    def samples(self, kind: StepKind, n: int, num_rows: int) -> float:
        """Return how many remembered samples back the estimate at a point; 0 is extrapolation."""
        return self._surfaces[kind].samples_at(n, num_rows / n)

    def knows(self, kind: StepKind) -> bool:
        """Whether a step of this kind was ever measured."""
        return self._surfaces[kind].has_samples

    def to_dict(self) -> dict[str, dict[str, object]]:
        """Return the nodes, their times in seconds and their samples, ready for JSON."""
        return {
            kind: {
                "requests": surface.requests.tolist(),
                "widths": surface.widths.tolist(),
                "seconds": [
                    surface.seconds(int(n), surface.widths).tolist()
                    for n in surface.requests
                    if surface.has_samples
                ],
                "samples": surface.evidence.tolist(),
                "seconds_per_context_token": self._per_context[kind].seconds_per_token,
            }
            for kind, surface in self._surfaces.items()
        }

    def _beyond(self, n: int) -> float:
        return max(1.0, n / self._surfaces["plain"].requests[-1])


def sweep_points(max_requests: int, block_size: int) -> list[SweepPoint]:
    """Return the steps to measure at start-up, cheapest first.

    Requests in powers of two; plain, and with the draft at widths 1, 2, 3, 4, 6, ... and B. Give
    `CostModel.observe` the median of a few runs of each: it takes the first at its word.
    """
    requests = _powers_of_two(max_requests)
    widths = half_octaves(block_size).astype(int).tolist()
    points = [SweepPoint("plain", n, n) for n in requests]
    points += [SweepPoint("draft", n, n * width) for n in requests for width in widths]
    return sorted(points, key=lambda point: (point.num_rows, point.kind))


class _ContextSlope:
    """Seconds per context token at or above 0: a ridge regression that forgets."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._squares = 0.0
        self._products = 0.0

    def observe(self, deviation: float, seconds: float) -> None:
        self._squares = _CONTEXT_KEEP * self._squares + deviation**2
        self._products = _CONTEXT_KEEP * self._products + deviation * seconds
        self.seconds_per_token = max(0.0, self._products / (self._squares + _CONTEXT_RIDGE))


def _powers_of_two(last: int) -> list[int]:
    return [*(1 << i for i in range((last - 1).bit_length())), last]
