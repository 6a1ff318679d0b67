# SPDX-License-Identifier: Apache-2.0
"""From the host to the device without waiting for it."""

from __future__ import annotations

import torch

__all__ = ["to_device"]


def to_device(on_host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a copy on `device` that its stream orders before what comes next.

    Args:
        on_host: [...], any shape and dtype; itself is returned where the device is the host.
        device: where to.
    """
    if torch.device(device).type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)
