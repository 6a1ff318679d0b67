# SPDX-License-Identifier: Apache-2.0
"""How well the predicted chances of proposals agree with what verify accepts, on a real engine.

    python -m bench.calibration

Reliability of the engine's chances in its first 100 steps and after 2,000, on three kinds of real
prompts; for the late steps also of what the engine started from, and of the draft's own
probabilities. A proposal counts where it was verified and all before it were accepted. Beside each
expected calibration error stands what chance alone makes of perfect predictions in as many draws.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from bench.traced import Load, arguments, parsed, traced_engine
from sglang_dflash.budget.calibration import Calibrator, observed
from sglang_dflash.budget.reliability import Reliability, reliability
from sglang_dflash.trace import Trace

BINS = 10
DRAWS = 200


class Judged(NamedTuple):
    """The proposals of some steps that verify judged; all [k].

    Attributes:
        confidence: the draft's probability.
        chances: as the engine predicted them.
        prior: as an engine that has seen nothing would.
        accepted: bool.
    """

    confidence: torch.Tensor
    chances: torch.Tensor
    prior: torch.Tensor
    accepted: torch.Tensor


def judged(steps: list[dict[str, Any]], block_size: int) -> Judged:
    """Return what was judged in these steps."""
    fresh = Calibrator(block_size)
    found = []
    for step in (step for step in steps if step["confidence"] is not None):
        confidence = torch.tensor(step["confidence"])
        widths, accepted = torch.tensor(step["widths"]), torch.tensor(step["accepted"])
        seen, kept = observed(confidence.shape[1], widths, accepted)
        prior = fresh.chances(confidence, torch.zeros(len(widths), dtype=torch.bool))
        columns = (confidence, torch.tensor(step["chances"]), prior, kept)
        found.append([column[seen] for column in columns])
    if not found:
        raise SystemExit("no step of the window drafted: ask for fewer requests at a time")
    return Judged(*(torch.cat(column) for column in zip(*found, strict=True)))


def curve_of(chances: torch.Tensor, accepted: torch.Tensor) -> Reliability:
    """Return the reliability diagram of [k] predictions."""
    return reliability(chances[None], torch.ones_like(accepted)[None], accepted[None], BINS)


def by_chance_alone(chances: torch.Tensor) -> float:
    """Return the mean calibration error of perfect predictions in as many draws."""
    generator = torch.Generator().manual_seed(0)
    errors = [
        curve_of(chances, torch.rand(chances.shape, generator=generator) < chances)
        .expected_calibration_error()
        .item()
        for _ in range(DRAWS)
    ]
    return float(np.mean(errors))


def rows_of(trace: Trace, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row a curve."""
    early = judged(trace.steps[: args.early], trace.block_size)
    late = judged(trace.steps[args.late :], trace.block_size)
    wanted = [
        (f"first {args.early} steps", early.chances, early.accepted),
        (f"after {args.late} steps", late.chances, late.accepted),
        (f"after {args.late}, as at the start", late.prior, late.accepted),
        (f"after {args.late}, the draft's own", late.confidence, late.accepted),
    ]
    rows = []
    for name, chances, accepted in wanted:
        curve = curve_of(chances, accepted)
        rows.append(
            {
                "name": name, "proposals": len(chances),
                "error": curve.expected_calibration_error().item(),
                "error_by_chance_alone": by_chance_alone(chances),
                "predicted": chances.mean().item(), "accepted": accepted.float().mean().item(),
                "curve": {key: values.tolist() for key, values in curve._asdict().items()},
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| chances | proposals | calibration error | by chance alone | predicted | accepted |",
        "|---" * 6 + "|",
    ]
    lines += [
        f"| {r['name']} | {r['proposals']} | {r['error']:.3f} | {r['error_by_chance_alone']:.3f} | "
        f"{r['predicted']:.3f} | {r['accepted']:.3f} |"
        for r in rows
    ]
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]]) -> Figure:
    """Draw a diagram a row, with one standard error of each bin."""
    figure = Figure(figsize=(4 * len(rows), 4.2), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), sharey=True), rows, strict=True):
        counts, sums, accepted = (np.array(values) for values in row["curve"].values())
        used = counts > 0
        counts, chance = counts[used], sums[used] / counts[used]
        share = accepted[used] / counts
        spread = np.sqrt(chance * (1 - chance) / counts)
        axes.plot([0, 1], [0, 1], color="#888888", lw=1)
        axes.errorbar(chance, share, yerr=spread, fmt="o-", color="#0072B2", ms=4, capsize=2)
        axes.bar(chance, counts / counts.sum(), width=0.03, color="#E69F00", alpha=0.6)
        axes.set(title=f"{row['name']}\nerror {row['error']:.3f}, by chance alone "
                 f"{row['error_by_chance_alone']:.3f}", xlabel="predicted chance")  # fmt: skip
        axes.title.set_fontsize(9)
    figure.axes[0].set_ylabel("accepted (bars: share of the proposals)")
    return figure


def main() -> None:
    """Run, print, store and draw."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--early", type=int, help="steps; default 100, 40 if quick")
    parser.add_argument("--late", type=int, help="from this step on; default 2000, 150 if quick")
    parser.add_argument("--more", type=int, help="steps after these; default 600, 60 if quick")
    args = parsed(parser, "cpu-calibration")
    for name, quick, full in (("early", 40, 100), ("late", 150, 2000), ("more", 60, 600)):
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    wanted = args.late + args.more
    with traced_engine(args) as engine, tqdm(total=wanted, desc="steps") as bar:
        while (done := len(engine.trace().steps)) < wanted:
            bar.update(min(done, wanted) - bar.n)
            engine.serve(Load(args.concurrency, requests=3))
        trace = engine.trace()
    rows = rows_of(trace, args)
    print(table(rows))
    result = engine.manifest | {"concurrency": args.concurrency, "steps": len(trace.steps)}
    args.out.with_suffix(".json").write_text(json.dumps(result | {"curves": rows}, indent=1))
    plot(rows).savefig(args.out.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
