# SPDX-License-Identifier: Apache-2.0
"""`train` from nothing on a tiny target, and what its draft is worth."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import MADE_BLOCK, train
from pairs import Pair
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.draft.checkpoint import check_checkpoint
from sglang_dflash.hf import load_draft, spec_generate
from sglang_dflash.training import initial
from sglang_dflash.training.shards import Corpus


def history_of(draft: Path) -> list[dict[str, Any]]:
    lines = (draft / "training" / "history.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_what_is_left_is_a_checkpoint_with_its_history(made: Path) -> None:
    config = check_checkpoint(str(made))
    assert (config.block_size, config.num_layers, config.mask_token_id) == (MADE_BLOCK, 2, 259)
    history = history_of(made)
    assert [entry["step"] for entry in history] == [80, 160]
    assert history[1]["loss"] < history[0]["loss"]
    recipe = json.loads((made / "training" / "settings.json").read_text())
    assert recipe["settings"]["draft"]["block_size"] == MADE_BLOCK


@pytest.mark.parametrize("group", ["held_out", "learnt"])
def test_tau_is_that_of_decoding(group: str, made: Path, llama_pair: Pair) -> None:
    """The figure of training, and of the reference decoder on the same texts."""
    target = AutoModelForCausalLM.from_pretrained(llama_pair.target, dtype=torch.float32).eval()
    draft = load_draft(made)
    corpus = Corpus(made / "training" / "data")
    committed = steps = 0
    for number in corpus.split(held_out=group == "held_out")[:8]:
        text = corpus.read(number)
        new = len(text.tokens) - text.start
        generation = spec_generate(
            draft,
            target,
            text.tokens[None, : text.start].long(),
            new,
            stop_token_ids=(),
            block_size=MADE_BLOCK,
        )
        assert list(generation.tokens) == text.tokens[text.start :].tolist()
        committed += new - 1
        steps += len(generation.acceptance_lengths)
    assert history_of(made)[-1][group]["tau"] == pytest.approx(committed / steps, rel=0.02)


def test_a_finished_run_is_not_overwritten(
    made: Path, llama_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(llama_pair.target, made) == 2
    assert "add --resume" in capsys.readouterr().err


def test_resuming_a_finished_run_changes_nothing(made: Path, llama_pair: Pair) -> None:
    before = (made / "model.safetensors").read_bytes()
    config = made.parent / "settings.yaml"
    assert train(llama_pair.target, made, "--config", config, "--resume") == 0
    assert (made / "model.safetensors").read_bytes() == before


@pytest.fixture
def few_texts(tmp_path: Path) -> list[str | Path]:
    """Arguments of a run that is over in a second."""
    prompts, config = tmp_path / "prompts.txt", tmp_path / "settings.yaml"
    prompts.write_text("\n".join("abcdefgh"))
    config.write_text(
        "draft: {num_layers: 2, target_layer_ids: [0, 1, 2]}\n"
        "data: {max_new_tokens: 4, held_out_share: 0.5}\n"
        "train: {steps: 1, texts_per_batch: 2}\n"
    )
    return ["--config", config, "--prompts", prompts]


def test_a_draft_with_another_mask_goes_on_as_it_is(
    llama_pair: Pair, few_texts: list[str | Path], tmp_path: Path
) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(llama_pair.draft, earlier)
    stated = json.loads((earlier / "config.json").read_text())
    stated["dflash_config"]["mask_token_id"] = 300  # a new draft would have 259
    (earlier / "config.json").write_text(json.dumps(stated))
    arguments = [*few_texts, "--init-from-draft", earlier]
    assert train(llama_pair.target, tmp_path / "draft", *arguments) == 0
    made = check_checkpoint(str(tmp_path / "draft"))
    assert (made.mask_token_id, made.block_size, made.num_layers) == (300, 8, 2)


def test_the_target_is_moved_for_missing_texts_alone_and_after_the_first_draft_was_made(
    llama_pair: Pair,
    few_texts: list[str | Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of its weights for the draft then have the bits of the CPU in either case."""
    done: list[str] = []
    for owner, name in (PreTrainedModel, "to"), (initial, "new_draft"):
        real = getattr(owner, name)

        def noted(*a: Any, name: str = name, real: Any = real, **k: Any) -> Any:
            done.append(name)
            return real(*a, **k)

        monkeypatch.setattr(owner, name, noted)
    assert train(llama_pair.target, tmp_path / "draft", *few_texts, "--data-only") == 0
    assert done == ["new_draft", "to"]
    done.clear()
    assert train(llama_pair.target, tmp_path / "draft", *few_texts) == 0
    assert done == ["new_draft"]


def test_a_refused_resume_leaves_the_settings_alone(
    llama_pair: Pair,
    few_texts: list[str | Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draft, texts = tmp_path / "draft", tmp_path / "texts"
    arguments = [llama_pair.target, draft, *few_texts]
    assert train(*arguments, "--data", texts) == 0
    recipe = draft / "training" / "settings.json"
    before = recipe.read_bytes()
    assert train(*arguments, "--resume", "--steps", "2") == 2
    assert "train.steps (1, now 2)" in capsys.readouterr().err
    assert train(*arguments, "--resume", "--data", tmp_path / "other", "--seed", "3") == 2
    assert "data.seed" in capsys.readouterr().err
    assert recipe.read_bytes() == before
    for cut in before[:-9], b"[3]", b"3", b"\xff":
        recipe.write_bytes(cut)
        assert train(*arguments, "--resume") == 2
        assert f"{recipe} cannot be read" in capsys.readouterr().err
    assert train(*arguments, "--resume", "--data", texts) == 0
    assert recipe.read_bytes() == before


def test_a_stopped_run_knows_where_its_texts_are(
    llama_pair: Pair,
    few_texts: list[str | Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draft, texts = tmp_path / "draft", tmp_path / "texts"

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_dflash.training.data.write_shard", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(llama_pair.target, draft, *few_texts, "--data", texts)
    monkeypatch.undo()
    for _ in range(2):  # without a state, and with one
        assert train(llama_pair.target, draft, *few_texts, "--resume") == 0
    assert not (draft / "training" / "data").exists()
    assert len(Corpus(texts).infos) == 8
    texts.rename(tmp_path / "moved")
    assert train(llama_pair.target, draft, *few_texts, "--resume") == 2
    assert "name --data" in capsys.readouterr().err
    moved = ["--resume", "--data", tmp_path / "moved"]
    for arguments in moved, ["--resume"]:
        assert train(llama_pair.target, draft, *few_texts, *arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume"),
        (["--prompts", "gone.jsonl"], "gone.jsonl: cannot be read"),
        (["--prompts", "auto"], "say how many"),
        (["--config", "gone.yaml"], "gone.yaml: cannot be read"),
        (["--block-size", "1"], "draft.block_size is 1"),
        (["--steps", "0"], "train.steps is 0"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str],
    message: str,
    llama_pair: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(llama_pair.target, tmp_path / "draft", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "draft" / "config.json").exists()


def test_a_bad_file_is_named_before_the_target_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompts", "auto:9", "--prompts", "gone.jsonl"]
    assert train("gone", tmp_path / "draft", *arguments) == 2
    assert "gone.jsonl: cannot be read" in capsys.readouterr().err


def test_a_bad_earlier_draft_is_named_by_its_setting(
    llama_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, empty, other = (tmp_path / name for name in ("gone", "empty", "other"))
    empty.mkdir()
    other.mkdir()
    shutil.copy(llama_pair.target / "config.json", other)  # which is no draft's
    for folder, found in (
        (gone, "found nothing there"),
        (empty, "no config.json"),
        (other, "not a plain DFlash or DFlash2 draft"),
    ):
        assert train(llama_pair.target, tmp_path / "draft", "--init-from-draft", folder) == 2
        said = capsys.readouterr().err
        assert f"draft.init_from_draft {folder}: {found}" in said
        assert "-model-path" not in said  # ends a server's options


def test_the_log_is_shown_unless_quiet_is_asked_for(
    llama_pair: Pair,
    few_texts: list[str | Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.NOTSET, "sglang_dflash")  # and as it was, afterwards
    for quiet in True, False:
        arguments = [llama_pair.target, tmp_path / str(quiet), *few_texts, "--data-only"]
        assert train(*arguments, quiet=quiet) == 0
        assert ("8 texts to make" in caplog.text) is not quiet


def test_a_place_that_is_no_folder_is_named(
    llama_pair: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, draft = tmp_path / "file", tmp_path / "draft"
    file.write_text("")
    run = tmp_path / "run"
    run.mkdir()
    (run / "training").write_text("")
    for arguments, message in (
        ([run], f"--data, by default {run / 'training' / 'data'}: {run / 'training'} is a file"),
        ([file], f"OUT {file}: {file} is a file"),
        ([file / "draft"], f"OUT {file / 'draft'}: {file} is a file"),
        ([draft, "--data", file], f"--data {file}: {file} is a file"),
    ):
        assert train(llama_pair.target, *arguments) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda *_: False)
    assert train(llama_pair.target, draft) == 2
    assert f"OUT {draft}: {tmp_path} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["./gone", "gone"])
def test_a_target_that_is_not_there_is_named(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, tmp_path / "draft") == 2
    assert f"TARGET {target}" in capsys.readouterr().err
