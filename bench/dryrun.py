# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: every server's command line, read by SGLang's own parser, and the plan."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from bench.commands import check_arguments, command_of, models_of
from bench.config import Recipe
from bench.plan import Level, Stage, levels_of, make_plan, num_prompts, point_seconds, total_seconds
from bench.prompts import load_prompts

__all__ = ["describe_sweep"]

FIRST_PORT = 30000  # shown where free ports would be taken


def describe_sweep(recipe: Recipe, folder: Path) -> str:
    """Return what a sweep would run; nothing is started, fetched or written.

    Raises:
        BenchError: SGLang's parser refuses an engine's arguments, or a file is missing.
    """
    models = models_of(recipe, fetch=False)
    check_arguments(recipe, models)
    stages = make_plan(recipe)
    first = recipe.servers.port or FIRST_PORT
    commands = [
        f"{engine.name}\n  {command_of(recipe, engine, models, first + number)}"
        for number, engine in enumerate(recipe.engines)
    ]
    parts = [
        f"# {recipe.name}: {len(recipe.engines)} engines, {len(recipe.datasets)} datasets, "
        f"{recipe.load.repeats} repeats; speed-ups over {recipe.baseline}",
        "## Servers (SGLang's parser accepts the arguments)",
        *commands,
        "## Prompts",
        *_datasets(recipe, folder),
        "## Plan",
        *(_level(recipe, level) for level in levels_of(recipe.load)),
        _order(stages),
        f"{sum(len(stage.points) for stage in stages)} points, "
        f"{sum(len(stage.engines) for stage in stages)} server starts, expected duration "
        f"{timedelta(seconds=round(total_seconds(recipe, stages)))} (h:mm:ss)",
    ]
    return "\n".join(parts)


def _datasets(recipe: Recipe, folder: Path) -> list[str]:
    lines = []
    for spec in recipe.datasets:
        if spec.random_tokens is not None:
            lines.append(f"{spec.name}: {spec.random_tokens} random tokens each; no tau")
        elif spec.path is None and spec.source == "hub":
            lines.append(f"{spec.name}: from the hub, at most {spec.rows} prompts")
        else:
            prompts = load_prompts(spec, recipe.load.seed, folder)
            lines.append(
                f"{spec.name}: {prompts.source}, {len(prompts.texts)} prompts, sha256 "
                f"{prompts.sha256[:16]}"
            )
    return lines


def _level(recipe: Recipe, level: Level) -> str:
    name = (
        f"concurrency {level.concurrency}"
        if level.concurrency
        else f"{level.request_rate:g} requests/s (Poisson)"
    )
    return (
        f"{name}: up to {num_prompts(recipe.load, level)} requests of up to "
        f"{recipe.load.max_new_tokens} tokens, about {point_seconds(recipe, level):.0f} s a point"
    )


def _order(stages: list[Stage]) -> str:
    if len(stages) == 1:
        first = [point.engine for point in stages[0].points[: 2 * len(stages[0].engines)]]
        return f"all servers alive at once, interleaved: {' '.join(first)} ..."
    turns = " ".join(engine for stage in stages for engine in stage.engines)
    return f"one server at a time: {turns}"
