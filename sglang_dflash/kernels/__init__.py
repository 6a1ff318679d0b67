# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, each beside a torch reference of the same signature.

They replace chains of small operators, each of which a GPU's host has to launch. What is not on a
GPU goes through the reference.
"""

from __future__ import annotations

import torch

__all__ = ["has_kernels"]


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return whether kernels run where a tensor [...] lies; Triton's interpreter is for tests."""
    return tensor.is_cuda
