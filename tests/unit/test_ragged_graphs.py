# SPDX-License-Identifier: Apache-2.0
"""When SGLang is asked to capture verify graphs by rows, and that it is forgotten afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.platforms import current_platform

from sglang_dflash import defaults, plugin
from sglang_dflash.options import Options

MODE = "SGLANG_RAGGED_VERIFY_MODE"
TARGET = SimpleNamespace(has_mrope=False)
MEASURED = Options(budget="measured")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process believes that it has CUDA; it forgets what it asked for."""
    assert decode_cuda_graph_runner  # loaded before anything is told of a GPU
    monkeypatch.setattr(type(current_platform), "is_out_of_tree", lambda _: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(MODE, "")  # restored afterwards, whatever the test sets
    monkeypatch.delenv(MODE)
    yield
    plugin._forget_graphs()


def test_the_budget_asks_for_them_and_the_next_engine_is_free_of_it() -> None:
    plugin._ask_for_ragged_graphs(MEASURED, TARGET)
    assert os.environ[MODE] == "compact"
    plugin._forget_graphs()
    assert MODE not in os.environ


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "compact")
    plugin._ask_for_ragged_graphs(MEASURED, TARGET)
    plugin._forget_graphs()
    assert os.environ[MODE] == "compact"
    monkeypatch.setenv(MODE, "cap-accept")
    with pytest.raises(ValueError, match=r"cap-accept: unset one"):
        plugin._ask_for_ragged_graphs(MEASURED, TARGET)


@pytest.mark.parametrize(
    ("options", "target"),
    [
        (Options(), TARGET),
        (Options(budget="fixed"), TARGET),
        (MEASURED, SimpleNamespace(has_mrope=True)),
    ],
)
def test_nobody_else_asks(options: Options, target: SimpleNamespace) -> None:
    plugin._ask_for_ragged_graphs(options, target)
    assert MODE not in os.environ
    assert not plugin._plans_on_device(options, target)


def test_another_accelerator_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"SGLANG_DFLASH_BUDGET.*'auto', which verifies whole"):
        plugin._plans_on_device(MEASURED, TARGET)


def test_only_our_worker_that_plans_on_the_device_verifies_ragged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dflash = SimpleNamespace(is_dflash=lambda: True)
    other = SimpleNamespace(is_dflash=lambda: False)
    found = [plugin._verifies_ragged(lambda _: False, each) for each in (dflash, other)]
    assert found == [False, False]
    monkeypatch.setattr(plugin._Process, "ragged_graphs", True)
    found = [plugin._verifies_ragged(lambda _: False, each) for each in (dflash, other)]
    assert found == [True, False]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_says_what_has_been_seen_on_cpus_only(
    deterministic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    defaults.warn_of_other_kernels(SimpleNamespace(enable_deterministic_inference=deterministic))
    assert ("tested on CPUs" in caplog.text) == deterministic
