# SPDX-License-Identifier: Apache-2.0
"""Processes that torchrun started do together what one does alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_resume import environment, trainer_of, weights_of

from sglang_dflash.training.ranks import process_rank
from sglang_dflash.training.settings import SettingsError

_SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{here!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from sglang_dflash.training.ranks import process_rank
from test_resume import trainer_of
folder = Path(sys.argv[1])
with process_rank("cpu") as rank:
    own = folder / str(rank.number)
    own.mkdir()
    trainer_of(own, rank=rank, accumulate=2, dtype="float32").run(own, folder, quiet=True)
"""


def test_two_processes_equal_one_that_accumulates_twice_as_long(tmp_path: Path) -> None:
    """Both see the same batches in a step; only the order of the gradients' sum differs."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    together.mkdir()
    trainer_of(alone, accumulate=4, dtype="float32").run(alone, alone, quiet=True)
    script = tmp_path / "script.py"
    here = Path(__file__).parent
    script.write_text(_SCRIPT.format(here=str(here), tests=str(here.parent)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(script), str(together)],
        env=environment(),
        check=True,
    )
    one, two = weights_of(alone), weights_of(together)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-5, msg=name)


def test_a_process_that_torchrun_did_not_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(SettingsError, match=r"WORLD_SIZE is 2 .*RANK, LOCAL_RANK, MASTER_PORT not"),
        process_rank("cpu"),
    ):
        pass


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="--device cuda"), process_rank("cuda"):
        pass
