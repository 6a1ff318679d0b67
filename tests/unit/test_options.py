# SPDX-License-Identifier: Apache-2.0
"""What the environment and the budget's file ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.budget.pacing import Pacing
from sglang_dflash.options import Options


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Write settings to a file and return its path."""

    def write(**settings: Any) -> str:
        file = tmp_path / "budget.json"
        file.write_text(json.dumps(settings))
        return str(file)

    return write


def test_nothing_asked_is_the_defaults() -> None:
    assert Options.read({}) == Options("auto", "auto", 1, None, Pacing(), None)


def test_the_environment_is_read() -> None:
    found = Options.read(
        {
            "SGLANG_DFLASH_WORKER": "Upstream",
            "SGLANG_DFLASH_MAX_WIDTH": "4",
            "SGLANG_DFLASH_EXPLORATION": "0.05",
            "SGLANG_DFLASH_TRACE": "steps.jsonl",
        }
    )
    pacing = Pacing(exploration=0.05)
    assert found == Options("upstream", "auto", 1, 4, pacing, "steps.jsonl")


def test_the_file_sets_every_key_but_who_serves(config: Any) -> None:
    asked = {
        "budget": "measured", "min_width": 2, "max_width": 4, "margin": 0, "exploration": 0.5,
        "min_steps": 7, "shortest_pause": 3, "longest_pause": 30, "narrow_margin": 0.2,
    }  # fmt: skip
    pacing = Pacing(0.0, 0.2, min_steps=7, exploration=0.5, shortest_pause=3, longest_pause=30)
    assert Options.read({}, config(**asked)) == Options("auto", "measured", 2, 4, pacing)
    assert Options.read({}, config(budget="fixed")) == Options("auto", "fixed")
    with pytest.raises(ValueError, match="does not know 'worker'"):
        Options.read({}, config(worker="upstream"))


def test_the_environment_goes_over_the_file(config: Any) -> None:
    file = config(budget="fixed", min_width=2, margin=0.5)
    environ = {"SGLANG_DFLASH_BUDGET": "measured", "SGLANG_DFLASH_MIN_WIDTH": "3"}
    found = Options.read(environ, file)
    assert (found.budget, found.min_width, found.pacing.margin) == ("measured", 3, 0.5)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("WORKER", "mine", "auto, plugin, upstream"),
        ("BUDGET", "x", "measured, fixed"),
        ("MIN_WIDTH", "0", "1 to the block size"),
        ("MAX_WIDTH", "two", "1 to the block size"),
        ("EXPLORATION", "0", "a number from 1e-6 to 1"),
        ("MARGIN", "nan", "a number from 0 to 10"),
        ("LONGEST_PAUSE", "1.5", "a whole number from 1"),
    ],
)
def test_an_impossible_variable_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^SGLANG_DFLASH_{name}='{value}' is not .*{words}"):
        Options.read({f"SGLANG_DFLASH_{name}": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("budget", 1), ("max_width", "4"), ("max_width", 4.0), ("margin", True), ("margin", None)],
)
def test_a_file_is_held_to_its_types(config: Any, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^--speculative-adaptive-config .*: {key}=.* is not"):
        Options.read({}, config(**{key: value}))


def test_bounds_that_cross_are_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=r"MAX_WIDTH .* is 2, below .*MIN_WIDTH .*, 3: raise"):
        Options.read({"SGLANG_DFLASH_MIN_WIDTH": "3"}, config(max_width=2))
    with pytest.raises(ValueError, match=r"LONGEST_PAUSE .* is 3, below .*SHORTEST_PAUSE"):
        Options.read({}, config(longest_pause=3))


@pytest.mark.parametrize("key", ["MIN_WIDTH", "MAX_WIDTH", "EXPLORATION"])
def test_a_fixed_budget_has_nothing_to_tune(key: str) -> None:
    value = "0.02" if key == "EXPLORATION" else "3"
    with pytest.raises(ValueError, match="the budget is fixed, so whole blocks are verified"):
        Options.read({"SGLANG_DFLASH_BUDGET": "fixed", f"SGLANG_DFLASH_{key}": value})
