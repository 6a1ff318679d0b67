# SPDX-License-Identifier: Apache-2.0
"""Recipes: what is wrong is named, and the ones that ship are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.commands import check_arguments, command_of, engine_options
from bench.config import Recipe, load_recipe
from bench.errors import BenchError
from bench.plan import make_plan, total_seconds
from bench.strict import build
from sglang_dflash.strict import plain

BENCH = Path(__file__).parents[2] / "bench"
CONFIGS = sorted((BENCH / "configs").glob("*.yaml"))
STORED = sorted((BENCH / "results").glob("*/manifest.json"))
ON_GPUS = [path for path in CONFIGS if path.stem.startswith("b200-")]
MakeRecipe = Callable[..., Path]


def changed(path: Path, **parts: Any) -> Path:
    recipe = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**recipe, **parts}))
    return path


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"enginess": []}, "unknown key 'enginess'; did you mean 'engines'"),
        ({"load": {"concurency": [1]}}, r"load: unknown key 'concurency'; did you mean 'concurr"),
        ({"load": {"concurrency": ["one"]}}, r"load.concurrency\[0\]: expected a whole number"),
        ({"load": {"concurrency": [True]}}, r"load.concurrency\[0\]: expected a whole number"),
        ({"load": {"concurrency": None}}, "load.concurrency: expected a list, found nothing"),
        ({"load": {"concurrency": []}}, "nothing to measure"),
        ({"load": {"concurrency": [2, 2]}}, "each once"),
        ({"load": {"repeats": 0}}, "repeats 0: at least 1"),
        ({"servers": {"together": "yes please"}}, "servers.together: expected true or false"),
        ({"baseline": "plane"}, "baseline 'plane' is not one of the engines"),
        ({"engines": []}, "at least one"),
        ({"engines": [{"name": "a b"}]}, "'a b': a name has letters"),
        ({"engines": [{"name": "plain"}, {"name": "plain"}]}, "each name once"),
        ({"engines": [{"name": "plain", "command": ["serve"]}]}, "must say where {port} goes"),
        ({"engines": [{"args": []}]}, "'name' is missing"),
        ({"datasets": [{"name": "x", "source": "web"}]}, "source 'web' is not sample or hub"),
        ({"datasets": {"name": "x"}}, "datasets: expected a list"),
        ({"quick": {"load": {"repeat": 1}}}, "with quick.load: unknown key 'repeat'"),
    ],
)
def test_a_mistake_is_named(make_recipe: MakeRecipe, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message.replace("{", r"\{").replace("}", r"\}")):
        load_recipe(changed(make_recipe(), **parts))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read the recipe .*none.yaml"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("name: [")
    with pytest.raises(BenchError, match=r"cannot read the recipe .*broken.yaml"):
        load_recipe(tmp_path / "broken.yaml")


def test_one_value_is_a_list_of_one(make_recipe: MakeRecipe) -> None:
    assert load_recipe(changed(make_recipe(), load={"concurrency": 4})).load.concurrency == (4,)


def test_quick_overrides_level_by_level(make_recipe: MakeRecipe) -> None:
    path = changed(make_recipe(), quick={"load": {"repeats": 1}})
    assert load_recipe(path).load.repeats == 2
    quick = load_recipe(path, quick=True)
    assert quick.load.repeats == 1
    assert quick.load.concurrency == (1, 2)


def test_quick_without_a_short_form_is_a_mistake(make_recipe: MakeRecipe) -> None:
    with pytest.raises(BenchError, match="has no 'quick' part"):
        load_recipe(make_recipe(), quick=True)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_a_recipe_survives_its_manifest(path: Path, quick: bool) -> None:
    recipe = load_recipe(path, quick=quick)
    assert build(Recipe, json.loads(json.dumps(plain(recipe))), "manifest") == recipe


@pytest.mark.parametrize(
    "path", [*CONFIGS, *STORED], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_no_engine_has_the_name_of_another_worker(path: Path) -> None:
    """The plugin is called sglang-dflash, so SGLang's own worker is not."""
    if path.suffix == ".json":
        recipe = build(Recipe, json.loads(path.read_text())["recipe"], "manifest")
    else:
        recipe = load_recipe(path)
    for engine in recipe.engines:
        own = engine.env.get("SGLANG_DFLASH_WORKER") == "upstream"
        assert own == (engine.name == "sglang-own")
        assert engine.name != "sglang-dflash"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sglang_parses_every_server_of_the_recipes(path: Path) -> None:
    recipe = load_recipe(path)
    models = {"target": "t", **dict.fromkeys(recipe.models, "m")}
    check_arguments(recipe, models)
    # A ratio needs repeats for its spread; greedy acceptance is the same in each of them.
    assert recipe.load.repeats >= (3 if len(recipe.engines) > 1 else 1)
    assert total_seconds(recipe, make_plan(recipe)) > 60


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_a_published_draft_may_state_a_shorter_context_than_its_target(path: Path) -> None:
    """SGLang ends such a server when the target is loaded already."""
    recipe = load_recipe(path)
    models = {"target": "t", **dict.fromkeys(recipe.models, "m")}
    for engine in recipe.engines:
        if "--speculative-draft-model-path" in engine.args:
            env = command_of(recipe, engine, models, 1).env
            assert env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1", engine.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_published_rows_belong_to_what_is_measured(path: Path) -> None:
    recipe = load_recipe(path)
    datasets = {spec.name for spec in recipe.datasets}
    for published in recipe.published:
        for row in published.rows:
            assert recipe.engine(row.engine).is_sglang
            assert row.dataset in datasets
            assert set(row.tokens_per_s) | set(row.speedup) <= set(recipe.load.concurrency)
            engine = recipe.engine(row.engine)
            if "DFLASH" in engine.args:  # the paper verifies every row of a block
                assert engine.env["SGLANG_DFLASH_BUDGET"] == "fixed"


def test_the_b200_recipes_have_published_numbers() -> None:
    stems = {path.stem for path in CONFIGS if load_recipe(path).published}
    assert stems == {"b200-qwen3-8b", "b200-qwen3-4b", "b200-qwen3-coder-30b", "b200-llama31-8b",
                     "b200-gpt-oss-20b"}  # fmt: skip


def sglang_recipe(make_recipe: MakeRecipe, *args: str) -> Recipe:
    return load_recipe(changed(make_recipe(), engines=[{"name": "plain", "args": list(args)}]))


def test_a_flag_that_sglang_does_not_know_is_refused(make_recipe: MakeRecipe) -> None:
    recipe = sglang_recipe(make_recipe, "--speculative-algoritm", "DFLASH")
    with pytest.raises(BenchError, match=r"engine plain: SGLang refuses .*algoritm"):
        check_arguments(recipe, {"target": "t"})


def test_offline_options_are_the_flags_that_were_given(make_recipe: MakeRecipe) -> None:
    recipe = sglang_recipe(make_recipe, "--max-total-tokens", "64", "--dtype", "bfloat16")
    options = engine_options(recipe, recipe.engine("plain"), {"target": "t"})
    assert options == {"model_path": "t", "max_total_tokens": 64, "dtype": "bfloat16"}


def test_braces_are_filled_and_unknown_ones_named(make_recipe: MakeRecipe) -> None:
    recipe = sglang_recipe(make_recipe, "--speculative-draft-model-path", "{draft}")
    engine = recipe.engine("plain")
    words = command_of(recipe, engine, {"target": "t", "draft": "d"}, 81).words
    assert words[-6:] == ["--speculative-draft-model-path", "d", "--host", "127.0.0.1", "--port",
                          "81"]  # fmt: skip
    with pytest.raises(BenchError, match=r"engine plain: '\{draft\}' is not one of target, bench"):
        command_of(recipe, engine, {"target": "t"}, 81)


def test_pythonpath_is_added_to(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    recipe = load_recipe(
        changed(make_recipe(), engines=[{"name": "plain", "env": {"PYTHONPATH": "{bench}/x"}}])
    )
    command = command_of(recipe, recipe.engine("plain"), {"target": "t"}, 81)
    assert command.env["PYTHONPATH"].endswith("bench/x:mine")
