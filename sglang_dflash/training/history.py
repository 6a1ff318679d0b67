# SPDX-License-Identifier: Apache-2.0
"""What a run showed: a progress bar, lines of JSON, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
import logging
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["History"]

log = logging.getLogger(__name__)


class History:
    """Figures of one run, over all the times it was resumed."""

    def __init__(self, folder: Path, steps: int, done: int, *, quiet: bool = False) -> None:
        """Open the run's files, without what a killed run wrote beyond its last state.

        Args:
            folder: The run's.
            steps: All steps.
            done: Those done before.
            quiet: No progress bar.
        """
        self._path = folder / "history.jsonl"
        kept = [entry for entry in self.entries() if entry["step"] <= done]
        lines = "".join(json.dumps(entry) + "\n" for entry in kept)
        self._path.write_text(lines, encoding="utf-8")
        self._bar = tqdm(total=steps, initial=done, desc="train", unit="step", disable=quiet)
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done)
        else:
            log.info("tensorboard is not installed: figures go to %s alone", self._path)

    def entries(self) -> list[dict[str, Any]]:
        """Return what was written so far."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self, loss: float) -> None:
        """Show that a step was done."""
        self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self._bar.update()

    def write(self, entry: dict[str, Any]) -> None:
        """Keep figures, `step` among them."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        held_out, learnt = entry["held_out"], entry["learnt"]
        if not self._bar.disable:
            shown = " ".join(f"{share:.2f}" for share in held_out["accuracy"][:7])
            self._bar.write(
                f"step {entry['step']}: loss {entry['loss']:.3f}, held-out tau "
                f"{held_out['tau']:.3f}, of learnt texts {learnt['tau']:.3f}, "
                f"right by position {shown}"
            )
        if self._board is not None:
            for name in ("loss", "learning_rate"):
                self._board.add_scalar(name, entry[name], entry["step"])
            for group in ("held_out", "learnt"):
                for name in ("tau", "tau_sampled"):
                    self._board.add_scalar(f"{group}/{name}", entry[group][name], entry["step"])
            for k, share in enumerate(held_out["accuracy"], 1):
                self._board.add_scalar(f"held_out/accuracy_{k}", share, entry["step"])

    def close(self) -> None:
        """Let go of the terminal and the files."""
        self._bar.close()
        if self._board is not None:
            self._board.close()
