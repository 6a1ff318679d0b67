# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several folders share."""

from __future__ import annotations

import os

# The suite is for CPUs, on any machine; tests/gpu and tests/kernels can be asked to run on a GPU.
if os.environ.get("DFLASH_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Inherited by the engines: one thread each, for several run on few cores, and a scheduler whose
# books do not balance when it is idle dies of it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")

import interpreted  # noqa: F401, I001  (before anything that imports Triton)

import hashlib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import dying
import pairs
import pytest
import torch
from pairs import Pair, make_pair
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

import sglang_dflash.draft.grouped_conv
import sglang_dflash.draft.selector
import sglang_dflash.hf.draft
from sglang_dflash.demo.model import bundled_draft, ensure_target

# The longest first, so that the last of them does not run alone.
_FIRST = ("test_exactness", "test_startup", "test_server", "test_sampling")


def pytest_configure(config: pytest.Config) -> None:
    """Let a dying engine's last words be read though its death ends the process."""
    dying.capture = config.pluginmanager.getplugin("capturemanager")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first."""
    items.sort(key=lambda item: item.path.stem not in _FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Let `pytest -n N` keep together what shares engines."""
    return _ByEngines(config, log)


class _ByEngines(LoadScopeScheduling):
    """A file's tests go to one worker; those of test_exactness by the target of their case."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        target = re.search(r"\[(\w+)", test)
        return f"{file} {target[1]}" if target and "test_exactness" in file else file


@pytest.fixture(scope="session")
def llama_pair(request: pytest.FixtureRequest) -> Pair:
    """A tiny Llama target and its draft; tau about 2.1 greedy, 1.4 at temperature 1."""
    return _kept_pair(request, "llama")


@pytest.fixture(scope="session")
def qwen3_pair(request: pytest.FixtureRequest) -> Pair:
    """A tiny Qwen3 target and its draft; tau about 2.6 greedy, 1.5 at temperature 1."""
    return _kept_pair(request, "qwen3")


@pytest.fixture(scope="session")
def windowed_pair(request: pytest.FixtureRequest) -> Pair:
    """A tiny Llama target whose draft has a sliding window of 16 in its last layer.

    Its weights come with copies of the target's embedding and head.
    """
    return _kept_pair(request, "llama", sliding_window=16)


@pytest.fixture(scope="session")
def dflash2_pair(request: pytest.FixtureRequest) -> Pair:
    """A tiny Qwen3 target and a DFlash2 draft; tau about 3.9 greedy, 2.7 at temperature 1."""
    return _kept_pair(request, "qwen3", dflash2=True)


@pytest.fixture(scope="session")
def smollm2_pair() -> Pair:
    """SmolLM2-135M-Instruct and the bundled draft: real text; fetched on first use (93 MB)."""
    return Pair(ensure_target(), bundled_draft(), block_size=8)


def _kept_pair(
    request: pytest.FixtureRequest,
    family: Literal["llama", "qwen3"],
    *,
    sliding_window: int | None = None,
    dflash2: bool = False,
) -> Pair:
    """Return a pair from pytest's cache, made anew when what makes it changed (some 10 s)."""
    modules = [pairs, sglang_dflash.hf.draft]
    if dflash2:
        modules += [sglang_dflash.draft.grouped_conv, sglang_dflash.draft.selector]
    sources = (Path(str(module.__file__)) for module in modules)
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    digest.update(f"{torch.__version__} {family} {sliding_window} {dflash2}".encode())
    root = Path(request.config.cache.mkdir("dflash_pairs"))
    kind = "dflash2" if dflash2 else sliding_window or "full"
    folder = root / f"{family}-{kind}-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        unfinished = Path(tempfile.mkdtemp(dir=root))
        make_pair(unfinished, family, sliding_window=sliding_window, dflash2=dflash2)
        try:
            unfinished.rename(folder)  # whole or absent, also with two test runs at a time
        except OSError:
            shutil.rmtree(unfinished)
    return Pair(folder / "target", folder / "draft", block_size=8)
