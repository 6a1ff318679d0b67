# SPDX-License-Identifier: Apache-2.0
"""The command line and environment of each server, and SGLang's own opinion of them."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bench.config import Engine, Recipe
from bench.errors import BenchError

__all__ = ["Command", "check_arguments", "command_of", "engine_options", "models_of",
           "server_arguments"]  # fmt: skip

BENCH = Path(__file__).parent
BRACES = re.compile(r"\{(\w+)\}")


class Command(NamedTuple):
    """What starts a server: its words, and what is added to the environment."""

    words: list[str]
    env: dict[str, str]

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.env.items()]
        return shlex.join(settings + self.words)


def models_of(recipe: Recipe, *, fetch: bool) -> dict[str, str]:
    """Return what `{target}` and the recipe's other models stand for.

    Args:
        recipe: The recipe.
        fetch: Get the demo's target where it is not in the cache yet; a dry run need not have it.

    Raises:
        BenchError: a folder does not exist, or the demo's target cannot be had.
    """
    from sglang_dflash.demo import DemoError
    from sglang_dflash.demo.model import TARGET, bundled_draft, cache_dir, ensure_target

    models = {"target": recipe.target, **recipe.models}
    for name, place in models.items():
        if place == "demo" and name != "target":
            models[name] = str(bundled_draft())
        elif place == "demo":
            try:
                models[name] = str(ensure_target() if fetch else cache_dir() / TARGET.name)
            except DemoError as error:
                raise BenchError(str(error)) from error
        elif place.startswith((".", "/", "~")):
            models[name] = str(Path(place).expanduser())
            if not Path(models[name]).is_dir():
                raise BenchError(f"{name}: there is no folder {place}")
    return models


def server_arguments(recipe: Recipe, engine: Engine, models: dict[str, str]) -> list[str]:
    """Return the arguments of SGLang's server or engine, without host and port."""
    words = ["--model-path", "{target}", *recipe.servers.args, *engine.args]
    return [_filled(word, models, f"engine {engine.name}") for word in words]


def command_of(recipe: Recipe, engine: Engine, models: dict[str, str], port: int) -> Command:
    """Return the command that serves `engine` on `port` of this machine alone."""
    places = {**models, "port": str(port)}
    where = f"engine {engine.name}"
    if engine.is_sglang:
        words = [
            sys.executable, "-m", "sglang.launch_server",
            *server_arguments(recipe, engine, models), "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
    else:
        words = [_filled(word, places, where) for word in engine.command]
    settings = {**recipe.servers.env, **engine.env}
    env = {name: _filled(value, places, where) for name, value in settings.items()}
    if inherited := env.get("PYTHONPATH") and os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += os.pathsep + inherited
    return Command(words, env)


def check_arguments(recipe: Recipe, models: dict[str, str]) -> None:
    """Have SGLang's own parser read every SGLang engine's arguments; no GPU is needed for that.

    Raises:
        BenchError: it refuses one; the engine and its message are in the text.
    """
    parser = _server_parser()
    for engine in recipe.engines:
        if engine.is_sglang:
            _parsed(parser, engine.name, server_arguments(recipe, engine, models))


def engine_options(recipe: Recipe, engine: Engine, models: dict[str, str]) -> dict[str, Any]:
    """Return the same arguments for `sgl.Engine`: those that are not SGLang's defaults."""
    parser = _server_parser()
    found = vars(_parsed(parser, engine.name, server_arguments(recipe, engine, models)))
    return {name: value for name, value in found.items() if value != parser.get_default(name)}


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would leave the process."""

    def error(self, message: str) -> NoReturn:
        raise BenchError(message)


def _server_parser() -> _Parser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _parsed(parser: _Parser, name: str, words: Sequence[str]) -> argparse.Namespace:
    try:
        return parser.parse_args(words)
    except BenchError as error:
        raise BenchError(f"engine {name}: SGLang refuses its arguments: {error}") from error


def _filled(text: str, places: dict[str, str], where: str) -> str:
    def place(match: re.Match[str]) -> str:
        name = match[1]
        if name == "bench":
            return str(BENCH)
        if name not in places:
            known = ", ".join([*places, "bench"])
            raise BenchError(f"{where}: '{{{name}}}' is not one of {known}")
        return places[name]

    return BRACES.sub(place, text)
