# SPDX-License-Identifier: Apache-2.0
"""The tables of a report, as rows of text: summary.md and report.html show the same ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from bench.config import Load, Published, PublishedRow
from bench.folder import StoredRun
from bench.summary import extent

__all__ = ["Table", "as_markdown", "load_name", "machine_line", "published_tables",
           "result_tables", "settings_line", "shown_engine"]  # fmt: skip

NOISY = 0.10  # coefficient of variation
RATES = ("load", "engine", "output tokens/s", "cv", "speed-up (range)", "of the whole run",
         "tokens/s/user", "tau", "rows per step", "same text", "errors", "memory GB")  # fmt: skip
SPEEDUPS = (("Speed-up", "speedup"), ("Speed-up of the whole run", "whole_run_speedup"))
LATENCIES = ("load", "engine", "TTFT ms p50 / p90 / p99", "TPOT ms p50 / p90 / p99",
             "chunk gap ms p50 / p99", "E2E s p50 / p99")  # fmt: skip


class Table(NamedTuple):
    """A title, column names and rows."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def result_tables(runs: list[StoredRun]) -> list[Table]:
    """Return the speed-ups of all datasets together, in two tables, and two tables per dataset.

    With several runs, their rows stand under each other.
    """
    datasets = dict.fromkeys(point["dataset"] for run in runs for point in run.points)
    tables = []
    if len(datasets) > 1:
        tables += [
            _overall(run, runs, title, key)
            for run in runs
            for title, key in SPEEDUPS
            if any(key in point for point in run.points)  # an older summary has the first only
        ]
    for dataset in datasets:
        cells = [
            (shown_engine(run, point["engine"], runs), point)
            for run in runs
            for point in run.points
            if point["dataset"] == dataset
        ]
        cells.sort(key=lambda cell: _load(cell[1]))  # stable: the runs' and engines' order stays
        tables.append(Table(dataset, RATES, [_rates(*cell) for cell in cells]))
        rows = [_latencies(*cell) for cell in cells]
        tables.append(Table(f"{dataset}: latencies", LATENCIES, rows))
    return tables


def published_tables(run: StoredRun) -> list[Table]:
    """Return, per source of published numbers, those beside what was measured here."""
    return [_published(run, published) for published in run.recipe.published]


def as_markdown(table: Table) -> str:
    """Return the table as Markdown under a heading."""
    lines = [f"## {table.title}", "", _line(table.header), _line("---" for _ in table.header)]
    return "\n".join([*lines, *map(_line, table.rows)])


def load_name(point: dict[str, Any]) -> str:
    """Return the load as a reader says it."""
    if point["concurrency"]:
        return f"{point['concurrency']}"
    return f"{point['request_rate']:g}/s"


def shown_engine(run: StoredRun, engine: str, runs: list[StoredRun]) -> str:
    """Return the engine's name, with its run's where there are several."""
    return engine if len(runs) == 1 else f"{engine} ({run.name})"


def machine_line(run: StoredRun) -> str:
    """Return where and with what a run was measured."""
    manifest = run.manifest
    machine, versions = manifest["machine"], manifest["versions"]
    gpus = [gpu["name"] for gpu in machine["gpus"]]
    where = f"{len(gpus)} x {gpus[0]}, " if gpus else ""
    packages = ", ".join(f"{name} {versions[name]}" for name in ("sglang-dflash", "sglang", "torch")
                         if name in versions)  # fmt: skip
    commit = (manifest["git"]["commit"] or "no checkout")[:10]
    dirty = " with changes" if manifest["git"]["dirty"] else ""
    return (
        f"{where}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB; "
        f"{packages}; commit {commit}{dirty}; {manifest['started']}"
    )


def _answers(load: Load) -> str:
    if not load.ignore_eos:
        return f"at most {load.max_new_tokens} tokens an answer"
    lengths = sorted({load.shortest_answer, load.max_new_tokens})
    return f"exactly {' to '.join(map(str, lengths))} tokens an answer"


def _requests(run: StoredRun) -> str:
    """Return how many requests a point had: fewer than the recipe asks where prompts run out."""
    counts: dict[tuple[str, bool], set[float]] = {}
    for point in sorted(run.points, key=_load):
        asked = point["requests"] / point["repeats"]
        load = (load_name(point), point["concurrency"] is not None)
        counts.setdefault(load, set()).add(asked / (point["concurrency"] or 1))
    texts = {}
    for is_closed, told in ((True, "requests for each under way"), (False, "requests")):
        shown = [
            f"{'-'.join(f'{count:.3g}' for count in sorted({min(found), max(found)}))} at {load}"
            for (load, closed), found in counts.items()
            if closed == is_closed
        ]
        if shown:
            texts[told] = ", ".join(shown)
    return "; ".join(f"{told}: {text}" for told, text in texts.items())


def _unflushed(run: StoredRun) -> list[str]:
    """Return a warning of the engines that may have had prompts of earlier points in their cache.

    Summaries of runs over SGLang's servers alone may not say so: those do not refuse.
    """
    engines = dict.fromkeys(p["engine"] for p in run.points if not p.get("cache_flushed", True))
    return [f"PREFIX CACHE NOT EMPTIED before points of {', '.join(engines)}"] if engines else []


def settings_line(run: StoredRun) -> str:
    """Return what a run asked of its servers."""
    load = run.recipe.load
    threads = run.manifest["machine"].get("environment", {})
    parts = [
        f"target {run.manifest.get('models', {}).get('target', run.recipe.target)}",
        _answers(load),
        "greedy" if load.temperature == 0 else f"temperature {load.temperature:g}",
        _requests(run),
        f"{load.repeats} repeats, {'interleaved' if run.recipe.servers.together else 'in turn'}",
        *_unflushed(run),
        *(f"{name}={value}" for name, value in threads.items()),
    ]
    return "; ".join(parts)


def _load(point: dict[str, Any]) -> tuple[float, ...]:
    """Return what loads are sorted by, closed loop first."""
    if point["concurrency"]:
        return (0, point["concurrency"])
    return (1, point["request_rate"])


def _overall(run: StoredRun, runs: list[StoredRun], what: str, key: str) -> Table:
    """Return, by load and engine, the geometric mean of the speed-ups over the datasets."""
    found = {
        (_load(point), point["engine"], point["dataset"]): _by_repeat(run, point.get(key))
        for point in run.points
    }
    engines = [engine.name for engine in run.recipe.engines if engine.name != run.recipe.baseline]
    kinds = [spec.name for spec in run.recipe.datasets]
    rows = []
    for load, name in sorted({_load(point): load_name(point) for point in run.points}.items()):
        cells = (
            _speedup(_over_kinds([found.get((load, engine, kind), {}) for kind in kinds]))
            for engine in engines
        )
        rows.append((name, *cells))
    title = f"{what} over {run.recipe.baseline}, geometric mean over the kinds of prompt"
    return Table(title if len(runs) == 1 else f"{title}: {run.name}", ("load", *engines), rows)


def _by_repeat(run: StoredRun, speedup: dict[str, Any] | None) -> dict[int, float]:
    """Return a point's speed-ups by repeat."""
    if speedup is None:
        return {}
    values = speedup["values"]
    # Older summaries do not say which repeats they have: known where none is missing.
    whole = range(run.recipe.load.repeats) if len(values) == run.recipe.load.repeats else ()
    return dict(zip(speedup.get("repeats", whole), values, strict=False))


def _over_kinds(columns: list[dict[int, float]]) -> dict[str, float] | None:
    """Return mean and range over the repeats that all kinds of prompt have; None without one.

    A mean over fewer kinds would stand beside one over all as if it were of the same prompts.
    """
    common = sorted(set(columns[0]).intersection(*columns[1:]))
    means = [statistics.geometric_mean(column[repeat] for column in columns) for repeat in common]
    return extent(means) if means else None


def _rates(engine: str, point: dict[str, Any]) -> tuple[str, ...]:
    rate, same = point["output_tokens_per_s"], point["identical"]
    return (
        load_name(point),
        engine,
        _mean(rate, "{:.1f}"),
        "-" if rate is None else _variation(rate),
        _speedup(point["speedup"]),
        _speedup(point.get("whole_run_speedup")),
        _mean(point["tokens_per_s_per_user"], "{:.1f}"),
        _mean(point["acceptance_length"], "{:.2f}"),
        _mean(point["mean_verify_width"], "{:.1f}"),
        f"{same['same']}/{same['of']}" if same and same["of"] else "-",
        f"{point['errors']}/{point['requests']}",
        f"{point['memory_bytes'] / 2**30:.1f} {point['memory_kind']}",
    )


def _latencies(engine: str, point: dict[str, Any]) -> tuple[str, ...]:
    return (
        load_name(point),
        engine,
        _quantiles(point["ttft_ms"], ("p50", "p90", "p99"), "{:.0f}"),
        _quantiles(point["tpot_ms"], ("p50", "p90", "p99"), "{:.1f}"),
        _quantiles(point["chunk_gap_ms"], ("p50", "p99"), "{:.1f}"),
        _quantiles(point["e2e_ms"], ("p50", "p99"), "{:.2f}", scale=1e-3),
    )


def _published(run: StoredRun, published: Published) -> Table:
    found = {(p["engine"], p["dataset"], p["concurrency"]): p for p in run.points}
    rows = []
    for row in published.rows:
        for concurrency in dict.fromkeys([*row.tokens_per_s, *row.speedup]) or [None]:
            here = found.get((row.engine, row.dataset, concurrency), {})
            rows.append(_beside(row, concurrency, here))
    header = ("dataset", "engine", "concurrency", "tokens/s published", "here",
              "speed-up published", "here", "tau published", "here")  # fmt: skip
    return Table(f"Beside published numbers: {published.source}", header, rows)


def _beside(row: PublishedRow, concurrency: int | None, here: dict[str, Any]) -> tuple[str, ...]:
    def theirs(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    return (
        row.dataset, row.engine, "-" if concurrency is None else str(concurrency),
        theirs(row.tokens_per_s.get(concurrency or 0), "{:.0f}"),
        _mean(here.get("output_tokens_per_s"), "{:.0f}"),
        theirs(row.speedup.get(concurrency or 0), "{:.1f}"),
        _mean(here.get("speedup"), "{:.2f}"),
        theirs(row.acceptance_length, "{:.2f}"), _mean(here.get("acceptance_length"), "{:.2f}"),
    )  # fmt: skip


def _speedup(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    return f"{value['mean']:.2f} ({value['min']:.2f}-{value['max']:.2f})"


def _mean(value: dict[str, Any] | None, form: str) -> str:
    return "-" if value is None else form.format(value["mean"])


def _variation(value: dict[str, Any]) -> str:
    if value["cv"] is None:
        return "-"
    return f"{value['cv']:.0%}{' noisy' if value['cv'] > NOISY else ''}"


def _quantiles(
    value: dict[str, Any] | None, names: tuple[str, ...], form: str, scale: float = 1
) -> str:
    if value is None:
        return "-"
    return " / ".join(form.format(value[name]["mean"] * scale) for name in names)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
