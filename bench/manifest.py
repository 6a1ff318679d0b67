# SPDX-License-Identifier: Apache-2.0
"""When, where and with what a run is measured: what the records of all commands have in common."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import describe_machine, git_state, shareable, versions
from bench.promptsets import PromptSets

__all__ = ["describe_models", "describe_run", "now", "weights_of"]

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")  # a draft's token map is a .pt


def describe_run(models: dict[str, str], prompts: PromptSets) -> dict[str, Any]:
    """Return time, commit, versions, machine, models and prompts of a run that begins now.

    Args:
        models: Folder or hub name by the model's name in the recipe.
        prompts: What is asked.
    """
    return {
        "started": now(), "git": git_state(), "versions": versions(), "machine": describe_machine(),
        **describe_models(models), "datasets": prompts.manifest(),
    }  # fmt: skip


def describe_models(models: dict[str, str]) -> dict[str, Any]:
    """Return where the models of a run lie, and which weights they have as it begins.

    Args:
        models: Folder or hub name by the model's name.
    """
    return {
        "models": {name: shareable(place) for name, place in models.items()},
        "weights": weights_of(models),
    }


def weights_of(models: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return by the model's name which weights it has; a folder's name may hold others later.

    Args:
        models: Folder, file or hub name by the model's name in the recipe.

    Returns:
        `{"sha256": {file name: digest}}` of weights, token map and config; `{"commit": hash}` of a
        model on the hub, None where neither the hub nor the cache has it.
    """
    return {name: _identity(place) for name, place in models.items()}


def now() -> str:
    """Return the time, to the second, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _identity(place: str) -> dict[str, Any]:
    path = Path(place)
    if not path.exists():
        return {"commit": _hub_commit(place)}
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {
        "sha256": {
            file.name: _sha256(file)
            for file in files
            if file.suffix in WEIGHTS or file.name == "config.json"
        }
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _hub_commit(name: str) -> str | None:
    """Return the commit that SGLang is about to load: the hub's, or the cache's where it is out."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        file = Path(hf_hub_download(name, "config.json"))  # .../snapshots/COMMIT/config.json
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None  # where a server needs it, SGLang says why
    return file.parent.name
