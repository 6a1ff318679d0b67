# SPDX-License-Identifier: Apache-2.0
"""Whole sweeps over real HTTP, with toy servers: order, deaths, kills, mistakes and exit codes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import pytest
import yaml
from sglang.benchmark.serving import RequestFuncOutput

from bench.cli import main
from bench.load import Target, record_of
from bench.measures import steady_window, tokens_in
from bench.server import Server

ROOT = Path(__file__).parents[2]
MakeRecipe = Callable[..., Path]
VIEWS = ("manifest.json", "raw.jsonl", "summary.json", "summary.md", "report.html")


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def point_files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "points").glob("*.json")}


def changed(path: Path, **parts: Any) -> Path:
    recipe = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**recipe, **parts}))
    return path


def toys() -> list[psutil.Process]:
    """Return the toy servers that this test run left alive."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("toy_server.py" in word for word in process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("together", [True, False])
def test_a_sweep_measures_all_points(
    make_recipe: MakeRecipe, tmp_path: Path, together: bool
) -> None:
    servers = {"together": together, "start_timeout_s": 30}
    recipe = make_recipe({"plain": ["--token-ms", 12], "fast": ["--token-ms", 3]}, servers=servers)
    run = tmp_path / "run"
    assert main(["sweep", str(recipe), "--out", str(run)]) == 0
    assert all((run / name).is_file() for name in VIEWS)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["weights"] == {"target": {"sha256": {}}}  # a tokenizer alone
    assert len(point_files(run)) == 8
    lines = [json.loads(line) for line in (run / "raw.jsonl").read_text().splitlines()]
    assert len(lines) == 8 * 4
    assert all(line["error"] is None and line["output_tokens"] == 4 for line in lines)
    points = summary_of(run)["points"]
    assert [(p["engine"], p["concurrency"]) for p in points] == [
        ("plain", 1), ("fast", 1), ("plain", 2), ("fast", 2),
    ]  # fmt: skip
    for point in points:
        assert point["acceptance_length"] is None
        if point["engine"] == "fast":
            assert point["identical"] == {"same": 8, "of": 8}
            assert point["speedup"]["min"] > 1
    assert toys() == []


def test_a_cache_that_was_not_emptied_is_noted(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One server has the call that empties it, as vLLM has in its development mode only."""
    run = tmp_path / "run"
    load = {"concurrency": [2], "min_prompts": 4, "max_new_tokens": 2, "repeats": 1}
    recipe = make_recipe({"fast": ["--can-flush"]}, load=load)
    assert main(["sweep", str(recipe), "--out", str(run)]) == 0
    flushed = {point["engine"]: point["cache_flushed"] for point in summary_of(run)["points"]}
    assert flushed == {"plain": False, "fast": True}
    note = "PREFIX CACHE NOT EMPTIED before points of plain;"
    assert note in (run / "summary.md").read_text()
    lines = "".join(capsys.readouterr()).splitlines()
    assert [line.split(".")[0] for line in lines if line.endswith("CACHE NOT EMPTIED")] == ["plain"]


def test_an_open_loop_sends_at_the_asked_rate(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    load = {"concurrency": [], "request_rates": [20], "rate_seconds": 0.4, "min_prompts": 4,
            "max_new_tokens": 2, "repeats": 1, "warmup_tokens": 1}  # fmt: skip
    run = tmp_path / "run"
    assert main(["sweep", str(make_recipe(load=load)), "--out", str(run)]) == 0
    lines = [json.loads(line) for line in (run / "raw.jsonl").read_text().splitlines()]
    for engine in ("plain", "fast"):
        starts = [line["start_s"] for line in lines if line["engine"] == engine]
        assert len(starts) == 8
        gaps = [b - a for a, b in itertools.pairwise(starts)]
        # eight requests at 20 a second: the seeded draw spreads them, all at once they are not
        assert sum(gap > 0.005 for gap in gaps) >= 4


def test_a_server_that_measures_its_machine_starts_alone(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    toy = {name: ["--events", events] for name in ("plain", "fast")}
    path = make_recipe(toy)
    engines = yaml.safe_load(path.read_text())["engines"]
    engines[0]["starts_alone"] = True  # the first of the recipe is the last to start
    assert main(["sweep", str(changed(path, engines=engines)), "--out", str(tmp_path / "r")]) == 0
    ports, kinds = zip(*(line.split() for line in events.read_text().splitlines()), strict=True)
    second = kinds.index("started", 1)
    assert set(ports[:second]) == {ports[0]}
    assert kinds[1:second] == ("asked",) * 3  # the whole warm-up
    assert ports[second] != ports[0]


def test_a_server_that_dies_is_reported_and_the_sweep_goes_on(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three requests warm up, so the sixth falls into the first point; it dies each time."""
    run = tmp_path / "run"
    recipe = make_recipe({"fast": ["--die-at", 6]})
    assert main(["sweep", str(recipe), "--out", str(run)]) == 1
    names = set(point_files(run))
    assert {name for name in names if name.startswith("plain")} == {
        f"plain.words.c{c}.r{r}.json" for c in (1, 2) for r in (0, 1)
    }
    failures = summary_of(run)["failures"]
    assert failures["fast.words.c1.r0"] == "fast: the server ended with exit code 7"
    assert "toy: out of memory" in (run / "failures/fast.words.c1.r0.txt").read_text()
    assert "not measured: its server is down" in failures.values()
    printed = capsys.readouterr()
    assert "toy: out of memory" in printed.out + printed.err
    assert "--resume" in printed.err
    assert toys() == []


def test_a_server_that_died_once_is_started_again_and_resume_fills_the_gap(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    run, marker = tmp_path / "run", tmp_path / "died"
    recipe = make_recipe({"fast": ["--die-at", 6, "--die-once", marker]})
    assert main(["sweep", str(recipe), "--out", str(run)]) == 1
    before = point_files(run)
    assert len(before) == 7
    assert list(summary_of(run)["failures"]) == ["fast.words.c1.r0"]
    assert main(["sweep", str(recipe), "--resume", str(run)]) == 0
    after = point_files(run)
    assert set(after) - set(before) == {"fast.words.c1.r0.json"}
    assert {name: after[name] for name in before} == before
    assert summary_of(run)["failures"] == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_sweep_resumes_without_loss_or_repetition(
    make_recipe: MakeRecipe, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    recipe = make_recipe({"plain": ["--token-ms", 60], "fast": ["--token-ms", 60]})
    command = [sys.executable, "-m", "bench", "sweep", str(recipe)]
    process = subprocess.Popen(
        [*command, "--out", str(run)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 300
    while not run.is_dir() or len(point_files(run)) < 2:
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    output = process.communicate(timeout=180)[0].decode()
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert f"go on by: python -m bench sweep {recipe} --resume {run}" in output
        assert summary_of(run)["measurements"]["finished"] == len(point_files(run))
    before = point_files(run)
    assert 2 <= len(before) < 8
    while toys():  # the kernel tells them that their parent is gone
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert main(["sweep", str(recipe), "--resume", str(run)]) == 0
    after = point_files(run)
    assert len(after) == 8
    assert {name: after[name] for name in before} == before
    assert summary_of(run)["measurements"] == {"planned": 8, "finished": 8}
    assert not list(run.rglob(".*")), "an unfinished file was left"


class Asked(NamedTuple):
    """As much of a server as a record asks about."""

    sglang: bool


@pytest.mark.parametrize(
    ("meta", "error", "tokens"),
    [
        ({"completion_tokens": 5}, None, 5),
        (
            {"completion_tokens": 3, "finish_reason": {"type": "abort", "message": "full"}},
            "full",
            0,
        ),
        ({"error": "{'message': 'too long'}"}, "{'message': 'too long'}", 0),
        ({}, "no tokens came", 0),
    ],
)
def test_an_aborted_stream_is_an_error_and_no_tokens(
    meta: dict[str, Any], error: str | None, tokens: int
) -> None:
    """SGLang's request function reports these as successes of the length that was asked for."""
    output = RequestFuncOutput(success=True, output_len=64, latency=1.0)
    target = Target(cast(Server, Asked(sglang=True)), "model", len)
    record = record_of(0, output, ([], meta), 0.0, target)
    assert (record.error, record.output_tokens) == (error, tokens)


@pytest.mark.parametrize(
    ("meta", "rows"),
    [
        ({"spec_num_proposed_drafts": 21, "spec_verify_ct": 3}, 24),
        (
            {
                "spec_num_proposed_drafts": 21,
                "spec_verify_ct": 3,
                "spec_cap_lens_histogram": [0, 2, 0, 1],
            },
            5,
        ),
        ({}, None),
    ],
)
def test_verified_rows_are_the_server_s(meta: dict[str, Any], rows: int | None) -> None:
    """The block is not what a worker verifies that narrows its steps."""
    output = RequestFuncOutput(success=True, output_len=5, latency=1.0)
    target = Target(cast(Server, Asked(sglang=True)), "model", len)
    record = record_of(0, output, ([], {"completion_tokens": 5, **meta}), 0.0, target)
    assert record.verified_rows == rows


def test_a_server_that_counts_nothing_is_counted_by_the_tokenizer() -> None:
    output = RequestFuncOutput(success=True, output_len=64, latency=1.0, generated_text="a b c")
    target = Target(cast(Server, Asked(sglang=False)), "model", lambda text: len(text.split()))
    assert record_of(0, output, ([(0.1, None)], {}), 0.0, target).output_tokens == 3
    assert record_of(0, output, ([(0.1, 64)], {}), 0.0, target).output_tokens == 64


def test_the_last_chunk_is_inside_the_answer() -> None:
    """Its time to four places would be 0.4470, behind an end at 0.44698."""
    output = RequestFuncOutput(success=True, latency=0.44698, start_time=7.0)
    target = Target(cast(Server, Asked(sglang=True)), "model", len)
    seen: tuple[list[tuple[float, int | None]], dict[str, Any]]
    seen = [(7.2, 1), (7.44697, 5)], {"completion_tokens": 5}
    record = record_of(0, output, seen, 7.0, target)
    assert tokens_in(record, steady_window([record], 1)) == 5


def taken_port() -> tuple[socket.socket, int]:
    """Return a socket that listens, and its port; the port below is free."""
    while True:
        holder, below = socket.socket(), socket.socket()
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        try:
            below.bind(("127.0.0.1", port - 1))
        except OSError:
            holder.close()
            continue
        finally:
            below.close()
        holder.listen()
        return holder, port


def test_mistakes_exit_with_two_and_leave_nothing(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holder, port = taken_port()
    cases: list[tuple[Callable[[], Path], str]] = [
        (lambda: changed(make_recipe(), lod={}), "unknown key 'lod'; did you mean 'load'?"),
        (lambda: tmp_path / "none.yaml", "cannot read the recipe"),
        (lambda: make_recipe(datasets=[{"name": "x", "path": "none.jsonl"}]), "cannot read"),
        (lambda: make_recipe(target="./none"), "target: there is no folder ./none"),
        (lambda: make_recipe({"fast": ["--no-start"]}), "toy: no such model"),
        (lambda: make_recipe({"fast": ["--die-at", 1]}), "the server ended with exit code 7"),
        (lambda: make_recipe(servers={"port": port, "together": True}), f"port {port} is in use"),
        # the first server has started when the second's port is found to be taken
        (lambda: make_recipe(servers={"port": port - 1, "together": True}),
         f"engine fast: port {port} is in use"),
        (lambda: changed(make_recipe(), engines=[{"name": "plain", "args": ["--dtyp", "auto"]}]),
         "engine plain: SGLang refuses its arguments: unrecognized arguments: --dtyp"),
        (lambda: changed(make_recipe(), models={"draft": "./none"}), "draft: there is no folder"),
        (lambda: changed(make_recipe(), engines=[{"name": "plain", "command": ["no-such-program",
                                                                              "{port}"]}]),
         "cannot run no-such-program"),
        (lambda: make_recipe(servers={"start_timeout_s": 0}), "no answer within 0 s"),
    ]  # fmt: skip
    for make, message in cases:
        run = tmp_path / "new/folders/run"
        assert main(["sweep", str(make()), "--out", str(run)]) == 2, message
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists(), message
    holder.close()
    assert toys() == []


def test_mistakes_of_the_other_commands_exit_with_two(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = changed(make_recipe(), engines=[{"name": "plain"}])
    nowhere = str(tmp_path / "none/record.json")
    assert main(["offline", str(recipe), "--out", nowhere]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["offline", str(make_recipe())]) == 2
    assert "offline needs SGLang engines" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_run_folder_is_never_overwritten(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "mine").touch()
    assert main(["sweep", str(make_recipe()), "--out", str(run)]) == 2
    assert "exists" in capsys.readouterr().err
    assert os.listdir(run) == ["mine"]
    assert main(["sweep", str(make_recipe()), "--resume", str(run)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_dry_run_starts_and_writes_nothing(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe({"plain": ["--no-start"]})
    before = sorted(tmp_path.rglob("*"))
    assert main(["sweep", str(recipe), "--dry-run", "--out", str(tmp_path / "run")]) == 0
    assert "expected duration" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
