# SPDX-License-Identifier: Apache-2.0
"""Processes that torchrun started do together what one does alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from test_resume import environment, trainer_of, weights_of

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
