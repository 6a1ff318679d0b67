# SPDX-License-Identifier: Apache-2.0
"""What is asked of the plugin beside SGLang's own flags: a file and the environment, read once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from sglang_dflash.budget.pacing import Pacing

__all__ = ["CONFIG_FLAG", "Options"]

WorkerChoice = Literal["auto", "plugin", "upstream"]
BudgetChoice = Literal["auto", "measured", "fixed"]

CONFIG_FLAG = "--speculative-adaptive-config"

_MEANINGS = {
    "worker": {
        "auto": "is 'plugin' where it can, 'upstream' elsewhere",
        "plugin": "serves DFLASH with sglang-dflash or not at all",
        "upstream": "with SGLang's own worker",
    },
    "budget": {
        "auto": "is 'measured' on a CPU, 'fixed' elsewhere",
        "measured": "verifies the rows that pay by measured step times",
        "fixed": "whole blocks whatever they cost",
    },
}


class _Number(NamedTuple):
    """What a setting may be.

    Attributes:
        kind: int or float.
        least: the smallest value.
        most: the largest; None is no bound.
        words: the same for people.
    """

    kind: type
    least: float
    most: float | None
    words: str


_WIDTH = _Number(
    int, 1, None,
    "a verify width: give a whole number of rows, the anchor included, from 1 to the block size",
)  # fmt: skip
_NUMBERS = {
    "min_width": _WIDTH,
    "max_width": _WIDTH,
    "exploration": _Number(float, 1e-6, 1, "a share of the time: give a number from 1e-6 to 1"),
    "margin": _Number(float, 0, 10, "a margin: give a number from 0 to 10, 0.02 for 2 %"),
    "narrow_margin": _Number(float, 0, 1, "a margin: give a number from 0 to 1, 0.01 for 1 %"),
    "min_steps": _Number(int, 0, None, "a number of steps: give a whole number from 0"),
    "shortest_pause": _Number(int, 1, None, "a number of steps: give a whole number from 1"),
    "longest_pause": _Number(int, 1, None, "a number of steps: give a whole number from 1"),
}
_PACING = tuple(field.name for field in fields(Pacing))
_KEYS = ("budget", *_NUMBERS)


@dataclass(frozen=True)
class Options:
    """The plugin's settings.

    `budget`, the widths and the pacing may stand in the JSON file that
    `--speculative-adaptive-config` names, and in the environment as `SGLANG_DFLASH_` and the key in
    capitals. The environment wins.

    Attributes:
        worker: `SGLANG_DFLASH_WORKER`. Who serves DFLASH: this plugin's worker, SGLang's own, or
            with `auto` SGLang's for what ours does not do.
        budget: What decides how many rows of a block are verified.
        min_width: Rows of each request at least, the anchor included; above 1 the draft always
            runs.
        max_width: Rows of each request at most; None is the block.
        pacing: how the budget moves and explores; its fields are keys of their own.
        trace: `SGLANG_DFLASH_TRACE`. Where every decode step is written; None is nowhere.
    """

    worker: WorkerChoice = "auto"
    budget: BudgetChoice = "auto"
    min_width: int = 1
    max_width: int | None = None
    pacing: Pacing = field(default_factory=Pacing)
    trace: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str], config: str | None = None) -> Options:
        """Return what the environment asks, over what a file asks.

        Args:
            environ: variables.
            config: the path given to `--speculative-adaptive-config`.

        Raises:
            ValueError: the file cannot be read, or has an unknown key; a value is impossible.
        """
        found = {} if config is None else _from_file(config)
        for key in _KEYS:
            name = f"SGLANG_DFLASH_{key.upper()}"
            if name in environ:
                found[key] = _valid(key, _typed(key, environ[name]), f"{name}={environ[name]!r}")
        pacing = Pacing(**{key: found.pop(key) for key in _PACING if key in found})
        worker = environ.get("SGLANG_DFLASH_WORKER", "auto")
        options = cls(
            worker=_choice("worker", worker, f"SGLANG_DFLASH_WORKER={worker!r}"),
            trace=environ.get("SGLANG_DFLASH_TRACE") or None,
            pacing=pacing,
            **found,
        )
        _check_order("min_width", options.min_width, "max_width", options.max_width)
        _check_order("shortest_pause", pacing.shortest_pause, "longest_pause", pacing.longest_pause)
        if options.budget == "fixed" and options != cls(
            worker=options.worker, budget="fixed", trace=options.trace
        ):
            raise ValueError(
                "the budget is fixed, so whole blocks are verified, and min_width, max_width and "
                "what paces the budget mean nothing: leave them out, or budget=fixed "
                f"(SGLANG_DFLASH_* or the file of {CONFIG_FLAG})"
            )
        if options.trace and options.budget == "fixed":
            raise ValueError(
                "SGLANG_DFLASH_TRACE writes what the budget decides, and the budget is fixed: "
                "unset the one or the other"
            )
        return options

    def check_start(self, block_size: int) -> None:
        """Refuse what only shows with the block size or on this machine.

        Raises:
            ValueError: a bound is above the block, or the trace has no folder.
        """
        for key in ("min_width", "max_width"):
            width = getattr(self, key)
            if width is not None and width > block_size:
                raise ValueError(
                    f"{_both_names(key)} is {width}, and a block has {block_size} rows, the anchor "
                    f"included: give at most {block_size}, or a larger "
                    "--speculative-num-draft-tokens"
                )
        if self.trace is not None and not Path(self.trace).absolute().parent.is_dir():
            raise ValueError(
                f"SGLANG_DFLASH_TRACE={self.trace!r}: its folder does not exist. Make it, or name "
                "a file elsewhere."
            )


def _from_file(path: str) -> dict[str, Any]:
    """Return the valid settings of a JSON file."""
    try:
        stated = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_FLAG} {path}: not a readable JSON file ({error})") from error
    if not isinstance(stated, dict):
        raise ValueError(f"{CONFIG_FLAG} {path}: holds {type(stated).__name__}, not an object")
    if unknown := sorted(set(stated) - set(_KEYS)):
        raise ValueError(
            f"{CONFIG_FLAG} {path}: DFLASH does not know {', '.join(map(repr, unknown))}; it knows "
            f"{', '.join(_KEYS)}"
        )
    source = f"{CONFIG_FLAG} {path}: "
    return {key: _valid(key, value, f"{source}{key}={value!r}") for key, value in stated.items()}


def _typed(key: str, text: str) -> Any:
    """Return a variable's text as what the key wants, or as it is where it is none."""
    if key not in _NUMBERS:
        return text
    read: Callable[[str], Any] = _NUMBERS[key].kind
    try:
        return read(text)
    except ValueError:
        return text


def _valid(key: str, value: Any, source: str) -> Any:
    """Return a value that its key may have."""
    if key not in _NUMBERS:
        return _choice(key, value, source)
    kind, least, most, words = _NUMBERS[key]
    typed = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not typed or not least <= value <= (float("inf") if most is None else most):
        raise ValueError(f"{source} is not {words}, or leave it out")
    return kind(value)


def _choice(key: str, value: Any, source: str) -> Any:
    """Return one of a key's choices."""
    choices = get_args({"worker": WorkerChoice, "budget": BudgetChoice}[key])
    chosen = value.strip().lower() if isinstance(value, str) else value
    if chosen not in choices:
        known = ", ".join(f"'{choice}' {_MEANINGS[key][choice]}" for choice in choices)
        raise ValueError(
            f"{source} is not one of {', '.join(choices)}: {known}; '{choices[0]}' is the default. "
            "Leave it out or choose one."
        )
    return chosen


def _check_order(low: str, least: int, high: str, most: int | None) -> None:
    if most is not None and most < least:
        raise ValueError(
            f"{_both_names(high)} is {most}, below {_both_names(low)}, {least}: raise the one or "
            "lower the other"
        )


def _both_names(key: str) -> str:
    return f"{key} (SGLANG_DFLASH_{key.upper()} or the file of {CONFIG_FLAG})"
