# SPDX-License-Identifier: Apache-2.0
"""`offline`: each dataset as one batch through `sgl.Engine`, an engine after the other.

What a batch job sees: no HTTP, no arrivals. Each engine lives in a process of its own
(`offline_child.py`), for its environment must be there before SGLang is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.commands import check_arguments, command_of, engine_options, models_of
from bench.config import Engine, Recipe
from bench.errors import BenchError, ServerDied
from bench.folder import write_atomically
from bench.machine import shareable
from bench.manifest import describe_run
from bench.plan import Level, Point, answer_lengths
from bench.promptsets import PromptSets
from bench.summary import spread
from bench.tables import Table, as_markdown
from sglang_dflash.strict import plain

__all__ = ["describe_offline", "job_of", "run_offline", "tabulate"]

LOG_TAIL_LINES = 30
Batches = dict[str, list[list[int]]]


def run_offline(recipe: Recipe, folder: Path, out: Path | None) -> str:
    """Measure every SGLang engine of the recipe; return a Markdown table.

    Args:
        recipe: Engines, datasets, answer lengths and repeats; load levels are not used.
        folder: Where the recipe's relative paths start.
        out: Takes the record as JSON; None writes none.

    Raises:
        BenchError: something in the recipe is wrong, or an engine ends early.
    """
    engines = [engine for engine in recipe.engines if engine.is_sglang]
    if not engines:
        raise BenchError("offline needs SGLang engines: this recipe has other servers only")
    if out is not None and not out.parent.is_dir():
        raise BenchError(f"--out {out}: there is no folder {out.parent}")
    models = models_of(recipe, fetch=True)
    check_arguments(recipe, models)
    prompts = PromptSets(recipe, folder, models["target"])
    batches = {
        spec.name: prompts.of(Point("", spec.name, Level(), 0), spec.rows)
        for spec in recipe.datasets
    }
    record = {} if out is None else describe_offline(recipe, models, prompts)
    runs: list[dict[str, Any]] = []
    for engine in tqdm(engines, desc="engines"):
        runs += _measure(recipe, engine, models, batches)
    if out is not None:
        write_atomically(out, json.dumps({**record, "runs": runs}, indent=1) + "\n")
    return tabulate(runs, recipe.baseline)


def describe_offline(recipe: Recipe, models: dict[str, str], prompts: PromptSets) -> dict[str, Any]:
    """Return a record without its runs: all that is needed to repeat them."""
    options = {e.name: engine_options(recipe, e, models) for e in recipe.engines if e.is_sglang}
    return {
        **describe_run(models, prompts),
        "options": json.loads(shareable(json.dumps(options))),
        "recipe": plain(recipe),
    }


def job_of(
    recipe: Recipe, engine: Engine, models: dict[str, str], batches: Batches
) -> dict[str, Any]:
    """Return what `offline_child` is told; every engine's answers have the same lengths."""
    load = recipe.load
    return {
        "options": engine_options(recipe, engine, models),
        "sampling": {"temperature": load.temperature, "ignore_eos": load.ignore_eos,
                     **load.sampling},
        "warmup_tokens": load.warmup_tokens,
        "batches": batches,
        # by repeat and dataset
        "lengths": [
            {name: answer_lengths(load, len(batch), repeat) for name, batch in batches.items()}
            for repeat in range(load.repeats)
        ],
    }  # fmt: skip


def tabulate(runs: list[dict[str, Any]], baseline: str) -> str:
    """Return one row per dataset and engine: tokens/s, speed-up within a repeat, tau."""
    cells: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        cells.setdefault((run["dataset"], run["engine"]), {})[run["repeat"]] = run
    rows: list[tuple[str, ...]] = []
    for (dataset, engine), own in cells.items():
        base = cells.get((dataset, baseline), {})
        rates = spread([_rate(run) for run in own.values()])
        ratios = spread([_rate(run) / _rate(base[n]) for n, run in own.items() if n in base])
        steps = sum(run["steps"] for run in own.values())
        tau = 1 + sum(run["accepted"] for run in own.values()) / steps if steps else None
        assert rates is not None
        rows.append((
            dataset, engine, f"{rates['mean']:.1f} ({rates['min']:.1f}-{rates['max']:.1f})",
            "-" if ratios is None
            else f"{ratios['mean']:.2f} ({ratios['min']:.2f}-{ratios['max']:.2f})",
            "-" if tau is None else f"{tau:.2f}",
        ))  # fmt: skip
    rows.sort(key=lambda row: row[0])
    header = ("dataset", "engine", "output tokens/s (range)", "speed-up (range)", "tau")
    return as_markdown(Table("Offline, one batch per dataset", header, rows))


def _rate(run: dict[str, Any]) -> float:
    return run["tokens"] / run["seconds"]


def _measure(
    recipe: Recipe, engine: Engine, models: dict[str, str], batches: Batches
) -> list[dict[str, Any]]:
    """Return one record per repeat and dataset; the first batch of each is a warm-up."""
    job = job_of(recipe, engine, models, batches)
    environment = {**os.environ, **command_of(recipe, engine, models, 0).env}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        done = subprocess.run(
            [sys.executable, "-m", "bench.offline_child"], input=json.dumps(job), text=True,
            stdout=subprocess.PIPE, stderr=log, env=environment, check=False,
            cwd=Path(__file__).parents[1],
        )  # fmt: skip
        log.seek(0)
        tail = "\n".join(f"  | {line}" for line in log.read().splitlines()[-LOG_TAIL_LINES:])
    if done.returncode != 0:
        raise ServerDied(
            f"{engine.name}: the engine ended with exit code {done.returncode}\n{tail}"
        )
    return [{"engine": engine.name, **json.loads(line)} for line in done.stdout.splitlines()]
