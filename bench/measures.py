# SPDX-License-Identifier: Apache-2.0
"""Numbers of one measurement, from its requests alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.records import PointRecord, RequestRecord

__all__ = ["Window", "acceptance", "measure", "percentiles", "steady_window", "tokens_in"]

QUANTILES = (50, 90, 99)


class Window(NamedTuple):
    """A span of time, in seconds from the point's first request."""

    start_s: float
    end_s: float


def steady_window(requests: Sequence[RequestRecord], concurrency: int | None) -> Window:
    """Return the span in which the load was what it should be.

    Closed loop: from the moment that all slots are taken, which is when the last of the first
    `concurrency` requests is sent, to the first answer after which a slot stays empty. The first
    prefills are inside, for their answers' tokens are: a window from the first tokens on has fewer
    prefills than answers, also at concurrency 1, and so favours whatever makes decoding faster.
    With them it has a few too many, those of the answers that its end cuts off; `measure` has the
    whole run beside it, with one prefill to an answer.

    SGLang's `find_steady_state_window` looks for the longest span that is never below
    a share of the peak; a closed loop falls one below for a moment at every answer, which cuts that
    span at concurrency 1 to a single request. Open loop, or slots never all taken: from the first
    request to the last answer.
    """
    starts = sorted(request.start_s for request in requests)
    ends = sorted(request.start_s + request.e2e_s for request in requests)
    if concurrency is None or len(requests) < concurrency:
        return Window(starts[0], ends[-1])
    full = Window(starts[concurrency - 1], ends[len(ends) - concurrency])
    return full if full.end_s > full.start_s else Window(starts[0], ends[-1])


def tokens_in(request: RequestRecord, window: Window) -> float:
    """Return how many of the answer's tokens came in the window.

    Where the server does not count per chunk, its chunks share the tokens equally.
    """
    if not request.chunk_s:
        return 0.0
    counts: Sequence[float] = request.chunk_tokens
    if not all(counts):
        share = request.output_tokens / len(request.chunk_s)
        counts = [share * (i + 1) for i in range(len(request.chunk_s))]
    times = [request.start_s + at for at in request.chunk_s]
    before = max((c for c, t in zip(counts, times, strict=True) if t < window.start_s), default=0)
    until = max((c for c, t in zip(counts, times, strict=True) if t <= window.end_s), default=0)
    return until - before


def acceptance(requests: Iterable[RequestRecord]) -> dict[str, Any]:
    """Return what verify steps accepted: sums, so that points may be added.

    `survival` [k] counts steps that accepted more than k proposals.
    """
    done = [request for request in requests if request.error is None and request.steps]
    longest = max((len(request.histogram) for request in done), default=0)
    counts = np.zeros(longest, dtype=np.int64)
    for request in done:
        counts[: len(request.histogram)] += request.histogram
    return {
        "steps": sum(request.steps for request in done),
        "accepted": sum(request.accepted for request in done),
        "survival": [int(counts[k:].sum()) for k in range(1, longest)],
        "verified_rows": sum(request.verified_rows or 0 for request in done),
        "steps_with_width": sum(r.steps for r in done if r.verified_rows is not None),
    }


def measure(record: PointRecord) -> dict[str, Any]:
    """Return a point's numbers; failed requests count as errors only.

    Throughput is output tokens inside the steady window over its length. TPOT is
    (E2E - TTFT) / (tokens - 1): a speculative server sends several tokens in a chunk, so the time
    between chunks is another quantity and has its own name.
    """
    done = [request for request in record.requests if request.error is None]
    result: dict[str, Any] = {
        "requests": len(record.requests),
        "errors": len(record.requests) - len(done),
        "memory_bytes": record.memory_bytes,
        **acceptance(done),
    }
    if not done:
        return result
    window = steady_window(done, record.point.level.concurrency)
    whole = steady_window(done, None)
    tokens = sum(request.output_tokens for request in done)
    tpot = [(r.e2e_s - r.ttft_s) / (r.output_tokens - 1) for r in done if r.output_tokens > 1]
    gaps = [b - a for r in done for a, b in itertools.pairwise(r.chunk_s)]
    inside = sum(tokens_in(request, window) for request in done)
    return result | {
        "output_tokens_per_s": inside / (window.end_s - window.start_s),
        "whole_run_tokens_per_s": tokens / (whole.end_s - whole.start_s),
        "tokens_per_s_per_user": 1 / statistics.fmean(tpot) if tpot else None,
        "ttft_ms": percentiles([request.ttft_s * 1e3 for request in done]),
        "tpot_ms": percentiles([seconds * 1e3 for seconds in tpot]),
        "chunk_gap_ms": percentiles([seconds * 1e3 for seconds in gaps]),
        "e2e_ms": percentiles([request.e2e_s * 1e3 for request in done]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, p50, p90 and p99; None of nothing."""
    if not values:
        return None
    quantiles = np.percentile(values, QUANTILES)
    named = {f"p{q}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
    return {"mean": statistics.fmean(values), **named}
