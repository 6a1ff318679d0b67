# SPDX-License-Identifier: Apache-2.0
"""The memory of the host, or of the container (control groups, version 2) around this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["free_memory", "total_memory"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def total_memory() -> int:
    """Return the bytes that this process and its neighbours can have at most."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def free_memory() -> int:
    """Return the bytes that can be taken without swapping: cached files give way.

    SGLang counts them as used where a container is limited, and a server has just read its
    weights.
    """
    left = (max(limit - held, 0) for limit, held in _limits())
    return min([psutil.virtual_memory().available, *left])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, held) in bytes for each limited control group (version 2) around us.

    Groups that cannot be read limit nothing. Source: the kernel's
    Documentation/admin-guide/cgroup-v2.rst, "Memory".
    """
    for folder in _own_groups():
        try:
            limit = (folder / "memory.max").read_text().strip()
            held = int((folder / "memory.current").read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:  # none there, out of sight, or gone by now
            continue
        if limit == "max":
            continue
        stat = {name: int(value) for name, value in map(str.split, lines)}
        cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        yield int(limit), max(held - cached, 0)  # the kernel sums the latter up less often


def _own_groups() -> list[Path]:
    """Return the folders of this process's control group and of those around it."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    return [] if own is None else [_CGROUPS / own, *(_CGROUPS / p for p in Path(own).parents)]
