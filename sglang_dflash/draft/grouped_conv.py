# SPDX-License-Identifier: Apache-2.0
"""DFlash2's convolution over the rows of a block, whose kernel follows from its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_dflash.draft.config import DraftConfig

__all__ = ["GroupedConv", "convolved"]


class GroupedConv(nn.Module):
    """Wraps a sublayer f: conv_1(f(conv_0(x))), both kernels made of x.

        conv_s(x)[i, c] = sum over t of (base[s, t, c] + (W x_i)[s, t, group of c]) * x[i - t, c]

    with nothing before a block's first row. A new one leaves its input as it is.

    Source: DFlash2 (inco.ai/blog/dflash2); weights as in SGLang's `DFlashGroupedConv`.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        base = torch.zeros(2, taps, hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self._shape = (2, taps, hidden_size // group_size)
        width = 2 * taps * (hidden_size // group_size)
        self.kernel_projection = nn.Linear(hidden_size, width, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    @classmethod
    def of(cls, config: DraftConfig) -> GroupedConv | None:
        """Return one of a draft's, or None where it has none."""
        if not config.conv_kernel_size:
            return None
        return cls(config.hidden_size, config.conv_kernel_size, config.conv_group_size)

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sublayer's input, and what `after` needs.

        Args:
            x: [..., B, H], whole blocks.

        Returns:
            [..., B, H], and the kernel's moving part [..., B, taps, groups].
        """
        moving = self.kernel_projection(x).unflatten(-1, self._shape)
        return self._convolve(x, moving[..., 0, :, :], 0), moving[..., 1, :, :]

    def after(self, x: torch.Tensor, moving: torch.Tensor) -> torch.Tensor:
        """Return the sublayer's output [..., B, H], convolved."""
        return self._convolve(x, moving, 1)

    def _convolve(self, x: torch.Tensor, moving: torch.Tensor, side: int) -> torch.Tensor:
        groups = self._shape[2]
        base = self.base_kernel[side].unflatten(-1, (groups, -1))  # [taps, groups, size]
        kernel = base + moving.unsqueeze(-1)  # [..., B, taps, groups, size]
        parts = x.unflatten(-1, (groups, -1))  # [..., B, groups, size]
        out = kernel[..., 0, :, :] * parts
        for tap in range(1, min(self._shape[1], x.shape[-2])):
            earlier = F.pad(parts[..., :-tap, :, :], (0, 0, 0, 0, tap, 0))
            out = out + kernel[..., tap, :, :] * earlier
        return out.flatten(-2)


def convolved(
    x: torch.Tensor,
    sublayer: Callable[[torch.Tensor], torch.Tensor],
    conv: GroupedConv | None,
    block_size: int,
) -> torch.Tensor:
    """Return a sublayer's output on the rows of blocks, between its convolutions if it has them.

    Args:
        x: [..., R, H], normed rows of R / B blocks one after the other.
        sublayer: Keeps the shape of what it is given.
        conv: Around the sublayer, or None.
        block_size: B.

    Returns:
        [..., R, H].
    """
    if conv is None:
        return sublayer(x)
    blocks, moving = conv.before(x.unflatten(-2, (-1, block_size)))
    output = sublayer(blocks.flatten(-3, -2))
    return conv.after(output.unflatten(-2, (-1, block_size)), moving).flatten(-3, -2)
