# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it: real engines, the bundled pair, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.demo import DemoError
from sglang_dflash.demo.engine import EngineProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEMO = [sys.executable, "-m", "sglang_dflash.cli", "demo", "--device", "cpu"]
PROMPTS = ["What is the capital of France?", "Count from one to ten."]


def children_of(parent_pid: int) -> list[int]:
    """Return the process ids of the demo engines that this process started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
            command = (status.parent / "cmdline").read_text()
        except OSError:  # it ended meanwhile
            continue
        if parent == parent_pid and "sglang_dflash.demo.serve" in command:
            found.append(int(status.parent.name))
    return found


def test_the_demo_gives_equal_text_and_its_figures(smollm2_pair, tmp_path):
    arguments = [item for prompt in PROMPTS for item in ("--prompt", prompt)]
    json_path = tmp_path / "demo.json"
    done = subprocess.run(
        [*DEMO, *arguments, "--max-new-tokens", "24", "--json", str(json_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(json_path.read_text())
    assert record["identical"]
    assert record["settings"]["dtype"] == "float32"
    assert record["acceptance_length"] > 1
    for name in ("autoregressive", "dflash"):
        assert record[name]["tokens_per_s"] > 0
    assert record["speedup"] == pytest.approx(
        record["dflash"]["tokens_per_s"] / record["autoregressive"]["tokens_per_s"]
    )
    assert "Paris" in record["prompts"][0]["answers"]["dflash"]
    assert "The capital of France is Paris." in done.stdout
    assert "2 of 2" in done.stdout


def test_an_interrupt_takes_the_engines_down(smollm2_pair):
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, text=True) as demo:
        for line in demo.stdout:
            if line.startswith("draft"):
                break
        while not (engines := children_of(demo.pid)):
            assert demo.poll() is None
        time.sleep(1)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(engines[0], 0)


def test_an_engine_that_cannot_start_says_why(tmp_path):
    options = {"model_path": str(tmp_path), "dtype": "float32"}
    process = EngineProcess("plain", options, on_cpu=True, log_path=tmp_path / "log")
    with process, pytest.raises(DemoError, match=r"plain engine failed: .*(?s:.*)config\.json"):
        process.ready()


def test_the_target_answers_sensibly_and_stops_by_itself(smollm2_pair):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_pair.target)
    model = AutoModelForCausalLM.from_pretrained(smollm2_pair.target, dtype="float32")
    turn = [{"role": "user", "content": PROMPTS[0]}]
    inputs = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
