# SPDX-License-Identifier: Apache-2.0
"""`compare A B`: whether run B is slower than run A, point by point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.folder import StoredRun
from bench.tables import Table, as_markdown, load_name

__all__ = ["compare_runs"]

Cell = tuple[str, str, int | None, float | None]


def compare_runs(old: Path, new: Path, metric: str, fail_below: float) -> tuple[str, bool]:
    """Return a table of new over old, and whether nothing regressed.

    A point has regressed where its mean is below `fail_below` of the old one, or where B does not
    have it. "overlap" says whether the ranges of the repeats meet: such a loss may be noise, and
    more repeats would tell.

    Args:
        old: Run folder A.
        new: Run folder B.
        metric: "speedup", the ratio within each run, which a slower day does not change; or
            "output_tokens_per_s".
        fail_below: Smallest ratio that passes.

    Raises:
        BenchError: not run folders, or nothing to compare.
    """
    before, after = StoredRun(old), StoredRun(new)
    ours, theirs = _cells(before, metric), _cells(after, metric)
    if not set(ours) & set(theirs):
        raise BenchError(f"{old} and {new} have no point with a {metric} in common")
    rows, bad = [], 0
    for cell, value in ours.items():
        found = theirs.get(cell)
        ratio = found[metric]["mean"] / value[metric]["mean"] if found else 0.0
        verdict = "ok" if ratio >= fail_below else "REGRESSION" if found else "MISSING"
        bad += verdict != "ok"
        rows.append(_row(value, found, metric, verdict))
    header = ("dataset", "load", "engine", metric, "then", "ratio", "ranges overlap", "tau", "then",
              "verdict")  # fmt: skip
    table = Table(f"{metric}: {before.name} -> {after.name}", header, rows)
    end = f"{bad} of {len(rows)} points below {fail_below:g} or missing"
    return f"{as_markdown(table)}\n\n{end}", bad == 0


def _cells(run: StoredRun, metric: str) -> dict[Cell, dict[str, Any]]:
    """Return the points that have the metric; a baseline's speed-up is 1 and says nothing."""
    return {
        (p["engine"], p["dataset"], p["concurrency"], p["request_rate"]): p
        for p in run.points
        if p[metric] and not (metric == "speedup" and p["engine"] == run.recipe.baseline)
    }


def _row(
    old: dict[str, Any], new: dict[str, Any] | None, metric: str, verdict: str
) -> tuple[str, ...]:
    where = (old["dataset"], load_name(old), old["engine"])
    a = old[metric]
    if new is None:
        return (*where, f"{a['mean']:.2f}", "-", "-", "-", _tau(old), "-", verdict)
    b = new[metric]
    overlap = "yes" if a["min"] <= b["max"] and b["min"] <= a["max"] else "no"
    return (
        *where, f"{a['mean']:.2f}", f"{b['mean']:.2f}", f"{b['mean'] / a['mean']:.3f}", overlap,
        _tau(old), _tau(new), verdict,
    )  # fmt: skip


def _tau(point: dict[str, Any]) -> str:
    value = point["acceptance_length"]
    return "-" if value is None else f"{value['mean']:.2f}"
