# SPDX-License-Identifier: Apache-2.0
"""The verify budget on a modelled B200: a simulation on paper data, not a measurement.

    python bench/simulate_budget.py [--json FILE] [--plot FILE.svg]

Target Qwen3-8B, draft of five layers, block of 16, bfloat16. A pass takes max(bytes / bandwidth,
flops / rate) + overhead. Three numbers are fitted to three published throughputs of SGLang on one
B200 (DFlash paper, arXiv 2602.06036 v2, Table 3, MATH500): plain at concurrency 1 gives the target
pass's overhead, DFlash at 1 that of draft and injection, DFlash at 32 the flops that a pass
achieves. All other published cells check the model; the first table shows by how much it misses.

Acceptance: each proposal is accepted with one chance (`--spread` 0), fitted to the published mean
acceptance length, or with chances whose log-odds are normal (`--spread` S): the budget sees them,
as if its calibration were perfect. Prefill, scheduling, sampling and exploration are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dflash.budget.planner import Limits, StepSeconds, plan_widths

BLOCK = 16
WIDTHS = (4, 8, 16)
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_REQUESTS = 1024
TASKS = {"MATH500": 7.87, "HumanEval": 6.50, "MT-Bench": 4.24, "misfit draft (assumed)": 1.5}
PUBLISHED_REQUESTS = (1, 4, 8, 16, 32)
PUBLISHED = {  # task: (tau, plain tokens/s, DFlash tokens/s)
    "MATH500": (8.01, (230, 861, 1666, 3133, 5694), (1175, 3884, 7485, 12268, 16076)),
    "HumanEval": (6.50, (229, 868, 1649, 3253, 5462), (955, 3092, 6010, 9919, 13116)),
}


@dataclass(frozen=True)
class Assumptions:
    """The machine and the models.

    Attributes:
        bandwidth: bytes/s that a pass achieves: 70 % of the data sheet's 8 TB/s.
        flops: per second that a pass achieves (fitted; the data sheet says 2.25e15 dense bf16).
        target_overhead_s: of a target pass, launches and gaps (fitted).
        draft_overhead_s: of draft and injection together (fitted).
        inject_overhead_s: of the injection alone, all that a plain step under the budget pays.
        target_params: Qwen3-8B's 36 layers and output head; the embedding is not read.
        draft_params: five such layers, and the target's output head once more.
        inject_params: projection of five captured layers, and K and V of five draft layers.
        kv_bytes_per_token: of the target: 36 layers, 8 heads of 128, K and V, 2 bytes.
        draft_kv_bytes_per_token: of the draft: 5 layers.
        context_tokens: of every request.
    """

    bandwidth: float = 0.7 * 8e12
    flops: float = 1e15
    target_overhead_s: float = 1e-3
    draft_overhead_s: float = 1e-3
    inject_overhead_s: float = 5e-5
    target_params: float = 7.57e9
    draft_params: float = 1.59e9
    inject_params: float = 1.26e8
    kv_bytes_per_token: float = 36 * 2 * 8 * 128 * 2
    draft_kv_bytes_per_token: float = 5 * 2 * 8 * 128 * 2
    context_tokens: int = 1000

    def roofline(self, params: float, rows: np.ndarray | float, kv_bytes: float) -> np.ndarray:
        """Return the seconds of a pass without overhead, for [k] numbers of rows."""
        memory = (2 * params + kv_bytes) / self.bandwidth
        return np.maximum(memory, 2 * params * np.asarray(rows, dtype=float) / self.flops)

    def target(self, n: int, rows: np.ndarray | float) -> np.ndarray:
        """Return the seconds of a target pass over rows of n requests."""
        kv_bytes = n * self.context_tokens * self.kv_bytes_per_token
        return self.roofline(self.target_params, rows, kv_bytes) + self.target_overhead_s

    def inject(self, rows: np.ndarray | float) -> np.ndarray:
        """Return the seconds of the injection of rows."""
        return self.roofline(self.inject_params, rows, 0.0) + self.inject_overhead_s

    def draft_step(self, n: int) -> StepSeconds:
        """Return the seconds of draft, verify and injection over [k] numbers of rows."""
        kv_bytes = n * self.context_tokens * self.draft_kv_bytes_per_token
        draft = self.roofline(self.draft_params, n * BLOCK, kv_bytes)
        overhead = self.draft_overhead_s - self.inject_overhead_s
        return lambda rows: draft + overhead + self.target(n, rows) + self.inject(rows)


def solve(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return where an increasing function takes a value."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return (low + high) / 2


def fitted() -> Assumptions:
    """Return the assumptions with their three published throughputs met."""
    tau, plain, dflash = PUBLISHED["MATH500"]
    base = Assumptions(target_overhead_s=0.0, draft_overhead_s=0.0)
    base = replace(base, target_overhead_s=1 / plain[0] - float(base.target(1, 1)))

    def with_flops(flops: float) -> Assumptions:
        model = replace(base, flops=flops)
        missing = tau / dflash[0] - float(model.draft_step(1)(np.array([BLOCK]))[0])
        return replace(model, draft_overhead_s=missing)

    def rate(flops: float) -> float:
        return 32 * tau / float(with_flops(flops).draft_step(32)(np.array([32 * BLOCK]))[0])

    return with_flops(solve(rate, dflash[-1], 1e14, 1e16))


@cache
def chances(tau: float, spread: float) -> np.ndarray:
    """Return [4096, B-1] chances under which a whole block commits `tau` tokens on average."""
    noise = spread * np.random.default_rng(0).standard_normal((4096, BLOCK - 1))

    def length(center: float) -> float:
        return 1 + float((1 / (1 + np.exp(-center - noise))).cumprod(axis=1).mean(axis=0).sum())

    return 1 / (1 + np.exp(-solve(length, tau, -12.0, 12.0) - noise))


def simulate(model: Assumptions, n: int, tau: float, spread: float) -> dict[str, Any]:
    """Return tokens per second of every way to decode n requests."""
    steps = max(1, 1024 // n) if spread else 1
    table = np.resize(chances(tau, spread), (steps, n, BLOCK - 1))
    seconds = model.draft_step(n)
    plain = n / float(model.target(n, n))
    mean = 1 + table.cumprod(axis=2).mean(axis=(0, 1)).cumsum()  # tokens at widths 2..B
    fixed = {w: n * mean[w - 2] / float(seconds(np.array([n * w]))[0]) for w in WIDTHS}
    rate = 0.0
    for _ in range(4 if spread else 1):  # Dinkelbach's iteration towards the long-run rate
        plans = [plan_widths(c, seconds, Limits(BLOCK), rate or None) for c in table]
        rate = sum(p.expected_tokens for p in plans) / sum(p.expected_seconds for p in plans)
    idle = n / float(model.target(n, n) + model.inject(n))  # plain, the draft's KV kept current
    rows = sum(p.num_rows for p in plans) / (steps * n)
    return {
        "concurrency": n, "plain": plain, "fixed": fixed, "budget": max(rate, idle),
        "rows_per_request": rows if rate > idle else 1.0, "drafts": rate > idle,
    }  # fmt: skip


def first_where(holds: Callable[[int], bool]) -> int | None:
    """Return the smallest concurrency at which a property holds and keeps holding, None if none."""
    if not holds(MOST_REQUESTS):
        return None
    low, high = 0, MOST_REQUESTS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def crossovers(model: Assumptions, tau: float, spread: float) -> dict[str, int | None]:
    """Return from which concurrency each fixed width loses to plain decoding, and 16 to 8."""
    at = cache(lambda n: simulate(model, n, tau, spread))
    found = {}
    for w in WIDTHS:
        found[f"fixed {w} < plain"] = first_where(lambda n, w=w: at(n)["fixed"][w] < at(n)["plain"])
    found["fixed 16 < fixed 8"] = first_where(lambda n: at(n)["fixed"][16] < at(n)["fixed"][8])
    found["budget decodes plainly"] = first_where(lambda n: not at(n)["drafts"])
    return found


def check_table(model: Assumptions) -> str:
    """Return published and modelled throughputs side by side."""
    lines = ["| task | engine | " + " | ".join(f"c{n}" for n in PUBLISHED_REQUESTS) + " |"]
    lines.append("|---" * (2 + len(PUBLISHED_REQUESTS)) + "|")
    for task, (tau, plain, dflash) in PUBLISHED.items():
        for engine, cells in (("plain", plain), ("DFlash 16", dflash)):
            row = []
            for n, cell in zip(PUBLISHED_REQUESTS, cells, strict=True):
                block = float(model.draft_step(n)(np.array([n * BLOCK]))[0])
                ours = n / float(model.target(n, n)) if engine == "plain" else n * tau / block
                row.append(f"{cell} / {ours:.0f} ({ours / cell - 1:+.0%})")
            lines.append(f"| {task} | {engine} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def speedup_table(points: list[dict[str, Any]]) -> str:
    """Return the points of one task as speed-ups over plain decoding."""
    names = " | ".join(f"fixed {w}" for w in WIDTHS)
    lines = [f"| requests | plain tokens/s | {names} | budget | rows a request |", "|---" * 7 + "|"]
    for p in points:
        ratios = [rate / p["plain"] for rate in (*p["fixed"].values(), p["budget"])]
        cells = " | ".join(f"{ratio:.2f}x" for ratio in ratios)
        rows = f"{p['rows_per_request']:.1f}" if p["drafts"] else "plain"
        lines.append(f"| {p['concurrency']} | {p['plain']:.0f} | {cells} | {rows} |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw speed-up over concurrency, one panel a task."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(4 * len(results), 3.6), sharex=True)
    for panel, (task, result) in zip(panels, results.items(), strict=True):
        points = result["points"]
        n = [p["concurrency"] for p in points]
        panel.axhline(1, color="grey", label="plain")
        for w in WIDTHS:
            panel.plot(n, [p["fixed"][w] / p["plain"] for p in points], "--", label=f"fixed {w}")
        panel.plot(n, [p["budget"] / p["plain"] for p in points], "k-o", ms=3, label="budget")
        panel.set(title=f"{task}, tau {result['tau']}", xscale="log", xlabel="requests")
    panels[0].set_ylabel("speed-up over plain (higher is better)")
    panels[0].legend(fontsize=8)
    figure.suptitle("Simulation: Qwen3-8B, DFlash block 16, one B200 (roofline, not measured)")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spread", type=float, default=0.0, help="of the chances' log-odds")
    parser.add_argument("--context-tokens", type=int, default=1000, help="after the fit")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--plot", type=Path, help="where to draw (needs matplotlib)")
    args = parser.parse_args()
    model = fitted()
    print(f"Published / modelled tokens/s\n\n{check_table(model)}")
    model = replace(model, context_tokens=args.context_tokens)
    results = {}
    for task, tau in TASKS.items():
        points = [simulate(model, n, tau, args.spread) for n in CONCURRENCY]
        crossing = crossovers(model, tau, args.spread)
        results[task] = {"tau": tau, "points": points, "crossovers": crossing}
        told = ", ".join(f"{name} from {n or f'> {MOST_REQUESTS}'}" for name, n in crossing.items())
        print(f"\n{task}, tau {tau}\n\n{speedup_table(points)}\n\nCrossovers: {told}")
    print(f"\nAssumptions: {json.dumps(asdict(model))}")
    if args.json:
        record = {"assumptions": asdict(model), "spread": args.spread, "results": results}
        args.json.write_text(json.dumps(record, indent=1))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
