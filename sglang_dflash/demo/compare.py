# SPDX-License-Identifier: Apache-2.0
"""What two engines made of the same prompts: totals, speed-up, acceptance length, equality."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.demo.engine import Answer

__all__ = ["Divergence", "PromptResult", "result_table", "summarise"]


@dataclass(frozen=True)
class Divergence:
    """The first place where two answers differ.

    Attributes:
        index: Token index in the answer, from 0.
        autoregressive: Text of the token there in the plain answer; "" where it has ended.
        dflash: The same in the DFLASH answer.
        log_prob_gap: How much likelier, in nats, the plain engine finds its own token than the
            other one; None where an answer has ended.
    """

    index: int
    autoregressive: str
    dflash: str
    log_prob_gap: float | None


@dataclass(frozen=True)
class PromptResult:
    """Both answers to one prompt."""

    kind: str
    prompt: str
    autoregressive: Answer
    dflash: Answer
    divergence: Divergence | None

    def as_json(self) -> dict[str, Any]:
        """Return the record of this prompt."""
        answers = {"autoregressive": self.autoregressive, "dflash": self.dflash}
        return {
            "kind": self.kind,
            "prompt": self.prompt,
            **summarise([self]),
            "answers": {name: answer.text for name, answer in answers.items()},
            "divergence": None if self.divergence is None else vars(self.divergence),
        }


def summarise(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Return the figures of some prompts together.

    `acceptance_length` is the tokens committed by all verify steps over the number of steps, the
    target's own token of each step included: 1 + accepted / steps. The token that prefill gives
    is no step's, so it is left out; tokens that a stop cut off were committed, so they are in.

    Returns:
        `autoregressive` and `dflash`, each with `tokens`, `seconds`, `tokens_per_s`; `speedup`,
        the ratio of the two rates; `acceptance_length`, None where no step was taken;
        `identical`, whether all answers have the same tokens.
    """
    plain = _rate(result.autoregressive for result in results)
    dflash = _rate(result.dflash for result in results)
    steps = sum(result.dflash.num_steps for result in results)
    accepted = sum(result.dflash.num_accepted for result in results)
    return {
        "autoregressive": plain,
        "dflash": dflash,
        "speedup": dflash["tokens_per_s"] / plain["tokens_per_s"],
        "acceptance_length": 1 + accepted / steps if steps else None,
        "identical": all(result.divergence is None for result in results),
    }


def _rate(answers: Iterable[Answer]) -> dict[str, float]:
    answers = list(answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}


def result_table(results: Sequence[PromptResult]) -> str:
    """Return the figures of each kind of prompt and of all, as text."""
    from tabulate import tabulate

    kinds = list(dict.fromkeys(result.kind for result in results))
    groups = {kind: [r for r in results if r.kind == kind] for kind in kinds}
    if len(kinds) > 1:
        groups["all"] = list(results)
    headers = [
        "prompts",
        "number",
        "plain tokens/s",
        "DFLASH tokens/s",
        "speed-up",
        "acceptance length",
        "identical",
    ]
    rows = [_row(name, group) for name, group in groups.items()]
    return tabulate(rows, headers, colalign=("left", *["right"] * 6), disable_numparse=True)


def _row(name: str, group: Sequence[PromptResult]) -> list[str]:
    figures = summarise(group)
    same = sum(result.divergence is None for result in group)
    tau = figures["acceptance_length"]
    return [
        name,
        str(len(group)),
        f"{figures['autoregressive']['tokens_per_s']:.1f}",
        f"{figures['dflash']['tokens_per_s']:.1f}",
        f"{figures['speedup']:.2f}x",
        "-" if tau is None else f"{tau:.2f}",
        f"{same} of {len(group)}",
    ]
