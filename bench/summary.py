# SPDX-License-Identifier: Apache-2.0
"""One object per engine, dataset and load level, over all repeats: what reports are drawn from."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import t as student

from bench.config import Recipe
from bench.measures import measure
from bench.plan import Level, levels_of
from bench.records import PointRecord

__all__ = ["extent", "spread", "summarise"]

SCALARS = ("output_tokens_per_s", "whole_run_tokens_per_s", "tokens_per_s_per_user")
LATENCIES = ("ttft_ms", "tpot_ms", "chunk_gap_ms", "e2e_ms")
CONFIDENCE = 0.95

Records = dict[int, PointRecord]  # by repeat


def summarise(recipe: Recipe, records: Sequence[PointRecord]) -> list[dict[str, Any]]:
    """Return the points of `summary.json`, in the recipe's order.

    Every speed-up is a ratio within one repeat, over the baseline at the same dataset and level;
    its `repeats` say of which ones its `values` are.
    Points without a finished measurement are left out.
    """
    by_cell: dict[tuple[str, str, Level], Records] = {}
    for record in records:
        point = record.point
        cell = (point.engine, point.dataset, point.level)
        by_cell.setdefault(cell, {})[point.repeat] = record
    points = []
    for dataset in recipe.datasets:
        for level in levels_of(recipe.load):
            base = by_cell.get((recipe.baseline, dataset.name, level), {})
            for engine in recipe.engines:
                own = by_cell.get((engine.name, dataset.name, level))
                if own:
                    points.append(_point(own, base, greedy=recipe.load.temperature == 0))
    return points


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Return mean, 95 % t-interval of the mean, range, coefficient of variation and the values.

    None of nothing. One value has no interval.
    """
    if not values:
        return None
    mean, n = statistics.fmean(values), len(values)
    deviation = statistics.stdev(values) if n > 1 else None
    half = None
    if deviation is not None:
        half = student.ppf((1 + CONFIDENCE) / 2, n - 1) * deviation / n**0.5
    return {
        "mean": mean,
        "low": None if half is None else float(mean - half),
        "high": None if half is None else float(mean + half),
        "min": min(values), "max": max(values),
        "cv": None if deviation is None or mean == 0 else deviation / mean,
        "values": list(values),
    }  # fmt: skip


def extent(values: Sequence[float]) -> dict[str, float]:
    """Return mean and range of at least one value."""
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def _point(own: Records, base: Records, *, greedy: bool) -> dict[str, Any]:
    repeats = sorted(own)
    where = own[repeats[0]].point
    measured = {repeat: measure(own[repeat]) for repeat in repeats}
    of_base = {repeat: measure(record) for repeat, record in base.items() if repeat in own}
    result: dict[str, Any] = {
        "engine": where.engine, "dataset": where.dataset, **where.level._asdict(),
        "repeats": len(repeats),
    }  # fmt: skip
    for name in SCALARS:
        result[name] = spread(_found(measured, name))
    result["speedup"] = _speedup(measured, of_base, "output_tokens_per_s")
    result["whole_run_speedup"] = _speedup(measured, of_base, "whole_run_tokens_per_s")
    for name in LATENCIES:
        found = _found(measured, name)
        keys = found[0] if found else ()
        result[name] = {key: extent([one[key] for one in found]) for key in keys} or None
    result |= _acceptance(own, measured)
    result["errors"] = sum(m["errors"] for m in measured.values())
    result["requests"] = sum(m["requests"] for m in measured.values())
    result["memory_bytes"] = max(m["memory_bytes"] for m in measured.values())
    result["memory_kind"] = own[repeats[0]].memory_kind
    result["cache_flushed"] = all(record.cache_flushed for record in own.values())
    result["identical"] = _identical(own, base) if greedy and own is not base else None
    return result


def _speedup(
    measured: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], rate: str
) -> dict[str, Any] | None:
    """Return the spread of the ratios of `rate` within each repeat, and which repeats they are."""
    ratios = {
        repeat: measured[repeat][rate] / found[rate]
        for repeat, found in sorted(base.items())
        if found.get(rate) and measured[repeat].get(rate)
    }
    speedup = spread(list(ratios.values()))
    return speedup and {**speedup, "repeats": list(ratios)}


def _found(measured: dict[int, dict[str, Any]], name: str) -> list[Any]:
    return [m[name] for m in measured.values() if m.get(name) is not None]


def _acceptance(own: Records, measured: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return tau, acceptance by position and the mean width, each sum over sum of all repeats.

    Tau counts what a step committed, its bonus included. Without speculation, and on random tokens,
    there is none.
    """
    values = list(measured.values())
    steps = sum(m["steps"] for m in values)
    record = next(iter(own.values()))
    if not steps or not record.has_text:
        return {"acceptance_length": None, "acceptance_by_position": None,
                "mean_verify_width": None}  # fmt: skip
    tau = spread([(m["accepted"] + m["steps"]) / m["steps"] for m in values if m["steps"]])
    assert tau is not None
    tau["mean"] = (sum(m["accepted"] for m in values) + steps) / steps
    longest = max(len(m["survival"]) for m in values)
    survival = [
        sum(m["survival"][k] for m in values if k < len(m["survival"])) / steps
        for k in range(longest)
    ]
    known = [m for m in values if m["steps_with_width"]]
    width = spread([m["verified_rows"] / m["steps_with_width"] for m in known])
    if width is not None:
        rows = sum(m["verified_rows"] for m in known)
        width["mean"] = rows / sum(m["steps_with_width"] for m in known)
    return {
        "acceptance_length": tau,
        "acceptance_by_position": survival,
        "mean_verify_width": width,
    }


def _identical(own: Records, base: Records) -> dict[str, int]:
    """Return how many answers have the text that the baseline gave at the same place."""
    same = pairs = 0
    for repeat, record in own.items():
        if repeat not in base:
            continue
        texts = {r.index: r.text_sha256 for r in base[repeat].requests if r.error is None}
        for request in record.requests:
            if request.error is None and request.index in texts:
                pairs += 1
                same += request.text_sha256 == texts[request.index]
    return {"same": same, "of": pairs}
