# SPDX-License-Identifier: Apache-2.0
"""Where a draft checkpoint lies: a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.schema import MASK_SIDECAR
from sglang_dflash.draft.token_map import TOKEN_MAP_FILE
from sglang_dflash.draft.weights import check_weights, read_weight_shapes
from sglang_dflash.errors import DRAFT_OPTION, UnsupportedCheckpoint

__all__ = ["check_checkpoint", "draft_folder", "local_folder", "read_draft_config"]


def draft_folder(path: str, revision: str | None = None, *, weights: bool = False) -> Path:
    """Return the local folder of a draft, from the Hub's cache where `path` is no folder.

    Args:
        path: A folder, or a Hub id such as `z-lab/Qwen3-8B-DFlash-b16`.
        revision: The Hub revision; None is its default branch.
        weights: Whether the weights are wanted too, or the config alone.

    Raises:
        UnsupportedCheckpoint: neither a folder nor a repository that can be had.
    """
    # All that is looked at beside the weights: a file that is left out is a file that is not seen.
    patterns = ["*.json", MASK_SIDECAR, TOKEN_MAP_FILE, *(["*.safetensors"] if weights else [])]
    return local_folder(path, patterns, option=DRAFT_OPTION, revision=revision)


def local_folder(
    path: str, patterns: list[str], *, option: str, revision: str | None = None
) -> Path:
    """Return a folder as it is, or that of a Hub repository's files in the Hub's cache.

    Args:
        path: A folder, or a Hub id.
        patterns: Which of a repository's files to fetch.
        option: Where `path` was given, for the message.
        revision: The Hub revision; None is its default branch.

    Raises:
        UnsupportedCheckpoint: neither a folder nor a repository that can be had.
    """
    if os.path.exists(path) or path.count("/") != 1 or path.startswith((".", "/", "~")):
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnsupportedCheckpoint(
            f"{path}: no such folder, and the Hugging Face Hub gave none ({error}). "
            "Give a folder, or a Hub id that this machine can reach.",
            option=option,
        ) from error


def read_draft_config(path: str, revision: str | None = None) -> DraftConfig:
    """Return a draft's configuration; see `DraftConfig.from_pretrained` for what is refused."""
    return DraftConfig.from_pretrained(draft_folder(path, revision))


def check_checkpoint(path: str, revision: str | None = None) -> DraftConfig:
    """Return a draft's configuration after comparing it with the weights' names and shapes.

    Raises:
        UnsupportedCheckpoint: names everything that is missing, unexpected or misshaped.
    """
    folder = draft_folder(path, revision, weights=True)
    config = DraftConfig.from_pretrained(folder)
    check_weights(read_weight_shapes(folder), config, folder)
    return config
