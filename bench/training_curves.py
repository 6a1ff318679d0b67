# SPDX-License-Identifier: Apache-2.0
"""The curves of a training run: held-out acceptance length, and accuracy by position.

python -m bench.training_curves OUT/training/history.jsonl training.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["draw", "main"]


def draw(history: list[dict[str, Any]], path: Path) -> None:
    """Draw the measurements of a run.

    Args:
        history: Lines of its `history.jsonl`, in order.
        path: Of the picture.
    """
    steps = [entry["step"] for entry in history]
    held_out = [entry["held_out"] for entry in history]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(steps, [each["tau"] for each in held_out], "ko-", label="greedy answers, all")
    left.plot(steps, [each["tau_sampled"] for each in held_out], "s--", label="sampled answers")
    for kind in held_out[-1]["tau_by_kind"]:
        tau = [each["tau_by_kind"][kind] for each in held_out]
        left.plot(steps, tau, ".--", label=f"prompts of {kind}")
    left.set(xlabel="step", ylabel="held-out acceptance length", title="higher is better")
    left.grid(alpha=0.3)
    left.margins(y=0.3)  # room for the legends
    learnt = [(e["step"], e["learnt"]["tau"]) for e in history if "learnt" in e]
    if learnt:  # histories of earlier versions lack it
        left.plot(*zip(*learnt, strict=True), "k:", label="greedy answers, learnt texts")
    left.legend(loc="upper left", ncols=2, fontsize="small")
    rate = left.twinx()
    rate.plot(steps, [entry["learning_rate"] for entry in history], color="0.8", zorder=0)
    rate.set_ylabel("learning rate (grey)")
    rate.set_ylim(bottom=0)
    for place, accuracy in enumerate(zip(*(each["accuracy"] for each in held_out), strict=True)):
        right.plot(steps, accuracy, ".-", label=str(place + 1))
    right.set(xlabel="step", ylabel="held-out accuracy", title="by position")
    right.margins(y=0.4)
    right.set_ylim(bottom=0)
    right.grid(alpha=0.3)
    right.legend(loc="upper left", title="position in the block", ncols=4, fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.training_curves", description=__doc__)
    parser.add_argument("history", type=Path, help="history.jsonl of a run")
    parser.add_argument("picture", type=Path, help="where to, e.g. training.png")
    args = parser.parse_args(arguments)
    lines = args.history.read_text(encoding="utf-8").splitlines()
    if not lines:
        parser.error(f"{args.history} has no measurement yet: wait for train.eval_every steps")
    draw([json.loads(line) for line in lines], args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
