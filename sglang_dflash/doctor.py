# SPDX-License-Identifier: Apache-2.0
"""`sglang-dflash doctor`: what is installed, who serves, and whether SGLang is as we need it."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash import seams

__all__ = ["Diagnosis", "cpu_words", "diagnose"]

PACKAGES = ("sglang-dflash", "sglang", "torch", "transformers", "triton", "flashinfer-python")
ENTRY_POINTS = {"sglang.srt.plugins": "dflash", "sglang.srt.platforms": "dflash_cpu"}
SGLANG_DEVICES = ("cuda", "npu", "xpu")  # on whose platforms SGLang itself takes DFLASH
CPU_INFO = Path("/proc/cpuinfo")
CPU_FLAGS = ("avx512_bf16", "amx_bf16")  # with which bfloat16 is fast on a CPU
# What a native library that is broken, missing or too old raises while a module loads it.
BROKEN = (ImportError, OSError, RuntimeError)


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found.

    Attributes:
        versions: Python or a package's name -> version, or "not installed".
        cpu: Its cores, and what it has of `CPU_FLAGS`.
        accelerator: As torch sees it, or "none"; None where torch cannot be loaded.
        platform: Class path of the platform that SGLang chose; None where it chose none.
        device: Name of the device type of that platform.
        worker: Who serves DFLASH here, by the environment and the platform, in words.
        entry_points: Group -> whether SGLang can find ours there, and may load it.
        problems: What keeps the plugin from working, in words; empty where all is well.
    """

    versions: dict[str, str]
    cpu: str
    accelerator: str | None
    platform: str | None
    device: str | None
    worker: str
    entry_points: dict[str, bool]
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the findings and `ok`."""
        return {"ok": not self.problems, **vars(self)}


class _Platform(NamedTuple):
    """SGLang's platform.

    Attributes:
        path: class path.
        device: name of its device type.
        workers: of "plugin" and "upstream", those that may serve DFLASH there.
    """

    path: str
    device: str
    workers: tuple[str, ...]


def diagnose(environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Return what is installed here and what is wrong with it."""
    problems: list[str] = []
    found = _entry_points(environ, problems)
    versions = {"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    if versions["sglang"] == "not installed":
        problems.append(f"sglang is not installed: pip install sglang=={seams.TESTED_SGLANG}")
    chosen = None
    with _quiet_imports():
        accelerator = _accelerator(problems)
        # Without torch SGLang would only say the same again.
        if accelerator is not None and versions["sglang"] != "not installed":
            chosen = _platform(problems)
            # Where SGLang refuses DFLASH, what cannot be loaded there is no fault of the install.
            problems += _seams() if chosen is None or chosen.workers else []
    return Diagnosis(
        versions,
        cpu_words(),
        accelerator,
        chosen and chosen.path,
        chosen and chosen.device,
        _worker(environ, chosen, found, problems),
        found,
        problems,
    )


def cpu_words(cpu_info: Path = CPU_INFO) -> str:
    """Return how many cores this process may use, and what of `CPU_FLAGS` Linux says of them."""
    linux = hasattr(os, "sched_getaffinity")
    number = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
    cores = f"{number} core{'' if number == 1 else 's'}"
    if not cpu_info.is_file():
        return cores
    lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return ", ".join([cores, *(f"{f} {'yes' if f in flags else 'no'}" for f in CPU_FLAGS)])


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
            problems.append(
                f"no entry point {name} in {group}: install sglang-dflash again from its clone"
            )
        elif not found[group]:
            problems.append(f"SGLANG_PLUGINS={listed} leaves {name} out: add it, or unset it")
    return found


def _accelerator(problems: list[str]) -> str | None:
    try:
        import torch

        if not torch.accelerator.is_available():
            return "none"
        kind = torch.accelerator.current_accelerator().type
        name = f" ({torch.cuda.get_device_name()})" if kind == "cuda" else ""
        return f"{torch.accelerator.device_count()} x {kind}{name}"
    except BROKEN as error:
        problems.append(_broken("torch", error))
        return None


def _platform(problems: list[str]) -> _Platform | None:
    try:
        from sglang.srt.platforms import current_platform

        kind, device = type(current_platform), str(current_platform.device_type)
        path = f"{kind.__module__}.{kind.__qualname__}"
        if current_platform.is_out_of_tree():  # ours; benchmarks let SGLang's worker run there
            both = getattr(current_platform, "serves_upstream_worker", False)
            return _Platform(path, device, ("plugin", "upstream") if both else ("plugin",))
        # Elsewhere SGLang refuses DFLASH.
        return _Platform(path, device, ("plugin", "upstream") if device in SGLANG_DEVICES else ())
    except BROKEN as error:  # RuntimeError also where several platforms claim the machine
        problems.append(f"SGLang finds no platform: {type(error).__name__}: {error}")
        return None


def _seams() -> list[str]:
    try:
        return seams.check()
    except BROKEN as error:
        return [_broken("SGLang", error)]


def _broken(what: str, error: Exception) -> str:
    return (
        f"{what} cannot be loaded ({type(error).__name__}: {error}): it, or a library that it "
        "needs, is broken or missing. Install into a fresh environment"
    )


def _worker(
    environ: Mapping[str, str],
    chosen: _Platform | None,
    found: Mapping[str, bool],
    problems: list[str],
) -> str:
    """Return who serves DFLASH, in words, by the rules of `plugin.py`."""
    from sglang_dflash.options import Options

    try:
        choice = Options.read(environ).worker
    except ValueError as error:
        problems.append(str(error))
        return "unknown"
    if chosen is None:
        return "unknown"
    if not found["sglang.srt.plugins"]:
        return "not the plugin: SGLang does not load it"
    if not chosen.workers:
        problems.append(
            f"SGLang refuses DFLASH on {chosen.path} ({chosen.device}). On a CPU leave the choice "
            "of platform to the plugin: unset SGLANG_USE_CPU_ENGINE and SGLANG_PLATFORM"
        )
        return "none"
    if choice == "upstream" and choice not in chosen.workers:
        problems.append(
            "SGLANG_DFLASH_WORKER=upstream: SGLang's own worker needs CUDA, and DFLASH is refused "
            f"on {chosen.device}. Unset it"
        )
        return "none"
    if choice == "upstream":
        return "SGLang's own (SGLANG_DFLASH_WORKER=upstream)"
    if chosen.workers == ("plugin",):
        return "plugin"
    if choice == "plugin":
        return "plugin, or none (SGLANG_DFLASH_WORKER=plugin)"
    return "plugin (auto; SGLang's own worker for what it does not serve)"
