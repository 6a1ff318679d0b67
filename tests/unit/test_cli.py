# SPDX-License-Identifier: Apache-2.0
"""The console command: light to start, one clear message and code 2 for what it cannot do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sglang_dflash import cli
from sglang_dflash.demo import DemoError, run
from sglang_dflash.demo.model import bundled_draft


@pytest.fixture
def asked(monkeypatch):
    """Stand in for the run itself; hold the settings it gets and the record it returns."""

    class Asked:
        settings = None
        record = {"identical": True, "settings": {"dtype": "float32"}}

        def __call__(self, settings):
            self.settings = settings
            return self.record

    stand_in = Asked()
    monkeypatch.setattr(run, "run_demo", stand_in)
    return stand_in


def usage_error(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_help_loads_neither_torch_nor_sglang():
    script = (
        "import sys\n"
        "from sglang_dflash.cli import main\n"
        "try:\n    main(['demo', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--max-new-tokens" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "'0' is not a whole number from 1 to 4096"),
        (["--max-new-tokens", "many"], "'many' is not a whole number from 1 to 4096"),
        (["--block-size", "1"], "'1' is not a whole number from 2 to 64"),
        (["--block-size", "9"], "--block-size 9: the draft was trained for blocks of 8"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--prompt", " "], "argument --prompt: is empty"),
        (["--target", "owner/model"], "--target needs --draft"),
        (["--draft", "./nowhere"], "--draft ./nowhere: neither a folder with a config.json"),
        (["--json", "no/such/folder/out.json"], "its folder cannot be written"),
        (["--json", "."], "--json .: is a folder"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_a_bad_value_is_one_message_and_code_two(capsys, arguments, message):
    assert message in usage_error(capsys, "demo", *arguments)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_draft_whose_config_cannot_be_read_is_named(capsys, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    message = usage_error(capsys, "demo", "--draft", str(tmp_path))
    assert f"--draft {tmp_path}" in message


def test_a_block_is_no_larger_than_the_draft_was_trained_for_wherever_it_says_so(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"dflash_config": {"block_size": 8}}')
    message = usage_error(capsys, "demo", "--draft", str(tmp_path), "--block-size", "9")
    assert "--block-size 9: the draft was trained for blocks of 8" in message


def test_a_gpu_that_is_not_there_is_told_beforehand(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_has_cuda", lambda: False)
    assert "torch sees no CUDA device" in usage_error(capsys, "demo", "--device", "cuda")


def test_no_command_is_a_usage_error(capsys):
    assert "COMMAND" in usage_error(capsys)


def test_the_defaults_are_the_built_in_prompts_on_the_bundled_pair(asked):
    assert cli.main(["demo"]) == 0
    kinds = [kind for kind, _ in asked.settings.prompts]
    assert kinds == ["code"] * 3 + ["maths"] * 3 + ["chat"] * 3
    assert (asked.settings.target, asked.settings.draft) == (None, None)


def test_prompts_of_the_user_replace_the_built_in_ones(asked):
    assert cli.main(["demo", "--prompt", "One", "--prompt", "Two"]) == 0
    assert asked.settings.prompts == [("yours", "One"), ("yours", "Two")]


def test_another_pair_is_passed_on(asked):
    draft = str(bundled_draft())
    assert cli.main(["demo", "--target", "owner/name", "--draft", draft]) == 0
    assert (asked.settings.target, asked.settings.draft) == ("owner/name", draft)


def test_the_record_is_written_as_json(asked, tmp_path):
    assert cli.main(["demo", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == asked.record


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_unequal_text_is_a_failure_in_float32_only(asked, dtype, code):
    asked.record = {"identical": False, "settings": {"dtype": dtype}}
    assert cli.main(["demo"]) == code


def test_what_stops_the_demo_is_told_in_one_message(monkeypatch, capsys):
    def fail(_: object) -> None:
        raise DemoError("no network")

    monkeypatch.setattr(run, "run_demo", fail)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "sglang-dflash demo: no network\n"


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
