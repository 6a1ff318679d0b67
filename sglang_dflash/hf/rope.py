# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies of a draft, written out in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sglang_dflash.draft.rope import amplitude

if TYPE_CHECKING:
    from sglang_dflash.draft.config import DraftConfig

__all__ = ["rope_frequencies", "rotate"]


def rope_frequencies(config: DraftConfig) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each rotating pair, and the factor on cosine and sine.

    Args:
        config: The draft.

    Returns:
        [rotary_dim / 2] float32 radians per position, and 1.0 except with yarn.

    Source: Su et al. 2021 (arXiv 2104.09864); yarn is Peng et al. 2023 (arXiv 2309.00071). Must
    equal `ROPE_INIT_FUNCTIONS` of transformers.
    """
    width = config.rotary_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, config), amplitude(scaling)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neox_style: bool
) -> torch.Tensor:
    """Return heads turned by their positions' angles; channels beyond the tables stay.

    Args:
        x: [n, heads, T, D] any float type.
        cos: [T, rotary_dim / 2] float32.
        sin: [T, rotary_dim / 2] float32.
        neox_style: True pairs channel i with i + rotary_dim / 2, False with i + 1.

    Returns:
        [n, heads, T, D], the type of `x`.
    """
    width = 2 * cos.shape[-1]
    turning, rest = x[..., :width].float(), x[..., width:]
    if neox_style:
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def _llama3(frequencies: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    """Divide slow turns by the factor, keep fast ones, blend between."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling["factor"])


def _yarn(
    frequencies: torch.Tensor, scaling: dict[str, float], config: DraftConfig
) -> torch.Tensor:
    """Divide slow turns by the factor, keep fast ones, blend by channel between."""

    def channel_turning(times: float) -> float:
        """Return the (fractional) pair that turns so often over the original context."""
        ratio = scaling["original_max_position_embeddings"] / (times * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = channel_turning(scaling.get("beta_fast", 32))
    high = channel_turning(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001
    channels = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    divide = ((channels - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - divide) + divide / scaling["factor"])
