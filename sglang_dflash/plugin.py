# SPDX-License-Identifier: Apache-2.0
"""The two entry points, and every hook: the one file that changes SGLang."""

from __future__ import annotations

import os

__all__ = ["cpu_platform", "register"]


def cpu_platform() -> str | None:
    """Return the CPU platform's dotted class path where torch sees no accelerator, else None.

    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU build, so ours steps aside.
    """
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or torch.accelerator.is_available():
        return None
    return "sglang_dflash.cpu.platform:CpuPlatform"


def register() -> None:
    """Install the hooks (called by SGLang in every process)."""
