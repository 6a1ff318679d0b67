# SPDX-License-Identifier: Apache-2.0
"""A toy server's sweep, and points that a real one recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

# `bench` is a folder of the checkout, not of the installed package
sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.config import Recipe, load_recipe
from bench.folder import RunFolder
from bench.records import PointRecord

RECORDED = Path(__file__).parent / "recorded"
MakeRecipe = Callable[..., Path]


@pytest.fixture
def recorded_recipe() -> Recipe:
    return load_recipe(RECORDED / "recipe.yaml")


@pytest.fixture
def recorded_points() -> list[PointRecord]:
    lines = (RECORDED / "points.jsonl").read_text().splitlines()
    return [PointRecord.from_json(json.loads(line)) for line in lines]


@pytest.fixture
def make_run(
    recorded_recipe: Recipe, recorded_points: list[PointRecord], tmp_path: Path
) -> Callable[..., RunFolder]:
    """Return a maker of run folders that hold the recorded points, some left out or changed."""

    def make(
        name: str, change: Callable[[PointRecord], PointRecord | None] = lambda record: record
    ) -> RunFolder:
        manifest = {
            "started": "2026-01-01T00:00:00+00:00", "git": {"commit": "abc", "dirty": False},
            "versions": {"sglang": "0.5.23"}, "datasets": {"gsm8k": {"sha256": "1"}},
            "machine": {"cpu": "a CPU", "cores": 2, "memory_gb": 24, "gpus": []},
            "commands": {"plain": "python -m sglang.launch_server", "dflash": "<the same>"},
        }  # fmt: skip
        folder = RunFolder.create(tmp_path / name, recorded_recipe, manifest)
        for record in map(change, recorded_points):
            if record is not None:
                folder.write_point(record)
        folder.write_data()
        return folder

    return make


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of 64 words: all that a sweep over another server needs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(63)} | {"[UNK]": 63}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture
def make_recipe(word_tokenizer: Path, tmp_path: Path) -> MakeRecipe:
    """Return a writer of recipes with two toy servers; keywords replace parts of it."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"w{i} w{i + 1} w{i + 2}"} for i in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(toy: dict[str, list[Any]] | None = None, **parts: Any) -> Path:
        toy = toy or {}
        script = str(Path(__file__).parent / "toy_server.py")
        engines = [
            {"name": name, "command": [sys.executable, script, "--port", "{port}",
                                       *map(str, toy.get(name, []))]}
            for name in ("plain", "fast")
        ]  # fmt: skip
        recipe = {
            "name": "toy", "target": str(word_tokenizer), "engines": engines,
            "datasets": [{"name": "words", "path": "prompts.jsonl"}],
            "servers": {"together": True, "start_timeout_s": 30},
            "load": {"concurrency": [1, 2], "min_prompts": 4, "max_new_tokens": 4, "repeats": 2,
                     "warmup_tokens": 2},
            **parts,
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return path

    return make
