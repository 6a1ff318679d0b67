# SPDX-License-Identifier: Apache-2.0
"""What numbers were taken on and with, for a run's manifest."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

__all__ = ["describe_machine", "git_state", "shareable", "versions"]

ROOT = Path(__file__).parents[1]
# SGLang's kernels were called sgl-kernel before they were called sglang-kernel.
PACKAGES = ("sglang-dflash", "sglang", "torch", "transformers", "triton", "sglang-kernel",
            "sgl-kernel", "flashinfer-python", "flash-attn-4", "numpy", "matplotlib")  # fmt: skip
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY")
GPU_FIELDS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")


def describe_machine() -> dict[str, Any]:
    """Return processor, memory, GPUs and the environment that changes speed."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith("SGLANG_DFLASH_")
        },
    }


def versions() -> dict[str, str]:
    """Return the installed versions of what matters."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Return commit and whether files differ from it; None where this is no checkout."""
    commit, status = _run("git", "rev-parse", "HEAD"), _run("git", "status", "--porcelain")
    return {"commit": commit or None, "dirty": bool(status)}


def shareable(text: str) -> str:
    """Return a command line without the paths of this machine."""
    for path, name in ((sys.executable, "python"), (f"{ROOT}/", ""), (str(Path.home()), "~")):
        text = text.replace(path, name)
    return text


def _run(*words: str) -> str:
    try:
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[dict[str, str]]:
    text = _run("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    return [
        dict(zip(GPU_FIELDS, (cell.strip() for cell in line.split(",")), strict=False))
        for line in text.splitlines()
    ]
