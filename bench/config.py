# SPDX-License-Identifier: Apache-2.0
"""A recipe: what is served, asked and measured, read from YAML and checked before anything runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.errors import BenchError
from bench.strict import build

__all__ = ["DatasetSpec", "Engine", "Expect", "Load", "Published", "PublishedRow", "Recipe",
           "Servers", "load_recipe"]  # fmt: skip

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")  # becomes part of a file's name


@dataclass(frozen=True)
class Engine:
    """A server under test.

    Attributes:
        name: Letters, digits, `-`, `_` and `+`; the series' name in tables and plots.
        args: Further arguments of `sglang.launch_server`. `{target}`, the names under `models` and
            `{bench}` (this folder) are filled in.
        env: Further environment variables, filled in likewise.
        command: Instead of SGLang: the command line of any OpenAI-compatible server, with `{port}`.
        model: What such a server calls the model; the target's path or hub name where None.
        starts_alone: Whether it is started when the other servers are up, and none beside it: it
            measures its machine while it starts.
    """

    name: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    model: str | None = None
    starts_alone: bool = False

    def __post_init__(self) -> None:
        _require_name(self.name)
        if self.command and self.args:
            raise ValueError(f"engine {self.name}: give either 'args' (SGLang) or 'command'")
        if self.command and not any("{port}" in part for part in self.command):
            raise ValueError(f"engine {self.name}: 'command' must say where {{port}} goes")

    @property
    def is_sglang(self) -> bool:
        """Whether SGLang's own API is there."""
        return not self.command


@dataclass(frozen=True)
class DatasetSpec:
    """Where prompts come from: the sample in this repository, a file, the hub, or a die.

    Attributes:
        name: A known set ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "speed-bench"), or
            any name beside `path` or `random_tokens`.
        path: JSONL with `turns`, `question` or `prompt`; relative to the recipe.
        source: "sample" (inside the repository) or "hub"; unused beside `path`.
        wrapper: "none", "maths" or "code"; None for what the known set is published with.
        random_tokens: Prompt length of random token ids; tau is then not reported.
        rows: At most so many prompts, after the shuffle.
    """

    name: str
    path: str | None = None
    source: str = "hub"
    wrapper: str | None = None
    random_tokens: int | None = None
    rows: int = 128

    def __post_init__(self) -> None:
        _require_name(self.name)
        if self.source not in ("sample", "hub"):
            raise ValueError(f"dataset {self.name}: source '{self.source}' is not sample or hub")
        if self.wrapper not in (None, "none", "maths", "code"):
            raise ValueError(
                f"dataset {self.name}: wrapper '{self.wrapper}' is not none|maths|code"
            )


@dataclass(frozen=True)
class Load:
    """How the servers are asked.

    Attributes:
        concurrency: Closed loop: so many requests are always under way.
        request_rates: Open loop: Poisson arrivals per second.
        min_prompts: At least so many requests per point.
        prompts_per_slot: And at least so many for each request under way.
        rate_seconds: An open-loop point has arrivals for about so long.
        max_new_tokens: Longest answer.
        ignore_eos: Every answer has the length it was asked for, so that engines do equal work.
        random_range_ratio: Lengths are drawn from this share of `max_new_tokens` up to all of it,
            the same for every engine (`sglang.bench_serving` has the name and the meaning).
            At 1 the requests of a plain server end together and share their prefills for ever, as
            no traffic does; those of one that speculates fall out of step at once.
        temperature: 0 is greedy.
        sampling: Further sampling parameters, as the server's API names them.
        chat_template: Further arguments of the chat template, as `enable_thinking`.
        repeats: Measurements of each point.
        warmup_tokens: Tokens that each warm-up request asks for; one wave per load level.
        seed: Of the prompts' order and of arrivals.
        point_timeout_s: A point that takes longer has failed.
    """

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    request_rates: tuple[float, ...] = ()
    min_prompts: int = 8
    prompts_per_slot: int = 2
    rate_seconds: float = 60.0
    max_new_tokens: int = 256
    ignore_eos: bool = True
    random_range_ratio: float = 1.0
    temperature: float = 0.0
    sampling: dict[str, Any] = field(default_factory=dict)
    chat_template: dict[str, Any] = field(default_factory=dict)
    repeats: int = 3
    warmup_tokens: int = 16
    seed: int = 42
    point_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if not self.concurrency and not self.request_rates:
            raise ValueError("neither concurrency nor request_rates: nothing to measure")
        for name in ("concurrency", "request_rates"):
            values = getattr(self, name)
            if len(set(values)) != len(values) or any(value <= 0 for value in values):
                raise ValueError(f"{name} {list(values)}: positive numbers, each once")
        if not 0 < self.random_range_ratio <= 1:
            raise ValueError(f"random_range_ratio {self.random_range_ratio}: above 0, at most 1")
        for name in ("min_prompts", "prompts_per_slot", "max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: at least 1")

    @property
    def shortest_answer(self) -> int:
        """Tokens of the shortest answer that may be drawn."""
        return max(1, int(self.max_new_tokens * self.random_range_ratio))


@dataclass(frozen=True)
class Servers:
    """What all servers share.

    Attributes:
        args: Arguments of every SGLang server, before the engine's own.
        env: Environment variables of every server.
        together: All alive at once and measured in turn at each point; else one at a time, each
            repeat in the reverse order (a GPU that holds one model).
        start_timeout_s: A server that does not answer by then has failed.
        port: Of the first server, the next has the next; None for free ones.
    """

    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    together: bool = False
    start_timeout_s: float = 1200.0
    port: int | None = None


@dataclass(frozen=True)
class Expect:
    """For the plan's duration only.

    Attributes:
        start_s: One server's start and warm-up.
        tokens_per_s: Concurrency -> output tokens/s of the slowest engine.
    """

    start_s: float = 60.0
    tokens_per_s: dict[int, float] = field(default_factory=lambda: {1: 100.0, 32: 2000.0})


@dataclass(frozen=True)
class PublishedRow:
    """Numbers that others have published for one engine and dataset, by concurrency."""

    engine: str
    dataset: str
    acceptance_length: float | None = None
    tokens_per_s: dict[int, float] = field(default_factory=dict)
    speedup: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """Where published numbers come from, and their rows."""

    source: str
    rows: tuple[PublishedRow, ...]


@dataclass(frozen=True)
class Recipe:
    """A sweep.

    Attributes:
        name: Part of the run folder's name.
        target: Folder or hub name of the target, or "demo" for SmolLM2-135M-Instruct.
        models: Other models by the name that engines use in braces; "demo" is the bundled draft.
        engines: Servers under test.
        datasets: Prompt kinds.
        baseline: The engine that speed-ups are taken over.
        load: How they are asked.
        servers: How they run.
        expect: For the duration in the plan.
        published: Numbers to stand beside.
    """

    name: str
    target: str
    engines: tuple[Engine, ...]
    datasets: tuple[DatasetSpec, ...]
    models: dict[str, str] = field(default_factory=dict)
    baseline: str = "plain"
    load: Load = Load()
    servers: Servers = Servers()
    expect: Expect = Expect()
    published: tuple[Published, ...] = ()

    def __post_init__(self) -> None:
        _require_name(self.name)
        for what, items in (("engine", self.engines), ("dataset", self.datasets)):
            names = [item.name for item in items]
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{what}s {names}: at least one, each name once")
        if self.baseline not in [engine.name for engine in self.engines]:
            raise ValueError(f"baseline '{self.baseline}' is not one of the engines")

    def engine(self, name: str) -> Engine:
        """Return the engine called `name`."""
        return next(engine for engine in self.engines if engine.name == name)


def load_recipe(path: Path, *, quick: bool = False) -> Recipe:
    """Return the recipe in a YAML file.

    Args:
        path: The file. Its `quick:` part overrides keys of the rest, level by level.
        quick: Whether to apply that part.

    Raises:
        BenchError: unreadable, or wrong; the text says where.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BenchError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(raw, dict):
        raise BenchError(f"{path}: expected keys and values")
    shorter = raw.pop("quick", None) or {}
    if not isinstance(shorter, dict):
        raise BenchError(f"{path}: quick: expected keys and values")
    if quick and not shorter:
        raise BenchError(f"{path} has no 'quick' part; run it without --quick")
    recipe = build(Recipe, raw, path.name)
    quick_recipe = build(Recipe, _merged(raw, shorter), f"{path.name} with quick")
    return quick_recipe if quick else recipe


def _merged(raw: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(raw)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result


def _require_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"'{name}': a name has letters, digits, '-', '_' and '+'")
