# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, drawn by matplotlib: a panel per dataset, a line per engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from bench.folder import StoredRun
from bench.tables import load_name, shown_engine

__all__ = ["FIGURES", "Series", "series_of", "style"]

COLUMNS = 3
PANEL = (4.6, 3.5)  # inches
# Okabe and Ito's, told apart by colour-blind readers too; the baseline is grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*"
GREY = "#888888"

Points = list[dict[str, Any]]


class Series(NamedTuple):
    """One engine of one run, and how it is drawn."""

    name: str
    colour: str
    marker: str
    is_baseline: bool
    points: Points

    def of(self, dataset: str) -> Points:
        """Return the closed-loop points of a dataset that gave tokens, by concurrency."""
        found = [
            point
            for point in self.points
            if point["dataset"] == dataset and point["concurrency"] and point["output_tokens_per_s"]
        ]
        return sorted(found, key=lambda point: point["concurrency"])


def series_of(runs: list[StoredRun]) -> list[Series]:
    """Return all lines, in the runs' order."""
    lines: list[Series] = []
    coloured = 0
    for run in runs:
        for engine in run.recipe.engines:
            points = [point for point in run.points if point["engine"] == engine.name]
            base = engine.name == run.recipe.baseline
            colour = GREY if base else COLOURS[coloured % len(COLOURS)]
            marker = MARKERS[len(lines) % len(MARKERS)]
            coloured += not base
            if points:
                name = shown_engine(run, engine.name, runs)
                lines.append(Series(name, colour, marker, base, points))
    return lines


@contextmanager
def style(salt: str) -> Iterator[None]:
    """Draw with these settings; `salt` keeps the identifiers of several SVGs in a page apart."""
    settings: Any = {
        "svg.hashsalt": salt, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
        "legend.frameon": False, "figure.facecolor": "white",
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield


def throughput(lines: list[Series]) -> Figure | None:
    """Throughput against interactivity: up and to the right is better."""

    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point["tokens_per_s_per_user"]]
        xs = [point["tokens_per_s_per_user"]["mean"] for point in points]
        ys = [point["output_tokens_per_s"]["mean"] for point in points]
        axes.plot(xs, ys, color=line.colour, marker=line.marker, label=line.name, markersize=5)
        for x, y, point in zip(xs, ys, points, strict=True):
            axes.annotate(
                load_name(point), (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7,
                color=line.colour,
            )  # fmt: skip
        axes.set(xlabel="tokens/s per user (1 / mean TPOT)", ylabel="output tokens/s, all users")

    title = "Throughput against interactivity (labels: concurrency)"
    return _panels(lines, title, draw, from_zero="xy")


def speedup(lines: list[Series]) -> Figure | None:
    """Speed-up over the baseline: higher is better."""

    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point["speedup"]]
        if line.is_baseline:
            axes.axhline(1, color=GREY, linewidth=1.2, label=line.name)
            return
        _over_concurrency(axes, line, points, [point["speedup"] for point in points])
        axes.set_ylabel("speed-up over the baseline")

    title = "Speed-up against concurrency (bars: range of the repeats)"
    return _panels(lines, title, draw, from_zero="y")


def tau(lines: list[Series]) -> Figure | None:
    """Acceptance length by dataset, over all concurrencies: higher is better."""
    speculative = [line for line in lines if any(p["acceptance_length"] for p in line.points)]
    datasets = _datasets(speculative)
    if not datasets:
        return None
    figure = Figure(figsize=(max(5.0, 1.6 * len(datasets) + 2), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(speculative)
    for number, line in enumerate(speculative):
        for column, dataset in enumerate(datasets):
            values = [p["acceptance_length"] for p in line.of(dataset) if p["acceptance_length"]]
            if values:
                means = [value["mean"] for value in values]
                middle = sum(means) / len(means)
                x = column + (number - (len(speculative) - 1) / 2) * width
                axes.bar(
                    x, middle, width * 0.9, color=line.colour,
                    yerr=[[middle - min(means)], [max(means) - middle]], capsize=2,
                    label=line.name if column == 0 else None,
                )  # fmt: skip
                axes.annotate(f"{middle:.2f}", (x, 0.05), ha="center", fontsize=7, color="white")
    axes.set_xticks(range(len(datasets)), datasets)
    axes.set(ylabel="tokens per verify step (tau)", title="Acceptance length by prompt kind "
             "(bars: range over concurrency)")  # fmt: skip
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def positions(lines: list[Series]) -> Figure | None:
    """Share of verify steps that accepted at least so many proposals, at the lowest load."""

    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point["acceptance_by_position"]]
        if points:
            shares = points[0]["acceptance_by_position"]
            xs = range(1, len(shares) + 1)
            axes.plot(xs, shares, color=line.colour, marker=line.marker, label=line.name)
        axes.set(xlabel="proposal's position in the block", ylabel="share of steps that accept it")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _panels(lines, "Acceptance by position, lowest concurrency", draw)


def widths(lines: list[Series]) -> Figure | None:
    """Mean rows verified per step of a request."""

    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point["mean_verify_width"]]
        _over_concurrency(axes, line, points, [point["mean_verify_width"] for point in points])
        axes.set_ylabel("verified rows per step")

    return _panels(lines, "Verify width against concurrency", draw, from_zero="y")


def ttft(lines: list[Series]) -> Figure | None:
    """Time to the first token: lower is better."""
    return _latency(lines, "ttft_ms", "Time to first token")


def tpot(lines: list[Series]) -> Figure | None:
    """Time per output token: lower is better."""
    return _latency(lines, "tpot_ms", "Time per output token, (E2E - TTFT) / (tokens - 1)")


FIGURES: dict[str, Callable[[list[Series]], Figure | None]] = {
    "throughput": throughput, "speedup": speedup, "tau": tau, "positions": positions,
    "widths": widths, "ttft": ttft, "tpot": tpot,
}  # fmt: skip


def _latency(lines: list[Series], measure: str, title: str) -> Figure | None:
    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point[measure]]
        middle = [point[measure]["p50"] for point in points]
        _over_concurrency(axes, line, points, middle)
        xs = [point["concurrency"] for point in points]
        for name, dash in (("p90", "--"), ("p99", ":")):
            ys = [point[measure][name]["mean"] for point in points]
            axes.plot(xs, ys, color=line.colour, linestyle=dash, linewidth=1)
        axes.set_ylabel("ms")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())

    return _panels(lines, f"{title} (p50 solid, p90 dashed, p99 dotted)", draw)


def _over_concurrency(
    axes: Axes, line: Series, points: Points, values: list[dict[str, float]]
) -> None:
    """Draw means with the range of the repeats; an engine that has no such value draws nothing."""
    xs = [point["concurrency"] for point in points]
    if xs:
        means = [value["mean"] for value in values]
        below = [max(0.0, value["mean"] - value["min"]) for value in values]
        above = [max(0.0, value["max"] - value["mean"]) for value in values]
        axes.errorbar(
            xs, means, yerr=[below, above], color=line.colour, marker=line.marker, markersize=5,
            capsize=3, label=line.name,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlabel("concurrency (requests under way)")


def _panels(
    lines: list[Series], title: str, draw: Callable[[Axes, Series, str], None], from_zero: str = ""
) -> Figure | None:
    datasets = _datasets(lines)
    if not datasets:
        return None
    columns = min(COLUMNS, len(datasets))
    rows = -(-len(datasets) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    legend: dict[str, Any] = {}
    for axes, dataset in zip(panels, datasets, strict=False):
        axes.set_title(dataset)
        for line in lines:
            draw(axes, line, dataset)
        # not while drawing: a limit that is set stops the other one from following the lines
        if "x" in from_zero:
            axes.set_xlim(left=0)
        if "y" in from_zero:
            axes.set_ylim(bottom=0)
        if axes.get_xscale() == "log":
            _mark_levels(axes, lines, dataset)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    if not legend:
        return None
    for axes in panels[len(datasets) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=11)
    figure.legend(
        list(legend.values()), list(legend), loc="outside lower center", ncols=min(5, len(legend))
    )
    return figure


def _mark_levels(axes: Axes, lines: list[Series], dataset: str) -> None:
    levels = sorted({point["concurrency"] for line in lines for point in line.of(dataset)})
    axes.xaxis.set_major_locator(FixedLocator(levels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _datasets(lines: list[Series]) -> list[str]:
    names = dict.fromkeys(point["dataset"] for line in lines for point in line.points)
    return [name for name in names if any(line.of(name) for line in lines)]
