# SPDX-License-Identifier: Apache-2.0
"""What records say of versions, weights and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError

from bench.config import Recipe, load_recipe
from bench.machine import versions
from bench.manifest import weights_of
from bench.offline import describe_offline
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
