# SPDX-License-Identifier: Apache-2.0
"""What moves the weights: AdamW for all, or Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from sglang_dflash.training.settings import LoopSettings

__all__ = ["Optimizers"]


class Optimizers:
    """One optimizer or two as one: torch's own, each with its share of the parameters.

    Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest semi-orthogonal matrix;
    scaled to the size of AdamW's updates (Moonlight, arXiv 2502.16982, section 2.2), both take the
    same learning rate.

    A table of tokens' vectors is no matrix in this sense: few of its rows move in a step.

    Args:
        parameters: the draft's with their names, float.
        settings: `optimizer`, `learning_rate` and `weight_decay`.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], settings: LoopSettings
    ) -> None:
        rate = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        matrices, others = [], []
        for name, parameter in parameters:
            is_matrix = parameter.dim() == 2 and not name.endswith("_codebook")
            moved = matrices if settings.optimizer == "muon" and is_matrix else others
            moved.append(parameter)
        self._all: list[torch.optim.Optimizer] = []
        if matrices:
            self._all.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **rate))
        if others:
            self._all.append(torch.optim.AdamW(others, fused=True, **rate))

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for each in self._all:
            for group in each.param_groups:
                group["lr"] = rate

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for each in self._all:
            each.zero_grad()

    def step(self) -> None:
        """Move the weights."""
        for each in self._all:
            each.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what `load_state_dict` takes, one entry an optimizer."""
        return [each.state_dict() for each in self._all]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on from a state of the same settings."""
        for each, own in zip(self._all, state, strict=True):
            each.load_state_dict(own)
