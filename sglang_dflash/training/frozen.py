# SPDX-License-Identifier: Apache-2.0
"""The target's parts that a draft borrows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.training.settings import SettingsError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["borrowed", "embedding_of", "head_of"]


def borrowed(target: PreTrainedModel, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embedding and output head on a device, [V, H] each; one tensor where they are tied.

    Raises:
        SettingsError: the target has none, or not of one weight each.
    """
    embedding, head = embedding_of(target), head_of(target)
    moved = embedding.to(device)
    return moved, moved if head is embedding else head.to(device)


def embedding_of(target: PreTrainedModel) -> torch.Tensor:
    """Return the weight of the target's embedding, [V, H].

    Raises:
        SettingsError: it is not of one weight.
    """
    return _weight(target, "embedding", target.get_input_embeddings())


def head_of(target: PreTrainedModel) -> torch.Tensor:
    """Return the weight of the target's output head, [V, H].

    Raises:
        SettingsError: it has none, or one with a bias.
    """
    return _weight(target, "output head", target.get_output_embeddings())


def _weight(target: PreTrainedModel, part: str, module: torch.nn.Module | None) -> torch.Tensor:
    weights = dict(module.named_parameters()) if module is not None else {}
    if list(weights) != ["weight"]:
        raise SettingsError(
            f"TARGET {type(target).__name__}: its {part} has {sorted(weights) or 'no parameter'}, "
            "expected one weight that a draft can borrow"
        )
    return weights["weight"]
