# SPDX-License-Identifier: Apache-2.0
"""What the environment asks of the plugin, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["Options"]

WorkerChoice = Literal["plugin", "upstream"]
BudgetChoice = Literal["measured", "fixed"]

_MEANINGS = {
    "plugin": "serves DFLASH with sglang-dflash",
    "upstream": "with SGLang's own worker",
    "measured": "verifies the rows that pay by measured step times",
    "fixed": "whole blocks whatever they cost",
}


@dataclass(frozen=True)
class Options:
    """The plugin's settings beside SGLang's own flags.

    Attributes:
        worker: `SGLANG_DFLASH_WORKER`. Who serves DFLASH: this plugin's worker, or SGLang's own.
        budget: `SGLANG_DFLASH_BUDGET`. What decides how many rows of a block are verified.
        min_width: `SGLANG_DFLASH_MIN_WIDTH`. Rows of each request at least, the anchor included;
            above 1 the draft always runs.
        max_width: `SGLANG_DFLASH_MAX_WIDTH`. Rows of each request at most; None is the block.
    """

    worker: WorkerChoice = "plugin"
    budget: BudgetChoice = "measured"
    min_width: int = 1
    max_width: int | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Options:
        """Read the options from environment variables.

        Raises:
            ValueError: a variable has a value that is not one of its choices, or no width.
        """
        max_width = environ.get("SGLANG_DFLASH_MAX_WIDTH")
        options = cls(
            worker=_choice(environ, "SGLANG_DFLASH_WORKER", WorkerChoice),
            budget=_choice(environ, "SGLANG_DFLASH_BUDGET", BudgetChoice),
            min_width=_width("SGLANG_DFLASH_MIN_WIDTH", environ.get("SGLANG_DFLASH_MIN_WIDTH", 1)),
            max_width=None if max_width is None else _width("SGLANG_DFLASH_MAX_WIDTH", max_width),
        )
        if options.max_width is not None and options.max_width < options.min_width:
            raise ValueError(
                f"SGLANG_DFLASH_MAX_WIDTH={options.max_width} is below "
                f"SGLANG_DFLASH_MIN_WIDTH={options.min_width}: raise the one or lower the other."
            )
        return options


def _choice(environ: Mapping[str, str], name: str, kind: Any) -> Any:
    """Return a variable's value, the first of its choices where it is unset."""
    choices = get_args(kind)
    value = environ.get(name, choices[0]).strip().lower()
    if value not in choices:
        first, second = (f"'{choice}'" for choice in choices)
        raise ValueError(
            f"{name}={value!r} is not one of {', '.join(choices)}: {first} (the default) "
            f"{_MEANINGS[choices[0]]}, {second} {_MEANINGS[choices[1]]}. Unset it or choose one."
        )
    return value


def _width(name: str, value: str | int) -> int:
    """Return a number of rows."""
    try:
        width = int(value)
    except ValueError:
        width = 0
    if width < 1:
        raise ValueError(
            f"{name}={value!r} is not a verify width: give a whole number of rows, the anchor "
            "included, from 1 to the block size, or unset it."
        )
    return width
