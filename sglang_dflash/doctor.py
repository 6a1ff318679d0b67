# SPDX-License-Identifier: Apache-2.0
"""`sglang-dflash doctor`: what is installed, who serves, and whether SGLang is as we need it."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

__all__ = ["Diagnosis", "diagnose"]

PACKAGES = ("sglang-dflash", "sglang", "torch", "transformers", "triton", "flashinfer-python")
ENTRY_POINTS = {"sglang.srt.plugins": "dflash", "sglang.srt.platforms": "dflash_cpu"}


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found.

    Attributes:
        versions: Package name -> version, or "not installed".
        platform: Class path of the platform that SGLang chose; None where it chose none.
        device: Name of the device type of that platform.
        worker: Who serves DFLASH by the environment: "plugin" or "upstream".
        entry_points: Group -> whether SGLang can find ours there, and may load it.
        problems: What keeps the plugin from working, in words; empty where all is well.
    """

    versions: dict[str, str]
    platform: str | None
    device: str | None
    worker: str
    entry_points: dict[str, bool]
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the findings and `ok`."""
        return {"ok": not self.problems, **vars(self)}


def diagnose(environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Return what is installed here and what is wrong with it."""
    problems: list[str] = []
    found = _entry_points(environ, problems)
    worker = _worker(environ, problems)
    versions = {name: _version(name) for name in PACKAGES}
    platform = device = None
    if versions["sglang"] == "not installed":
        problems.append("sglang is not installed: pip install sglang")
    else:
        with _quiet_imports():
            platform, device = _platform(problems)
            problems += _seams()
    return Diagnosis(versions, platform, device, worker, found, problems)


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Keep back what SGLang's modules say of other hardware while they are imported."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _entry_points(environ: Mapping[str, str], problems: list[str]) -> dict[str, bool]:
    """Return per group whether SGLang will load ours; SGLANG_PLUGINS can leave it out."""
    listed = environ.get("SGLANG_PLUGINS", "")
    allowed = {name.strip() for name in listed.split(",") if name.strip()}
    found = {}
    for group, name in ENTRY_POINTS.items():
        installed = bool(entry_points(group=group, name=name))
        found[group] = installed and (not allowed or name in allowed)
        if not installed:
            problems.append(f"no entry point {name} in {group}: pip install sglang-dflash again")
        elif not found[group]:
            problems.append(f"SGLANG_PLUGINS={listed} leaves {name} out: add it, or unset it")
    return found


def _worker(environ: Mapping[str, str], problems: list[str]) -> str:
    from sglang_dflash.options import Options

    try:
        return Options.read(environ).worker
    except ValueError as error:
        problems.append(str(error))
        return "unknown"


def _platform(problems: list[str]) -> tuple[str | None, str | None]:
    try:
        from sglang.srt.platforms import current_platform

        kind = type(current_platform)
        return f"{kind.__module__}.{kind.__qualname__}", str(current_platform.device_type)
    except (ImportError, RuntimeError) as error:  # RuntimeError: several platforms claim it
        problems.append(f"SGLang finds no platform: {error}")
        return None, None


def _seams() -> list[str]:
    from sglang_dflash import seams

    return seams.check()
