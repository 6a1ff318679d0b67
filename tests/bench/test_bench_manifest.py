# SPDX-License-Identifier: Apache-2.0
"""What records say of versions, weights and settings, and that offline jobs ask what they say."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError

from bench.config import Recipe, load_recipe
from bench.machine import versions
from bench.manifest import weights_of
from bench.offline import describe_offline, job_of
from bench.offline_child import measured
from bench.promptsets import PromptSets
from bench.strict import build

MakeRecipe = Callable[..., Path]
DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "{draft}"]


@pytest.fixture
def recipe(make_recipe: MakeRecipe) -> Recipe:
    """Two SGLang engines, and answers of 8 to 16 tokens."""
    path = make_recipe()
    raw = yaml.safe_load(path.read_text()) | {
        "models": {"draft": "someone/a-draft"},
        "engines": [
            {"name": "plain"},
            {"name": "dflash", "args": DFLASH, "env": {"SGLANG_DFLASH_BUDGET": "fixed"}},
        ],
        "load": {"max_new_tokens": 16, "random_range_ratio": 0.5, "repeats": 2,
                 "concurrency": [1], "sampling": {"top_p": 0.9}, "warmup_tokens": 3},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(raw))
    return load_recipe(path)


def test_the_installed_kernels_are_named() -> None:
    """By the distribution that has the module: SGLang's has been renamed."""
    owners, found = packages_distributions(), versions()
    for module in ("sgl_kernel", "flashinfer", "flash_attn"):
        for name in owners.get(module, ()):
            assert found[name] == version(name)
    assert "torch" in found


def test_a_folder_is_told_by_what_is_in_it(tmp_path: Path) -> None:
    for name in ("model.safetensors", "token_map.pt", "config.json", "README.md"):
        (tmp_path / name).write_text(name)
    before = weights_of({"draft": str(tmp_path)})["draft"]["sha256"]
    assert set(before) == {"model.safetensors", "token_map.pt", "config.json"}
    assert before["token_map.pt"] == hashlib.sha256(b"token_map.pt").hexdigest()
    (tmp_path / "model.safetensors").write_text("trained further")
    after = weights_of({"draft": str(tmp_path)})["draft"]["sha256"]
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


def test_a_model_of_the_hub_is_told_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, file: str) -> str:
        if name == "someone/gone":
            raise LocalEntryNotFoundError("not there")
        return f"/cache/models--someone--draft/snapshots/0123abc/{file}"

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = weights_of({"draft": "someone/draft", "other": "someone/gone"})
    assert found == {"draft": {"commit": "0123abc"}, "other": {"commit": None}}


def test_an_offline_record_says_what_was_run(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: "/snapshots/0123abc/c.json")
    models = {"target": recipe.target, "draft": "someone/a-draft"}
    prompts = PromptSets(recipe, tmp_path, recipe.target)
    record = json.loads(json.dumps(describe_offline(recipe, models, prompts)))
    assert build(Recipe, record["recipe"], "record") == recipe
    assert record["models"]["draft"] == "someone/a-draft"
    assert record["weights"]["draft"] == {"commit": "0123abc"}
    assert record["options"]["dflash"]["speculative_draft_model_path"] == "someone/a-draft"
    assert {"started", "git", "versions", "machine", "datasets"} <= set(record)


class Recorder:
    """As much of an engine as a job asks; keeps how long each answer was to be."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def generate(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any] | list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        if isinstance(sampling_params, dict):
            sampling_params = [sampling_params] * len(input_ids)
        assert all(each["top_p"] == 0.9 for each in sampling_params)
        lengths = [each["max_new_tokens"] for each in sampling_params]
        self.asked.append(lengths)
        return [{"meta_info": {"completion_tokens": n}} for n in lengths]

    def flush_cache(self) -> None:
        """Do nothing."""


def test_offline_answers_have_unequal_lengths_the_same_for_every_engine(recipe: Recipe) -> None:
    models = {"target": "t", "draft": "d"}
    batches = {"words": [[1]] * 50}
    asked = []
    for engine in recipe.engines:
        recorder = Recorder()
        replies = list(measured(recorder, job_of(recipe, engine, models, batches)))
        assert [reply["repeat"] for reply in replies] == [0, 1]
        assert [reply["tokens"] for reply in replies] == [sum(n) for n in recorder.asked[1:]]
        asked.append(recorder.asked)
    warmup, first, second = asked[0]
    assert asked[0] == asked[1]
    assert set(warmup) == {3}
    assert (min(first), max(first)) == (min(second), max(second)) == (8, 16)
    assert first != second


def test_offline_answers_are_of_one_length_where_the_recipe_says_no_more(recipe: Recipe) -> None:
    load = dataclasses.replace(recipe.load, random_range_ratio=1.0)
    same = dataclasses.replace(recipe, load=load)
    job = job_of(same, same.engine("plain"), {"target": "t"}, {"a": [[1]] * 3})
    assert job["lengths"] == [{"a": [16] * 3}] * 2
