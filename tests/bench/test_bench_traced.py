# SPDX-License-Identifier: Apache-2.0
"""What the scripts make of a trace, and of a draft that knows nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench import calibration, changing_load
from bench.calibration import by_chance_alone, curve_of, judged
from bench.changing_load import columns, rolling, summarise
from bench.manifest import weights_of
from bench.random_draft import write_random_draft
from bench.traced import Load, arguments, parsed, traced_engine
from sglang_dflash.demo.model import bundled_draft
from sglang_dflash.draft.checkpoint import check_checkpoint
from sglang_dflash.trace import Trace

BLOCK = 4


def step(widths: list[int], accepted: list[int], chance: float = 0.5) -> dict[str, Any]:
    """Return a step as a trace has it."""
    proposals = [[chance] * (BLOCK - 1)] * len(widths)
    return {
        "time": 0.0, "requests": len(widths), "draft_width": BLOCK, "explores": False,
        "widths": widths, "accepted": accepted, "tokens": len(widths) + sum(accepted),
        "expected_tokens": 1.5 * len(widths), "confidence": proposals, "chances": proposals,
        "seconds": 0.1,
    }  # fmt: skip


def test_a_rolling_mean_looks_ahead() -> None:
    values = [4.0, 0.0, 2.0, 2.0, 8.0]
    expected = [np.mean(values[i : i + 3]) for i in range(5)]
    np.testing.assert_allclose(rolling(values, 3), expected)


@pytest.mark.parametrize("lag", [0, 15, 40])
def test_a_plan_that_lags_is_seen_to(lag: int) -> None:
    steps = [step([4], [1])] * (100 + lag) + [step([1], [0])] * (100 - lag)
    first, second = summarise(columns(steps), [0, 100], ["many rows", "few rows"])
    assert (first["rows"], second["rows"]) == (4, 1)
    assert first["followed_after"] == 0
    assert second["followed_after"] == max(0, lag - 3)  # three rows too many in 20 steps are few
    assert second["tokens"] == 1


def test_only_what_verify_judged_counts() -> None:
    found = judged([step([4, 2], [1, 1]), step([1, 1], [0, 0])], BLOCK)
    assert found.accepted.tolist() == [True, False, True]
    with pytest.raises(SystemExit, match="no step of the window drafted"):
        judged([step([1], [0]) | {"confidence": None}], BLOCK)


def test_chance_alone_explains_the_error_of_perfect_predictions_only() -> None:
    generator = torch.Generator().manual_seed(1)
    chances = torch.rand(400, generator=generator)
    accepted = torch.rand(400, generator=generator) < chances
    alone = by_chance_alone(chances)
    right = curve_of(chances, accepted).expected_calibration_error().item()
    wrong = curve_of(chances.sqrt(), accepted).expected_calibration_error().item()
    assert 0.02 < alone < 0.08
    assert right < 2 * alone < wrong


def started(*_: object) -> NoReturn:
    raise AssertionError("an engine was started")


@pytest.mark.parametrize("script", [calibration, changing_load])
@pytest.mark.parametrize("suffix", [".json", ".png"])
def test_a_record_is_not_overwritten_unasked(
    script: ModuleType, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And the refusal comes before the minutes of measuring."""
    monkeypatch.setattr(script, "traced_engine", started)
    record = (tmp_path / "record").with_suffix(suffix)
    record.touch()
    monkeypatch.setattr("sys.argv", ["script", "--out", str(tmp_path / "record")])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert f"{record} exists: name another by --out" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*sys.argv, "--overwrite"])
    with pytest.raises(AssertionError, match="an engine was started"):
        script.main()
    monkeypatch.setattr("sys.argv", ["script", "--out", str(tmp_path / "none/record")])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("quick", [False, True])
def test_records_without_a_place_have_their_day_in_the_name(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracked evidence beside them has not."""
    monkeypatch.setattr("sys.argv", ["script", *(["--quick"] if quick else [])])
    out = parsed(arguments("a script"), "cpu-calibration").out
    day, name = out.name[:10], out.name[10:]
    assert datetime.fromisoformat(day)
    assert name == f"-cpu-calibration{'-quick' if quick else ''}"
    assert out.parent == Path(calibration.__file__).parent / "results"


class Tokenizer:
    """Makes one token of a text."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(text)]}


class NoEngine:
    """As much of `sglang.Engine` as a start and an end ask; its draft is trained meanwhile."""

    tokenizer_manager = SimpleNamespace(tokenizer=Tokenizer())

    def __init__(self, *, speculative_draft_model_path: str, **_: object) -> None:
        (Path(speculative_draft_model_path) / "model.safetensors").write_text("trained further")

    def shutdown(self) -> None:
        """Do nothing."""


class Served(NamedTuple):
    """A traced engine that has 40 steps to show for each load."""

    manifest: dict[str, Any]
    steps: list[dict[str, Any]]

    def serve(self, load: Load) -> float:
        began = float(len(self.steps))
        self.steps.extend(step([4, 2], [1, 1]) | {"time": began + i} for i in range(40))
        return began

    def trace(self) -> Trace:
        return Trace(BLOCK, self.steps)


@pytest.mark.parametrize("script", [calibration, changing_load])
def test_a_record_names_the_weights_that_the_engine_started_with(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may hold others when the run ends."""
    models = {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    for name, folder in models.items():
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_text(name)
    expected = weights_of(models)

    @contextmanager
    def engine_without_one(args: argparse.Namespace) -> Iterator[Served]:
        with traced_engine(args) as engine:
            yield Served(engine.manifest, [])

    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=NoEngine))
    monkeypatch.setattr(script, "traced_engine", engine_without_one)
    words = f"--target {models['target']} --draft {models['draft']} --out {tmp_path}/record --quick"
    monkeypatch.setattr("sys.argv", ["script", *words.split()])
    script.main()
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["weights"] == expected
    assert set(found["models"]) == set(models)
    assert {"machine", "versions", "git", "command", "date"} <= set(found)


def test_a_random_draft_is_a_draft_of_the_same_shapes(tmp_path: Path) -> None:
    source = bundled_draft()
    folder = write_random_draft(source, tmp_path / "random")
    check_checkpoint(str(folder), None)
    own, theirs = (load_file(f / "model.safetensors") for f in (folder, source))
    assert {k: (v.shape, v.dtype) for k, v in own.items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.items()
    }
    matrices = [name for name in own if own[name].ndim > 1]
    for name in matrices:
        pair = torch.stack([own[name].flatten().float(), theirs[name].flatten().float()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.05
