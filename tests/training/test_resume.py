# SPDX-License-Identifier: Apache-2.0
"""A run that was killed and resumed ends in the weights of one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import DFLASH2, HIDDEN, VOCAB, config_of, made_up_corpus, random_draft
from safetensors.torch import load_file

import sglang_dflash
from sglang_dflash.draft.config import DraftConfig
from sglang_dflash.draft.weights import check_weights, read_weight_shapes
from sglang_dflash.training.loop import Trainer, learning_rate
from sglang_dflash.training.ranks import Rank
from sglang_dflash.training.settings import DraftSettings, LoopSettings, Settings, SettingsError

STEPS, KILLED_AT = 14, 9  # a state every 4 steps: 8 is what is left


def trainer_of(
    folder: Path, *, rank: Rank | None = None, parts: dict[str, Any] | None = None, **changes: Any
) -> Trainer:
    """Return a trainer of the tiny draft, with more parts if they are named, on made-up texts."""
    options: dict[str, Any] = {
        "steps": STEPS,
        "texts_per_batch": 3,
        "anchors_per_text": 4,
        "accumulate": 2,
        "learning_rate": 1e-2,
        "checkpoint_every": 4,
        "eval_every": 5,
        "soft_share": 0.5,
        "short_block_size": 2,
        "short_block_share": 0.5,
    }
    settings = Settings(draft=DraftSettings(block_size=4), train=LoopSettings(**options | changes))
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn((VOCAB, HIDDEN), generator=generator)
    head = torch.randn((VOCAB, HIDDEN), generator=generator)
    config = config_of(**(parts or {}))
    rank = rank or Rank(0, 1, torch.device("cpu"))
    corpus = made_up_corpus(folder / "texts")
    return Trainer(random_draft(config), embedding, head, corpus, settings, config, rank)


def environment() -> dict[str, str]:
    """Return what lets another process import the package under test."""
    root = str(Path(sglang_dflash.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


@pytest.mark.parametrize(
    ("dtype", "weights", "optimizer", "parts"),
    [
        ("bfloat16", "dpace", "adamw", {}),
        ("float32", "decay", "adamw", {}),
        ("float32", "decay", "muon", {}),
        ("bfloat16", "dpace", "muon", DFLASH2),
    ],
)
def test_a_killed_run_resumes_to_the_same_weights(
    dtype: str, weights: str, optimizer: str, parts: dict[str, Any], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options: dict[str, Any] = {"dtype": dtype, "position_weights": weights, "optimizer": optimizer}
    options["parts"] = parts
    expected = trainer_of(whole, **options).run(whole, whole, quiet=True)
    code = f"""
        import os, signal, sys
        from pathlib import Path
        import torch
        sys.path[:0] = {[str(Path(__file__).parent)]!r}
        torch.set_num_threads(1)
        from test_resume import KILLED_AT, trainer_of
        folder = Path({str(killed)!r})
        def kill(step):
            if step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
        trainer_of(folder, **{options!r}).run(folder, folder, quiet=True, after_step=kill)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(),
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    found = trainer_of(killed, **options).run(killed, killed, resume=True, quiet=True)
    assert_same_weights(whole, killed)
    for one, other in zip(expected, found, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    """The comparison's own mutant."""
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        trainer_of(folder, seed=seed).run(folder, folder, quiet=True)
    with pytest.raises(AssertionError):
        assert_same_weights(*folders)


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text("the first one's")
    trainer = trainer_of(tmp_path, rank=Rank(1, 1, torch.device("cpu")))
    before = sorted(tmp_path.rglob("*"))
    assert trainer.run(tmp_path, tmp_path, quiet=True) == []
    assert (tmp_path / "history.jsonl").read_text() == "the first one's"
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_left_is_a_checkpoint(tmp_path: Path) -> None:
    trainer_of(tmp_path).run(tmp_path, tmp_path, quiet=True)
    config = DraftConfig.from_pretrained(tmp_path)
    check_weights(read_weight_shapes(tmp_path), config, tmp_path)
    assert config.block_size == 4


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    trainer_of(tmp_path).run(tmp_path, tmp_path, quiet=True)
    with pytest.raises(SettingsError, match=r"train\.learning_rate \(0\.01, now 0\.5\)"):
        trainer_of(tmp_path, learning_rate=0.5).run(tmp_path, tmp_path, resume=True, quiet=True)


def test_a_run_goes_on_with_as_many_batches_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sglang_dflash.training.loop.DistributedDataParallel", lambda model, **_: model
    )
    trainer_of(tmp_path, accumulate=2).run(tmp_path, tmp_path, quiet=True)
    two = Rank(0, 2, torch.device("cpu"))
    trainer_of(tmp_path, rank=two, accumulate=1).run(tmp_path, tmp_path, resume=True, quiet=True)
    with pytest.raises(SettingsError, match=r"train\.accumulate x processes \(2, now 4\)"):
        trainer_of(tmp_path, rank=two, accumulate=2).run(
            tmp_path, tmp_path, resume=True, quiet=True
        )


def test_a_run_goes_on_with_its_own_texts(tmp_path: Path) -> None:
    manifest = tmp_path / "texts" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text('{"prompts_sha256": "a"}')
    trainer_of(tmp_path).run(tmp_path, tmp_path, quiet=True)
    trainer_of(tmp_path).run(tmp_path, tmp_path, resume=True, quiet=True)
    manifest.write_text('{"prompts_sha256": "b"}')
    with pytest.raises(SettingsError, match=r"data\.prompts_sha256 \(\['a'\], now \['b'\]\)"):
        trainer_of(tmp_path).run(tmp_path, tmp_path, resume=True, quiet=True)


def test_a_state_of_before_these_were_noted_goes_on(tmp_path: Path) -> None:
    trainer_of(tmp_path).run(tmp_path, tmp_path, quiet=True)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    identity = json.loads(state["identity"])
    del identity["data"]["prompts_sha256"], identity["train"]["accumulate x processes"]
    torch.save(state | {"identity": json.dumps(identity)}, tmp_path / "state.pt")
    trainer_of(tmp_path).run(tmp_path, tmp_path, resume=True, quiet=True)
    with pytest.raises(SettingsError, match=r"train\.accumulate \(2, now 4\)"):
        trainer_of(tmp_path, accumulate=4).run(tmp_path, tmp_path, resume=True, quiet=True)


def test_the_rate_rises_straight_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 100, 2.0, 0.04) for step in range(100)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[52] == pytest.approx(1.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.001
