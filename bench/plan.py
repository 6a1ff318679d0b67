# SPDX-License-Identifier: Apache-2.0
"""The order in which points are measured, and how long that should take."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from bench.config import Load, Recipe

__all__ = ["Level", "Point", "Stage", "answer_lengths", "levels_of", "make_plan", "num_prompts",
           "point_seconds", "total_seconds"]  # fmt: skip


class Level(NamedTuple):
    """A load: exactly one of the two is set."""

    concurrency: int | None = None
    request_rate: float | None = None

    def __str__(self) -> str:
        return f"c{self.concurrency}" if self.concurrency else f"rate{self.request_rate:g}"


class Point(NamedTuple):
    """One measurement."""

    engine: str
    dataset: str
    level: Level
    repeat: int

    @property
    def key(self) -> str:
        """Its file's name."""
        return f"{self.engine}.{self.dataset}.{self.level}.r{self.repeat}"


class Stage(NamedTuple):
    """Servers that are alive together, and the points measured meanwhile, in order."""

    engines: tuple[str, ...]
    points: tuple[Point, ...]


def levels_of(load: Load) -> list[Level]:
    """Return the load levels, closed loop first."""
    closed = [Level(concurrency=number) for number in load.concurrency]
    return closed + [Level(request_rate=rate) for rate in load.request_rates]


def make_plan(recipe: Recipe) -> list[Stage]:
    """Return the stages.

    Servers that live together are measured in turn at each point (A B C, then B C A, ...), so that
    a drift of the machine meets all of them. Otherwise each repeat starts every engine once, in
    the reverse of the order before.
    """
    names = [engine.name for engine in recipe.engines]
    cells = [(d.name, level) for d in recipe.datasets for level in levels_of(recipe.load)]
    if recipe.servers.together:
        points = [
            Point(engine, dataset, level, repeat)
            for repeat in range(recipe.load.repeats)
            for number, (dataset, level) in enumerate(cells)
            for engine in _turned(names, repeat + number)
        ]
        return [Stage(tuple(names), tuple(points))]
    return [
        Stage((engine,), tuple(Point(engine, *cell, repeat) for cell in cells))
        for repeat in range(recipe.load.repeats)
        for engine in (names if repeat % 2 == 0 else names[::-1])
    ]


def num_prompts(load: Load, level: Level) -> int:
    """Return how many requests a point has."""
    if level.concurrency:
        return max(load.min_prompts, load.prompts_per_slot * level.concurrency)
    assert level.request_rate is not None
    return max(load.min_prompts, math.ceil(level.request_rate * load.rate_seconds))


def answer_lengths(load: Load, count: int, repeat: int = 0) -> list[int]:
    """Return how many tokens each of a point's answers may have: the same for every engine.

    Args:
        load: `random_range_ratio` of `max_new_tokens` is the shortest.
        count: Answers.
        repeat: Each repeat has lengths of its own.
    """
    die = np.random.default_rng((load.seed, repeat))
    lengths = die.integers(load.shortest_answer, load.max_new_tokens, endpoint=True, size=count)
    return lengths.tolist()


def point_seconds(recipe: Recipe, level: Level) -> float:
    """Return about how long a point takes, were every answer of full length."""
    if level.request_rate:
        return recipe.load.rate_seconds
    assert level.concurrency is not None
    tokens = num_prompts(recipe.load, level) * recipe.load.max_new_tokens
    return tokens / _interpolated(recipe.expect.tokens_per_s, level.concurrency)


def total_seconds(recipe: Recipe, stages: list[Stage]) -> float:
    """Return about how long the stages take."""
    starts = sum(len(stage.engines) for stage in stages) * recipe.expect.start_s
    return starts + sum(point_seconds(recipe, p.level) for stage in stages for p in stage.points)


def _turned(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _interpolated(table: dict[int, float], concurrency: int) -> float:
    """Return the table's value, log-log between its entries and flat outside."""
    xs = sorted(table)
    if concurrency <= xs[0] or concurrency >= xs[-1]:
        return table[xs[0] if concurrency <= xs[0] else xs[-1]]
    right = next(x for x in xs if x >= concurrency)
    left = xs[xs.index(right) - 1]
    share = math.log(concurrency / left) / math.log(right / left)
    return table[left] * (table[right] / table[left]) ** share
