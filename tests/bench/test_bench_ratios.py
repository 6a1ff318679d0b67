# SPDX-License-Identifier: Apache-2.0
"""The ratios' command line, where mistakes are named before an engine starts, and their record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import ratios
from bench.manifest import weights_of
from bench.ratios import Child, parse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds 0", "--rounds: '0' is not a whole number, 1 or more"),
        ("--rounds two", "--rounds: 'two' is not a whole number, 1 or more"),
        ("--concurrency 1,0", "--concurrency: '0' is not a whole number, 1 or more"),
        ("--concurrency 1,", "--concurrency: '' is not a whole number, 1 or more"),
        ("--concurrency 4,4", "--concurrency: '4,4': each number once"),
        ("--max-new-tokens -1", "--max-new-tokens: '-1' is not a whole number, 1 or more"),
        ("--max-new-tokens 1", "--max-new-tokens 1: the first token is the prompt's"),
        ("--answers-per-slot 0", "--answers-per-slot: '0' is not a whole number, 1 or more"),
        ("--warmup-steps -1", "--warmup-steps: '-1' is not a whole number, 0 or more"),
        ("--random-range-ratio 0", "--random-range-ratio: '0' is not a number above 0, at most 1"),
        ("--random-range-ratio nan", "'nan' is not a number above 0, at most 1"),
        ("--temperature -0.1", "--temperature: '-0.1' is not a number, 0 or more"),
        ("--temperature inf", "--temperature: 'inf' is not a number, 0 or more"),
        ("--engines plain,fast", "--engines: 'fast' is not one of plain, dflash"),
        ("--engines plain,plain", "--engines: 'plain,plain': name each engine once"),
        ("--engines vllm", "--engines vllm needs --vllm-python"),
        ("--engines vllm --vllm-python p", "add --answers-per-slot 1"),
    ],
)
def test_a_mistake_is_named(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments.split())
    assert message in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of a run its measurements would be lost."""
    nowhere = tmp_path / "none/record.json"
    for path, message in ((nowhere, "there is no folder"), (tmp_path, "cannot be written")):
        with pytest.raises(SystemExit, match="2"):
            parse(["--json", str(path)])
        assert f"--json: {path}" in (printed := capsys.readouterr().err)
        assert message in printed
    record = tmp_path / "record.json"
    assert parse(["--json", str(record)]).json == record
    assert not record.exists()
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != tmp_path
    )  # root may write anywhere
    with pytest.raises(SystemExit, match="2"):
        parse(["--json", str(record)])
    assert f"--json: {record} cannot be written" in capsys.readouterr().err


def test_numbers_are_read() -> None:
    words = "--engines vllm,plain --vllm-python p --answers-per-slot 1 --concurrency 1,8"
    args = parse([*words.split(), "--temperature", "0.7", "--random-range-ratio", "1"])
    assert args.engines == ["vllm", "plain"]
    assert args.concurrency == [1, 8]
    assert (args.rounds, args.temperature, args.random_range_ratio) == (5, 0.7, 1.0)
    quick = parse(["--quick", "--concurrency", "1,2,4", "--warmup-steps", "200"])
    assert (quick.rounds, quick.concurrency, quick.warmup_steps) == (1, [1, 2], 20)


class OneToken(Child):
    """An engine whose every answer is one token after one step."""

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        count = len(message["prompts"])
        return {"tokens": [[1]] * count, "seconds": 1.0, "steps": count, "accepted": 0}


@pytest.mark.parametrize(
    ("engines", "named"), [("plain,dflash-fixed", ["target", "draft"]), ("plain", ["target"])]
)
def test_a_record_names_the_weights_that_engines_started_with(
    engines: str, named: list[str], word_tokenizer: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A folder may hold others when the run ends."""
    draft, record = tmp_path / "draft", tmp_path / "record.json"
    draft.mkdir()
    weights = draft / "model.safetensors"
    weights.write_text("before")
    models = {"target": str(word_tokenizer), "draft": str(draft)}
    expected = weights_of({name: models[name] for name in named})

    def start(name: str, *_: object) -> Child:
        weights.write_text("trained further")
        ends = [sys.executable, "-c", "input()"]
        process = subprocess.Popen(ends, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return OneToken(name, process, tmp_path / "log")

    monkeypatch.setattr(ratios, "start", start)
    words = f"ratios --engines {engines} --quick --target {word_tokenizer} --draft {draft}"
    monkeypatch.setattr("sys.argv", [*words.split(), "--json", str(record)])
    ratios.main()
    found = json.loads(record.read_text())
    assert found["weights"] == expected
    assert list(found["models"]) == named
    assert {"machine", "rows", "records"} <= set(found)
