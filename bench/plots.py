# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, drawn by matplotlib: a panel per dataset, a line per engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import wrap
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
LEAST_WIDTH = 6.5  # of a figure with one panel; its title and legend need so much
# Okabe and Ito's, told apart by colour-blind readers too; the baseline is grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*"
GREY = "#888888"
CORNERS = ((6, 4), (6, -9), (-6, 4), (-6, -9))  # points from a marker to its label, in turn
APART = 0.09  # between two lines at one load, in doublings; a place on an axis of whole numbers
LEAST_RATIO = 8.0  # of a log axis's ends, so that it has marks to read

RANGE = "bars: range of the repeats"

Points = list[dict[str, Any]]


class Series(NamedTuple):
    """One engine of one run, and how it is drawn.

    Attributes:
        name: In the legend.
        colour: Of all that is its own.
        marker: Likewise.
        is_baseline: Whether speed-ups are taken over it.
        points: Its points of the summary.
        number: Its place among the lines.
        shift: How far it stands from the load it belongs to, so that equal lines are all seen.
    """

    name: str
    colour: str
    marker: str
    is_baseline: bool
    points: Points
    number: int
    shift: float

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
    most = sum(len(run.recipe.engines) for run in runs)
    for run in runs:
        for engine in run.recipe.engines:
            points = [point for point in run.points if point["engine"] == engine.name]
            base = engine.name == run.recipe.baseline
            colour = GREY if base else COLOURS[coloured % len(COLOURS)]
            marker = MARKERS[len(lines) % len(MARKERS)]
            coloured += not base
            if points:
                name = shown_engine(run, engine.name, runs)
                shift = (len(lines) - (most - 1) / 2) * min(APART, 0.5 / most)
                lines.append(Series(name, colour, marker, base, points, len(lines), shift))
    return lines


@contextmanager
def style(salt: str) -> Iterator[None]:
    """Draw with these settings; `salt` keeps the identifiers of several SVGs in a page apart."""
    settings: Any = {
        "svg.hashsalt": salt, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3,
        "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
        "legend.frameon": False, "figure.facecolor": "white",
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield


def throughput(lines: list[Series]) -> Figure | None:
    """Throughput against interactivity: up and to the right is better."""

    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point["tokens_per_s_per_user"]]
        across = [point["tokens_per_s_per_user"] for point in points]
        up = [point["output_tokens_per_s"] for point in points]
        xs, ys = ([value["mean"] for value in values] for values in (across, up))
        if points:
            axes.errorbar(
                xs, ys, xerr=_range(across), yerr=_range(up), color=line.colour, markersize=5,
                marker=line.marker, label=line.name, elinewidth=0.7,
            )  # fmt: skip
        offset = CORNERS[line.number % len(CORNERS)]
        for x, y, point in zip(xs, ys, points, strict=True):
            axes.annotate(
                load_name(point), (x, y), textcoords="offset points", xytext=offset, fontsize=8,
                color=line.colour, ha="left" if offset[0] > 0 else "right",
            )  # fmt: skip
        axes.margins(0.08)
        axes.set(xlabel="tokens/s per user (1 / mean TPOT)", ylabel="output tokens/s, all users")

    title = "Throughput against interactivity: up and right is better"
    note = "numbers: concurrency; bars: range of the repeats"
    return _panels(lines, title, draw, note=note, from_zero="xy")


def speedup(lines: list[Series]) -> Figure | None:
    """Speed-up over the baseline: higher is better."""

    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point["speedup"]]
        if line.is_baseline:
            axes.axhline(1, color=GREY, linewidth=1.2, label=line.name)
            return
        _over_concurrency(axes, line, points, [point["speedup"] for point in points])
        axes.set_ylabel("speed-up over the baseline")

    title = "Speed-up against concurrency: higher is better"
    return _panels(lines, title, draw, note=RANGE, from_zero="y", alike=True)


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
                axes.annotate(
                    f"{middle:.2f}", (x, max(means)), textcoords="offset points", xytext=(0, 3),
                    ha="center", fontsize=8,
                )  # fmt: skip
    axes.axhline(1, color=GREY, linewidth=1.2, linestyle="--", label="no proposal accepted")
    axes.set_xticks(range(len(datasets)), datasets)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    axes.set_ylabel("tokens per verify step (tau)")
    axes.set_title("Acceptance length by prompt kind: higher is better\n(bars: range over "
                   "concurrency)")  # fmt: skip
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def positions(lines: list[Series]) -> Figure | None:
    """Share of verify steps that accepted at least so many proposals, at the lowest load."""
    shares = [p["acceptance_by_position"] or () for line in lines for p in line.points]
    longest = max(map(len, shares), default=0)

    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point["acceptance_by_position"]]
        if points:
            found = points[0]["acceptance_by_position"]
            shares = [*found, *[0.0] * (longest - len(found))]  # no step came so far
            xs = [position + line.shift for position in range(1, longest + 1)]
            axes.plot(
                xs, shares, color=line.colour, marker=line.marker, label=line.name, markersize=5
            )
        axes.set(xlabel="proposal's position in the block", ylabel="share of steps that accept it")
        axes.set_ylim(-0.02, 1)  # a marker at 0 is whole
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    title = "Acceptance by position: higher is better"
    note = (
        "lowest concurrency; of all verify steps, those that did not verify the position included"
    )
    return _panels(lines, title, draw, note=note, alike=True)


def widths(lines: list[Series]) -> Figure | None:
    """Mean rows verified per step of a request."""

    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point["mean_verify_width"]]
        _over_concurrency(axes, line, points, [point["mean_verify_width"] for point in points])
        axes.set_ylabel("verified rows per step")

    title = "Verify width against concurrency"
    return _panels(lines, title, draw, note=RANGE, from_zero="y", alike=True)


def ttft(lines: list[Series]) -> Figure | None:
    """Time to the first token: lower is better."""
    return _latency(lines, "ttft_ms", "Time to first token: lower is better")


def tpot(lines: list[Series]) -> Figure | None:
    """Time per output token: lower is better."""
    title = "Time per output token, (E2E - TTFT) / (tokens - 1): lower is better"
    return _latency(lines, "tpot_ms", title)


FIGURES: dict[str, Callable[[list[Series]], Figure | None]] = {
    "throughput": throughput, "speedup": speedup, "tau": tau, "positions": positions,
    "widths": widths, "ttft": ttft, "tpot": tpot,
}  # fmt: skip


def _latency(lines: list[Series], measure: str, title: str) -> Figure | None:
    def draw(axes: Axes, line: Series, dataset: str) -> None:
        points = [point for point in line.of(dataset) if point[measure]]
        xs = [point["concurrency"] * 2**line.shift for point in points]
        p50, p90, p99 = (
            [point[measure][name]["mean"] for point in points] for name in ("p50", "p90", "p99")
        )
        if points:
            axes.plot(
                xs, p50, color=line.colour, marker=line.marker, markersize=5, linewidth=0.8,
                label=line.name,
            )  # fmt: skip
            axes.vlines(xs, p50, p90, color=line.colour, linewidth=3, alpha=0.6)
            axes.vlines(xs, p90, p99, color=line.colour, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="concurrency (requests under way)", ylabel="ms", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())

    note = "marker: p50, thick to p90, thin to p99; means of the repeats"
    return _panels(lines, title, draw, note=note, alike=True)


def _over_concurrency(
    axes: Axes, line: Series, points: Points, values: list[dict[str, float]]
) -> None:
    """Draw means with the range of the repeats; an engine that has no such value draws nothing."""
    xs = [point["concurrency"] * 2**line.shift for point in points]
    if xs:
        axes.errorbar(
            xs, [value["mean"] for value in values], yerr=_range(values), color=line.colour,
            marker=line.marker, markersize=5, capsize=3, label=line.name,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlabel("concurrency (requests under way)")


def _range(values: list[dict[str, float]]) -> list[list[float]]:
    """Return how far the smallest and the largest repeat are from each mean."""
    below = [max(0.0, value["mean"] - value["min"]) for value in values]
    return [below, [max(0.0, value["max"] - value["mean"]) for value in values]]


def _panels(
    lines: list[Series], title: str, draw: Callable[[Axes, Series, str], None], *, note: str,
    from_zero: str = "", alike: bool = False,
) -> Figure | None:  # fmt: skip
    """Return a figure with a panel per dataset.

    Args:
        lines: What is drawn, in this order.
        title: What it is, and which way is better.
        draw: Draws one line into one panel.
        note: What bars and labels stand for.
        from_zero: Axes that begin at 0, of "xy".
        alike: Whether all panels have one vertical scale.
    """
    datasets = _datasets(lines)
    if not datasets:
        return None
    columns = min(COLUMNS, len(datasets))
    rows = -(-len(datasets) // columns)
    width = max(LEAST_WIDTH, PANEL[0] * columns)
    figure = Figure(figsize=(width, PANEL[1] * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=alike).flatten()
    legend: dict[str, Any] = {}
    for axes, dataset in zip(panels, datasets, strict=False):
        axes.set_title(dataset)
        axes.tick_params(labelleft=True)
        for line in lines:
            draw(axes, line, dataset)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    if not legend:
        return None
    for axes, dataset in zip(panels, datasets, strict=False):
        _set_scales(axes, from_zero)
        if axes.get_xscale() == "log":
            _mark_levels(axes, lines, dataset)
    for axes in panels[len(datasets) :]:
        axes.set_axis_off()
    titles = [part for text in (title, f"({note})") for part in wrap(text, round(11 * width))]
    figure.suptitle("\n".join(titles), fontsize=11)
    figure.legend(
        list(legend.values()), list(legend), loc="outside lower center", ncols=min(5, len(legend))
    )
    return figure


def _set_scales(axes: Axes, from_zero: str) -> None:
    """Set the ends of a panel's axes; after drawing, for a limit that is set follows no line."""
    if "x" in from_zero:
        axes.set_xlim(left=0)
    if "y" in from_zero:
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log" and high / low < LEAST_RATIO:
        wider = (LEAST_RATIO / (high / low)) ** 0.5
        axes.set_ylim(low / wider, high * wider)


def _mark_levels(axes: Axes, lines: list[Series], dataset: str) -> None:
    levels = sorted({point["concurrency"] for line in lines for point in line.of(dataset)})
    axes.xaxis.set_major_locator(FixedLocator(levels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _datasets(lines: list[Series]) -> list[str]:
    names = dict.fromkeys(point["dataset"] for line in lines for point in line.points)
    return [name for name in names if any(line.of(name) for line in lines)]
