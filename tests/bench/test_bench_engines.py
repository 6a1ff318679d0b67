# SPDX-License-Identifier: Apache-2.0
"""A tiny sweep and an offline job over real SGLang servers and engines."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import psutil
import pytest
import yaml
from pairs import Pair

from bench.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(smollm2_pair: Pair, tmp_path: Path) -> Path:
    """Plain decoding and DFLASH in float32, so that their texts must be equal."""
    dflash = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "{draft}",
              "--speculative-num-draft-tokens", "8"]  # fmt: skip
    flags = ["--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "4096",
             "--max-running-requests", "4", "--random-seed", "0"]  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({
        "name": "tiny", "target": str(smollm2_pair.target),
        "models": {"draft": str(smollm2_pair.draft)},
        "engines": [{"name": "plain"}, {"name": "dflash", "args": dflash}],
        "servers": {"together": True, "args": flags, "start_timeout_s": 300},
        "datasets": [{"name": "gsm8k", "source": "sample"}],
        "load": {"concurrency": [1], "min_prompts": 4, "max_new_tokens": 8, "repeats": 1},
    }))  # fmt: skip
    return path


def servers_left() -> list[psutil.Process]:
    """Return the servers that this process has started and not taken down."""
    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has ended too
            if "sglang.launch_server" in child.cmdline():
                left.append(child)
    return left


@pytest.mark.timeout(600)
def test_a_sweep_over_real_servers(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["sweep", str(recipe), "--out", str(run)]) == 0
    plain, dflash = json.loads((run / "summary.json").read_text())["points"]
    assert plain["acceptance_length"] is None
    assert dflash["acceptance_length"]["mean"] > 1.2
    assert dflash["identical"] == {"same": 4, "of": 4}
    assert dflash["mean_verify_width"]["mean"] <= 8
    shares = dflash["acceptance_by_position"]
    assert 1 >= shares[0] > 0.2
    assert shares == sorted(shares, reverse=True)
    for point in (plain, dflash):
        assert point["errors"] == 0
        assert point["requests"] == 4
        assert point["memory_bytes"] > 2**28
        assert 0 < point["tpot_ms"]["p50"]["mean"] < point["e2e_ms"]["p50"]["mean"]
    raw = [json.loads(line) for line in (run / "raw.jsonl").read_text().splitlines()]
    for line in raw:
        assert line["output_tokens"] == 8
        assert line["prompt_tokens"] > 20
        # one step commits its accepted proposals and one more; the first token is prefill's
        if line["engine"] == "dflash":
            assert line["accepted"] + line["steps"] >= line["output_tokens"] - 1
            assert sum(line["histogram"]) == line["steps"] < 8
            assert line["steps"] <= line["verified_rows"] <= 8 * line["steps"]
            assert line["accepted"] + line["steps"] <= line["verified_rows"]
    assert (run / "report.html").stat().st_size > 10_000


@pytest.mark.timeout(600)
def test_a_server_that_sglang_cannot_start(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parts end in their own way, and all of them; plain decoding's server is alive then."""
    (tmp_path / "empty").mkdir()
    data = yaml.safe_load(recipe.read_text())
    data["models"]["draft"] = str(tmp_path / "empty")
    recipe.write_text(yaml.safe_dump(data))
    run = tmp_path / "run"
    assert main(["sweep", str(recipe), "--out", str(run)]) == 2
    printed = capsys.readouterr().err
    assert "dflash: the server ended with exit code" in printed
    assert "config.json" in printed
    assert not run.exists()
    assert servers_left() == []


@pytest.mark.timeout(600)
def test_an_offline_job(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "offline.json"
    data = yaml.safe_load(recipe.read_text())
    data["datasets"][0]["rows"] = 4
    recipe.write_text(yaml.safe_dump(data))
    assert main(["offline", str(recipe), "--out", str(record)]) == 0
    assert "| gsm8k | dflash |" in capsys.readouterr().out
    written = json.loads(record.read_text())
    assert written["weights"]["draft"]["sha256"]["model.safetensors"]
    assert written["options"]["dflash"]["speculative_num_draft_tokens"] == 8
    plain, dflash = written["runs"]
    assert plain["tokens"] == dflash["tokens"] == 4 * 8
    assert plain["steps"] == 0 < dflash["steps"]
