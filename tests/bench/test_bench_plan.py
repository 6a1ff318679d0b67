# SPDX-License-Identifier: Apache-2.0
"""The order of measurements, and the prompts of each."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.config import DatasetSpec, Expect, Recipe, load_recipe
from bench.dryrun import describe_sweep
from bench.errors import BenchError
from bench.plan import (
    Level,
    Point,
    answer_lengths,
    levels_of,
    make_plan,
    num_prompts,
    point_seconds,
)
from bench.prompts import WRAPPERS, load_prompts
from bench.promptsets import PromptSets

MakeRecipe = Callable[..., Path]


@pytest.fixture
def recipe(make_recipe: MakeRecipe) -> Recipe:
    return load_recipe(make_recipe())


@pytest.mark.parametrize("together", [True, False])
def test_every_point_is_planned_once(recipe: Recipe, together: bool) -> None:
    servers = dataclasses.replace(recipe.servers, together=together)
    stages = make_plan(dataclasses.replace(recipe, servers=servers))
    points = [point for stage in stages for point in stage.points]
    assert len({point.key for point in points}) == len(points) == 2 * 2 * 2
    assert all(point.engine in stage.engines for stage in stages for point in stage.points)


def test_servers_that_live_together_are_interleaved_and_turn(recipe: Recipe) -> None:
    (stage,) = make_plan(recipe)
    pairs = [stage.points[i : i + 2] for i in range(0, len(stage.points), 2)]
    for pair in pairs:
        assert len({(p.dataset, p.level, p.repeat) for p in pair}) == 1
    first = Counter(pair[0].engine for pair in pairs)
    assert first == {"plain": 2, "fast": 2}


def test_servers_in_turn_alternate(recipe: Recipe) -> None:
    servers = dataclasses.replace(recipe.servers, together=False)
    stages = make_plan(dataclasses.replace(recipe, servers=servers))
    assert [stage.engines[0] for stage in stages] == ["plain", "fast", "fast", "plain"]
    assert all(len({point.repeat for point in stage.points}) == 1 for stage in stages)


def test_open_loop_levels_follow_the_closed_ones(recipe: Recipe) -> None:
    load = dataclasses.replace(recipe.load, request_rates=(0.5, 4.0), rate_seconds=10)
    assert [str(level) for level in levels_of(load)] == ["c1", "c2", "rate0.5", "rate4"]
    assert num_prompts(load, Level(request_rate=4.0)) == 40
    assert num_prompts(load, Level(request_rate=0.1)) == load.min_prompts


def test_expected_time_is_interpolated(recipe: Recipe) -> None:
    load = dataclasses.replace(recipe.load, min_prompts=1, prompts_per_slot=1, max_new_tokens=100)
    expect = Expect(tokens_per_s={1: 10.0, 16: 160.0})
    asked = dataclasses.replace(recipe, load=load, expect=expect)
    seconds = [point_seconds(asked, Level(concurrency=c)) for c in (1, 4, 16, 32)]
    assert seconds == pytest.approx([10, 10, 10, 20])


def test_repeats_go_on_and_no_point_asks_twice(recipe: Recipe, tmp_path: Path) -> None:
    prompts = PromptSets(recipe, tmp_path, recipe.target)
    first, second = (prompts.of(Point("plain", "words", Level(2), r), 5) for r in (0, 1))
    assert prompts.of(Point("fast", "words", Level(1), 0), 5) == first
    assert [tuple(ids) for ids in first] != [tuple(ids) for ids in second]
    whole = prompts.of(Point("plain", "words", Level(2), 1), 100)
    assert len({tuple(ids) for ids in whole}) == len(whole) == 8


def test_more_slots_than_prompts_are_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = load_recipe(make_recipe(load={"concurrency": [9]}))
    with pytest.raises(BenchError, match="8 prompts, concurrency 9 needs as many"):
        PromptSets(recipe, tmp_path, recipe.target)


def test_random_tokens_are_no_text(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = load_recipe(make_recipe(datasets=[{"name": "noise", "random_tokens": 12}]))
    prompts = PromptSets(recipe, tmp_path, recipe.target)
    asked = prompts.of(Point("plain", "noise", Level(1), 0), 4)
    assert [len(ids) for ids in asked] == [12] * 4
    assert len({tuple(ids) for ids in asked}) == 4
    assert not prompts.has_text("noise")


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mt-bench"])
def test_samples_are_whole_and_in_a_fixed_order(name: str) -> None:
    spec = DatasetSpec(name, source="sample")
    prompts = load_prompts(spec, 42, Path())
    assert len(set(prompts.texts)) == 64
    assert load_prompts(spec, 42, Path()) == prompts
    assert load_prompts(spec, 43, Path()).sha256 != prompts.sha256


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"turns": ["first", "second"]}, "first"),
        ({"question": "how many?", "answer": "2"}, "how many?"),
        ({"problem": "x + 1"}, "x + 1"),
        ({"prompt": "def f():"}, "def f():"),
        ({"turns": [{"role": "user", "content": "hello"}]}, "hello"),
    ],
)
def test_fields_that_hold_a_prompt(tmp_path: Path, row: dict, text: str) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n\n")
    assert load_prompts(DatasetSpec("mine", path="p.jsonl"), 1, tmp_path).texts == [text]


def test_a_wrapper_goes_around_and_the_shuffle_is_python_s(tmp_path: Path) -> None:
    rows = [f"{{question}} {i}" for i in range(9)]  # braces are the prompt's own
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"question": r}) + "\n" for r in rows))
    spec = DatasetSpec("mine", path="p.jsonl", wrapper="maths", rows=4)
    random.Random(42).shuffle(rows)
    ending = WRAPPERS["maths"].format("")
    assert "\\boxed{}." in ending
    assert load_prompts(spec, 42, tmp_path).texts == [row + ending for row in rows[:4]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "dataset mine: cannot read"),
        ("", "is empty"),
        ('{"prompt": "a"}\nnonsense\n', "line 2"),
        ('{"text": "a"}\n', "row 1: no prompt; expected one of turns, question"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(BenchError, match=message):
        load_prompts(DatasetSpec("mine", path="p.jsonl"), 1, tmp_path)


def test_an_unknown_dataset_or_sample_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="dataset gsm9k: not one of gsm8k"):
        load_prompts(DatasetSpec("gsm9k"), 1, tmp_path)
    with pytest.raises(BenchError, match=r"no sample in the repository \(there: gsm8k, humaneval"):
        load_prompts(DatasetSpec("mbpp", source="sample"), 1, tmp_path)


def test_a_dry_run_says_commands_order_and_duration(recipe: Recipe, tmp_path: Path) -> None:
    text = describe_sweep(recipe, tmp_path)
    assert "toy_server.py --port 30000" in text
    assert "toy_server.py --port 30001" in text
    assert "words: prompts.jsonl, 8 prompts, sha256 " in text
    assert "interleaved: plain fast fast plain" in text
    assert "8 points, 2 server starts, expected duration 0:0" in text


def test_answers_have_lengths_that_no_engine_chooses(recipe: Recipe) -> None:
    load = dataclasses.replace(recipe.load, max_new_tokens=40, random_range_ratio=0.25)
    lengths = answer_lengths(load, 200)
    assert (min(lengths), max(lengths)) == (10, 40)
    assert lengths == answer_lengths(load, 200) != answer_lengths(load, 200, repeat=1)
    same = dataclasses.replace(load, random_range_ratio=1.0)
    assert set(answer_lengths(same, 50)) == {40}
