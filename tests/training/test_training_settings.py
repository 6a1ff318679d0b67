# SPDX-License-Identifier: Apache-2.0
"""Settings and prompts: what is taken, and how mistakes are named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from sglang_dflash.training.prompts import (
    check_sources,
    parse_source,
    prompt_tokens,
    read_prompts,
    share_of,
)
from sglang_dflash.training.settings import DataSettings, Settings, SettingsError
from sglang_dflash.training.settings_file import settings_from_dict, settings_from_yaml


def test_settings_survive_their_own_file() -> None:
    stated = {
        "draft": {"num_layers": 3, "sliding_window": 64, "sliding_layers": [1]},
        "data": {"prompts": ["auto:5", "a.jsonl"], "system_prompt": "Be brief."},
        "train": {"learning_rate": 1, "softmax_vocabulary": "seen"},
    }
    settings = settings_from_dict(stated)
    assert settings.train.learning_rate == 1.0
    assert settings.data.prompts == ("auto:5", "a.jsonl")
    assert settings_from_dict(json.loads(json.dumps(settings.as_dict()))) == settings
    assert settings_from_dict({}) == Settings()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"trian": {}}, "trian: unknown section; did you mean train"),
        ({"train": {"learning_rat": 1}}, "train.learning_rat: unknown; did you mean learning_rate"),
        ({"train": {"steps": "many"}}, "train.steps is 'many', expected int"),
        ({"train": {"steps": True}}, "train.steps is True, expected int"),
        ({"train": {"dtype": "fp8"}}, "train.dtype is 'fp8', expected bfloat16 or float32"),
        ({"train": {"steps": 0}}, "train.steps is 0"),
        ({"train": {"short_block_share": 0.5}}, "train.short_block_share is 0.5"),
        ({"draft": {"block_size": 1}}, "draft.block_size is 1"),
        ({"draft": {"selector_rank": -1}}, "draft.selector_rank is -1, expected 0 or more"),
        ({"draft": {"conv_group_size": 0}}, "draft.conv_group_size is 0, expected 1 or more"),
        ({"draft": {"sliding_layers": [0]}}, "draft.sliding_window"),
        ({"draft": {"num_features": 0}}, "draft.num_features is 0, expected 1 or more"),
        ({"draft": {"intermediate_size": 0}}, "draft.intermediate_size is 0, expected 1 or more"),
        ({"data": {"held_out_share": 0.0}}, "data.held_out_share is 0.0"),
        ({"data": 3}, "data: expected keys"),
        ({"data": {"num_laws": 0}, "train": {"soft_share": 0.5}}, "data.num_laws is 0"),
        ({"train": {"short_block_size": 16}}, "train.short_block_size is 16"),
        ({"train": {"position_weights": "dpac"}}, "is 'dpac', expected decay or dpace"),
        ({"train": {"weight_decay": -0.1}}, "train.weight_decay is -0.1, expected 0 or more"),
        ({"train": {"seed": 2**64}}, "train.seed is 18446744073709551616, expected a number of 64"),
        ({"train": {"dpace_alpha": 0.0}}, "train.dpace_alpha is 0.0, expected above 0, at most 1"),
        ({"train": {"dpace_alpha": 1.5}}, "train.dpace_alpha is 1.5, expected above 0, at most 1"),
        (
            {"train": {"position_weights": "dpace", "position_decay": 4.0}},
            "train.position_decay is 4.0, expected none with train.position_weights: dpace",
        ),
    ],
)
def test_a_wrong_setting_is_named(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("(", r"\(")):
        settings_from_dict(stated)


def test_a_file_that_is_no_settings_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    with pytest.raises(SettingsError, match=r"a\.yaml: cannot be read"):
        settings_from_yaml(file)
    file.write_text("train: [")
    with pytest.raises(SettingsError, match=r"a\.yaml: cannot be read"):
        settings_from_yaml(file)
    file.write_text("hello")
    with pytest.raises(SettingsError, match="expected the sections"):
        settings_from_yaml(file)


def test_a_file_is_checked_with_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "draft: {sliding_layers: [0], sliding_window: 12, num_layers: 2}\n"
        "train: {short_block_size: 16, short_block_share: 0.5}\n"
    )
    with pytest.raises(SettingsError, match=r"a\.yaml: draft\.sliding_layers is \(0,\)"):
        settings_from_yaml(file)
    flags: dict[str, dict[str, Any]] = {"draft": {"init_from_draft": "d"}, "data": {"seed": 3}}
    settings = settings_from_yaml(file, flags)  # the earlier draft's block size will decide
    assert (settings.draft.init_from_draft, settings.draft.sliding_window) == ("d", 12)
    assert (settings.train.short_block_size, settings.data.seed) == (16, 3)
    with pytest.raises(SettingsError, match=r"a\.yaml with the flags: draft\.num_layers is 0"):
        settings_from_yaml(file, {"draft": {"num_layers": 0}})
    file.write_text("draft: 3")
    with pytest.raises(SettingsError, match="draft: expected keys with values, found 3"):
        settings_from_yaml(file, flags)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("a.jsonl", ("a.jsonl", None)),
        ("a.jsonl:20", ("a.jsonl", 20)),
        ("auto:7", ("auto", 7)),
        ("c:/x.jsonl", ("c:/x.jsonl", None)),
    ],
)
def test_sources(stated: str, expected: tuple[str, int | None]) -> None:
    assert parse_source(stated) == expected


@pytest.mark.parametrize("stated", ["auto", "auto:0", "a.jsonl:-3"])
def test_wrong_sources_are_named(stated: str) -> None:
    with pytest.raises(SettingsError, match=f"--prompts {stated}"):
        parse_source(stated)


def test_prompts_of_all_known_forms_are_read(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"question": "a", "answer": "not the target's"},
        {"prompt": "b", "response": "the target's"},
        {"turns": ["c", "d"]},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "e"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "fg"]}]},
    ]
    file = tmp_path / "some.jsonl.gz"
    with gzip.open(file, "wt") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    prompts = read_prompts(parse_source(str(file)))
    assert [prompt.text for prompt in prompts] == ["a", "b", "c", "e", "fg"]
    assert [prompt.response for prompt in prompts] == [None, "the target's", *[None] * 3]
    assert {prompt.kind for prompt in prompts} == {"some"}
    assert len(read_prompts(parse_source(f"{file}:2"))) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompt"),
        ('{"x": 1}\n', "line 1: none of"),
        ('{"prompt": "a"}\n{', "line 2: not"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "line 1: none of"),
        ('{"messages": 3}', "line 1: none of"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_prompts(parse_source(str(file)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.jsonl: cannot be read"):
        read_prompts(parse_source(str(tmp_path / "gone.jsonl")))


def test_a_pipe_is_left_to_be_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_sources(["auto:3", str(pipe)])  # would wait for a writer
    for bad in "gone.jsonl", str(tmp_path):
        with pytest.raises(SettingsError, match="cannot be read"):
            check_sources([bad])


def test_a_cut_archive_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(b'{"prompt": "a"}\n' * 1000)
    for cut in whole[:-12], whole[:20] + b"\xff" * 20:
        file.write_bytes(cut)
        with pytest.raises(SettingsError, match=r"cut\.jsonl\.gz: cannot be read"):
            read_prompts(parse_source(str(file)))


def test_a_system_prompt_that_the_template_refuses_is_named() -> None:
    class Refusing:
        chat_template = "refuses"

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            raise TemplateError("no system role here")

    settings = DataSettings(system_prompt="Be brief.")
    with pytest.raises(SettingsError, match=r"data\.system_prompt is 'Be brief.'.*no system role"):
        prompt_tokens("a", Refusing(), settings)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="TARGET: the target's chat template refuses messages"):
        prompt_tokens("a", Refusing(), DataSettings())  # type: ignore[arg-type]


def test_the_split_is_a_texts_own() -> None:
    shares = [share_of(f"prompt {i}", "held out") for i in range(2000)]
    assert shares == [share_of(f"prompt {i}", "held out") for i in range(2000)]
    # 3 %: 60 +- 8
    assert 30 < sum(share < 0.03 for share in shares) < 95
    assert share_of("a", "held out") != share_of("a", "greedy")
