# SPDX-License-Identifier: Apache-2.0
"""How the verify budget follows a load that changes, step by step on a real engine.

    python -m bench.changing_load

1 -> 32 -> 1 requests at a time, all of them code; then code -> chat -> code at 2. The plan has
followed a change at the first step from which 20 steps verify, on average, as many rows a request
as the second half of the phase does, within a quarter or half a row.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from tqdm import tqdm

from bench.traced import Load, arguments, parsed, traced_engine

WINDOW = 20  # steps
TOLERANCE, LEAST_TOLERANCE = 0.25, 0.5  # of the rows a request, and in rows
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#888888")


class Phase(NamedTuple):
    """A load and its name."""

    name: str
    load: Load


def phases(args: argparse.Namespace) -> list[Phase]:
    """Return the loads, in order."""
    few, many = (2, 1) if args.quick else (6, 3)
    code, chat = ("code",), ("chat",)
    most = args.concurrency
    return [
        Phase("1, code", Load(1, code, few)),
        Phase(f"{most}, code", Load(most, code, many)),
        Phase("1, code", Load(1, code, few)),
        Phase("2, code", Load(2, code, few)),
        Phase("2, chat", Load(2, chat, few)),
        Phase("2, code", Load(2, code, few)),
    ]


def columns(steps: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the steps as columns, one entry a step; tokens and rows are of one request."""
    return {
        "time": [s["time"] for s in steps],
        "requests": [s["requests"] for s in steps],
        "draft_rows": [s["draft_width"] for s in steps],
        "rows": [round(float(np.mean(s["widths"])), 3) for s in steps],
        "explores": [s["explores"] for s in steps],
        "expected_tokens": [round(s["expected_tokens"] / s["requests"], 4) for s in steps],
        "tokens": [round(s["tokens"] / s["requests"], 4) for s in steps],
        "seconds": [s["seconds"] for s in steps],
    }


def rolling(values: list[float], window: int = WINDOW) -> np.ndarray:
    """Return the mean of each step and those that follow, `window` in all, fewer at the end."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.minimum(np.arange(len(values)) + window, len(values))
    return (sums[ends] - sums[:-1]) / (ends - np.arange(len(values)))


def summarise(data: dict[str, list[Any]], starts: list[int], names: list[str]) -> list[dict]:
    """Return for each phase what was planned, and after how many steps the plan had followed."""
    rows = []
    for name, first, end in zip(names, starts, [*starts[1:], len(data["time"])], strict=True):
        own = {key: values[first:end] for key, values in data.items()}
        half = len(own["rows"]) // 2
        full = np.array(own["requests"][half:]) == max(own["requests"])  # not the last stragglers
        final = float(np.mean(np.array(own["rows"][half:])[full]))
        off = np.abs(rolling(own["rows"]) - final) > max(LEAST_TOLERANCE, TOLERANCE * final)
        followed = len(off) if off.all() else int(off.argmin())
        seconds = [s for s in own["seconds"][half:] if s is not None]
        rows.append(
            {
                "phase": name, "steps": end - first, "rows": final,
                "drafted": float(np.mean([width > 1 for width in own["draft_rows"][half:]])),
                "expected_tokens": float(np.mean(own["expected_tokens"][half:])),
                "tokens": float(np.mean(own["tokens"][half:])),
                "seconds": float(np.median(seconds)), "followed_after": followed,
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the phases as Markdown."""
    lines = [
        "| phase | steps | plan followed after | rows a request | with the draft | tokens expected"
        " | seen | ms a step |",
        "|---" * 8 + "|",
    ]
    lines += [
        f"| {r['phase']} | {r['steps']} | {r['followed_after']} | {r['rows']:.2f} | "
        f"{r['drafted']:.0%} | {r['expected_tokens']:.2f} | {r['tokens']:.2f} | "
        f"{1000 * r['seconds']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def plot(data: dict[str, list[Any]], starts: list[int], rows: list[dict[str, Any]]) -> Figure:
    """Draw requests, rows, tokens and time over the steps."""
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    load, plan, tokens, time = figure.subplots(4, 1, sharex=True, height_ratios=(1, 2, 1.5, 1.5))
    steps = np.arange(len(data["rows"]))
    load.step(steps, data["requests"], where="post", color=COLOURS[3])
    load.set(ylabel="requests", yscale="log", yticks=(1, 2, 8, 32), yticklabels=(1, 2, 8, 32))
    plan.plot(steps, data["rows"], ".", ms=3, color=COLOURS[0], label="verified rows")
    plan.plot(steps, data["draft_rows"], ".", ms=2, color=COLOURS[3], label="drafted rows")
    ahead = {key: _by_phase(data[key], starts) for key in ("rows", "expected_tokens", "tokens")}
    plan.plot(steps, ahead["rows"], color=COLOURS[1], label=f"verified, next {WINDOW}")
    plan.set_ylabel("rows of a request")
    tokens.plot(steps, ahead["expected_tokens"], color=COLOURS[0], label="expected")
    tokens.plot(steps, ahead["tokens"], color=COLOURS[1], label="seen")
    tokens.set_ylabel(f"tokens of a request,\nnext {WINDOW} steps")
    milliseconds = [np.nan if s is None else 1000 * s for s in data["seconds"]]
    time.plot(steps, milliseconds, ".", ms=3, color=COLOURS[2])
    time.set(ylabel="ms a step", xlabel="decode step", yscale="log")
    for axis in (load.yaxis, time.yaxis):
        axis.set_minor_formatter(NullFormatter())
    time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    time.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes in (plan, tokens):
        axes.legend(loc="upper right", ncols=3, fontsize=8)
    _mark((load, plan, tokens, time), starts, rows)
    figure.suptitle("The plan after each change of load (requests at a time, prompts)")
    return figure


def _by_phase(values: list[float], starts: list[int]) -> np.ndarray:
    """Return the rolling mean within each phase."""
    parts = zip(starts, [*starts[1:], len(values)], strict=True)
    return np.concatenate([rolling(values[first:end]) for first, end in parts])


def _mark(panels: tuple[Axes, ...], starts: list[int], rows: list[dict[str, Any]]) -> None:
    for first, row in zip(starts, rows, strict=True):
        for axes in panels:
            axes.axvline(first, color="black", lw=0.8)
        panels[1].axvspan(first, first + row["followed_after"], color=COLOURS[1], alpha=0.15)
        text = f"{row['phase']}\nafter {row['followed_after']}"
        panels[0].annotate(text, (first, 1), (3, -3), xycoords=("data", "axes fraction"),
                           textcoords="offset points", va="top", fontsize=8)  # fmt: skip


def main() -> None:
    """Run, print, store and draw."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=int, default=32, help="of the second phase")
    args = parsed(parser, "cpu-changing-load")
    plans = phases(args)
    with traced_engine(args) as engine:
        engine.serve(Load(1, ("maths",)))
        begins = [engine.serve(phase.load) for phase in tqdm(plans, desc="phases")]
        trace = engine.trace()
    steps = [step for step in trace.steps if step["time"] >= begins[0]]
    starts = [next(i for i, s in enumerate(steps) if s["time"] >= begin) for begin in begins]
    data = columns(steps)
    rows = summarise(data, starts, [phase.name for phase in plans])
    print(table(rows))
    result = engine.manifest | {
        "block_size": trace.block_size, "phases": rows, "starts": starts, "steps": data,
    }  # fmt: skip
    args.out.with_suffix(".json").write_text(json.dumps(result))
    plot(data, starts, rows).savefig(args.out.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
