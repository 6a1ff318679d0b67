# SPDX-License-Identifier: Apache-2.0
"""The sweep: servers up, points measured in the plan's order, each stored as soon as it is done."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.commands import check_arguments, command_of, models_of
from bench.config import Recipe
from bench.errors import BenchError, ServerDied
from bench.folder import RunFolder
from bench.load import Target, flush_cache, run_load
from bench.machine import shareable
from bench.manifest import describe_run, now
from bench.measures import measure
from bench.plan import (
    Level,
    Point,
    Stage,
    answer_lengths,
    levels_of,
    make_plan,
    num_prompts,
    point_seconds,
)
from bench.promptsets import PromptSets
from bench.records import PointRecord
from bench.server import Server, free_port

__all__ = ["run_sweep"]

RESTARTS = 1  # per engine and stage: a server that dies twice stays down


def run_sweep(recipe: Recipe, recipe_folder: Path, out: Path, *, resume: bool) -> bool:
    """Measure what is not measured yet; return whether every point has succeeded.

    Args:
        recipe: What to do.
        recipe_folder: Where its relative paths start.
        out: The run folder.
        resume: `out` exists and is gone on with.

    Raises:
        BenchError: something is wrong before the first point; then nothing is left behind.
    """
    models = models_of(recipe, fetch=True)
    check_arguments(recipe, models)
    prompts = PromptSets(recipe, recipe_folder, models["target"])
    opened = RunFolder.resume if resume else RunFolder.create
    folder = opened(out, recipe, _manifest(recipe, models, prompts))
    sweep = _Sweep(recipe, models, prompts, folder)
    try:
        sweep.run()
    finally:
        folder.write_data()
        if not resume:
            folder.remove_if_empty()
    return not folder.failures()


@dataclass
class _Sweep:
    """What the steps of one sweep share."""

    recipe: Recipe
    models: dict[str, str]
    prompts: PromptSets
    folder: RunFolder
    servers: dict[str, Target] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        stages = [self._left(stage) for stage in make_plan(self.recipe)]
        weights = [self._weight(point) for stage in stages for point in stage.points]
        starts = sum(len(stage.engines) for stage in stages) * self._start_weight
        form = "{l_bar}{bar}| {postfix} [{elapsed} gone, {remaining} left]"
        with tqdm(total=sum(weights) + starts, bar_format=form) as bar:
            for stage in stages:
                if stage.points:
                    self._run_stage(stage, bar)

    @property
    def _start_weight(self) -> int:
        """A server start's share of the progress bar."""
        return round(1000 * self.recipe.expect.start_s)

    def _weight(self, point: Point) -> int:
        """Return a point's share of the progress bar: its expected time, in ms."""
        return 1 + round(1000 * point_seconds(self.recipe, point.level))

    def _left(self, stage: Stage) -> Stage:
        points = tuple(point for point in stage.points if not self.folder.is_finished(point))
        needed = {point.engine for point in points}
        return Stage(tuple(name for name in stage.engines if name in needed), points)

    def _run_stage(self, stage: Stage, bar: tqdm) -> None:
        with contextlib.ExitStack() as stack:
            self.servers, self.restarts = {}, {}
            for names in self._starts(stage):
                bar.set_postfix_str(f"starting {', '.join(names)}")
                launched = [(name, self._launch(name, stack)) for name in names]
                for name, server in launched:
                    self._serve_or_note(name, server, stage)
                    bar.update(self._start_weight)
            for point in stage.points:
                bar.set_postfix_str(point.key)
                if point.engine in self.servers:
                    self._run_point(point, stack)
                else:
                    self._note(point, "not measured: its server is down")
                bar.update(self._weight(point))

    def _starts(self, stage: Stage) -> list[tuple[str, ...]]:
        """Return the engines that are started at once, one group after the other."""
        alone = [name for name in stage.engines if self.recipe.engine(name).starts_alone]
        others = tuple(name for name in stage.engines if name not in alone)
        return [group for group in (others, *((name,) for name in alone)) if group]

    def _serve_or_note(self, name: str, server: Server, stage: Stage) -> None:
        """Wait for a server; where points exist already, a failure costs this engine only."""
        try:
            self._serve(name, server)
        except BenchError as error:
            if not self.folder.records():
                raise
            for point in stage.points:
                if point.engine == name:
                    self._note(point, str(error))

    def _launch(self, name: str, stack: contextlib.ExitStack) -> Server:
        engine = self.recipe.engine(name)
        base = self.recipe.servers.port
        number = [e.name for e in self.recipe.engines].index(name)
        port = free_port() if base is None else base + number
        command = command_of(self.recipe, engine, self.models, port)
        log = self.folder.logs / f"{name}.log"
        return stack.enter_context(Server(name, command, port, log, sglang=engine.is_sglang))

    def _serve(self, name: str, server: Server) -> None:
        """Wait until the server answers, warm it up, and measure it from now on."""
        server.wait_ready(self.recipe.servers.start_timeout_s)
        model = self.recipe.engine(name).model or self.models["target"]
        target = Target(server, model, self.prompts.count_tokens)
        for level in levels_of(self.recipe.load):
            self._warm_up(target, level)
        self.servers[name] = target

    def _warm_up(self, target: Target, level: Level) -> None:
        """Ask one short wave, so that nothing is compiled or captured while measured."""
        wave = self.prompts.some(level.concurrency or 1)
        records = run_load(
            target, wave, Level(concurrency=len(wave)), self.recipe.load,
            lengths=[self.recipe.load.warmup_tokens] * len(wave),
        )  # fmt: skip
        errors = [record.error for record in records if record.error is not None]
        if len(errors) == len(records):
            raise ServerDied(f"{target.server.name}: it answers no request: {errors[0]}")

    def _run_point(self, point: Point, stack: contextlib.ExitStack) -> None:
        target = self.servers[point.engine]
        try:
            record = self._measured(point, target)
        except BenchError as error:
            self._note(point, str(error))
            self._restart(point.engine, stack)
            return
        self.folder.write_point(record)
        tqdm.write(_line(record))

    def _measured(self, point: Point, target: Target) -> PointRecord:
        recipe = self.recipe
        prompts = self.prompts.of(point, num_prompts(recipe.load, point.level))
        flushed = flush_cache(target.server)
        lengths = answer_lengths(recipe.load, len(prompts), point.repeat)
        requests = run_load(target, prompts, point.level, recipe.load, lengths=lengths)
        if all(request.error is not None for request in requests):
            raise BenchError(f"{point.key}: every request failed: {requests[0].error}")
        memory, kind = target.server.memory_bytes()
        return PointRecord(
            point=point,
            memory_bytes=memory,
            memory_kind=kind,
            has_text=self.prompts.has_text(point.dataset),
            finished=now(),
            requests=tuple(requests),
            cache_flushed=flushed,
        )

    def _restart(self, name: str, stack: contextlib.ExitStack) -> None:
        """Take down a server that failed and start it anew; a second failure is final."""
        self.servers.pop(name).server.stop()
        self.restarts[name] = self.restarts.get(name, 0) + 1
        if self.restarts[name] <= RESTARTS:
            try:
                self._serve(name, self._launch(name, stack))
            except BenchError as error:
                tqdm.write(f"{name} does not come back: {error}")

    def _note(self, point: Point, reason: str) -> None:
        self.folder.write_failure(point, reason)
        tqdm.write(f"{point.key}: FAILED: {reason}")


def _manifest(recipe: Recipe, models: dict[str, str], prompts: PromptSets) -> dict[str, Any]:
    commands = {
        engine.name: shareable(str(command_of(recipe, engine, models, 0)))
        for engine in recipe.engines
    }
    return {**describe_run(models, prompts), "commands": commands, "seed": recipe.load.seed}


def _line(record: PointRecord) -> str:
    found = measure(record)
    rate = f"{found['output_tokens_per_s']:9.1f} tokens/s" if "ttft_ms" in found else "no tokens"
    tau = f", tau {1 + found['accepted'] / found['steps']:.2f}" if found["steps"] else ""
    errors = f", {found['errors']} ERRORS" if found["errors"] else ""
    cache = "" if record.cache_flushed else ", PREFIX CACHE NOT EMPTIED"
    return f"{record.point.key:<40} {rate}{tau}{errors}{cache}"
