# SPDX-License-Identifier: Apache-2.0
"""A draft that knows nothing: random weights in the shapes of another."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["write_random_draft"]

_SPREAD = 0.04  # about a trained draft's own


def write_random_draft(source: Path, folder: Path, seed: int = 0) -> Path:
    """Write a draft of the same config, shapes and dtypes, and return its folder.

    Norms stay as they are, so that activations keep their size: it costs what the source costs.

    Args:
        source: a draft of one `model.safetensors`.
        folder: where to write.
        seed: of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor
        if tensor.ndim == 1
        else (_SPREAD * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    shutil.copy(source / "config.json", folder)
    return folder
