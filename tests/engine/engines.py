# SPDX-License-Identifier: Apache-2.0
"""Real engines on tiny and real pairs, one alive at a time."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from dying import last_words
from pairs import PRINTABLE, Pair
from transformers import AutoTokenizer

__all__ = [
    "Case",
    "Prompt",
    "dflash_options",
    "engine",
    "environment_of",
    "prompts_for",
    "with_test_plugin",
]

Prompt = Callable[[int, int], list[int]]  # (length, seed) -> token ids

CONTEXT = 256
POOL_TOKENS = 6000

_TEXT = """The harbour town wakes before the sun does. Boats leave in the dark, one lamp each, and
by the time the bakery opens the first of them is back with a hold full of silver. def area(width,
height): return width * height. A train leaves at nine and travels sixty miles an hour; another
leaves an hour later at ninety. When do they meet? Let t be the hours after nine. Then 60 t = 90
(t - 1), so t = 3, and they meet at noon. List three reasons to learn a second language: it opens
doors, it keeps the mind supple, and it lets you read what others only summarise. for name in names:
print(name.title()) "Where have you been?" she asked, and he pointed at the sea. """

_COMMON = {
    "dtype": "float32",
    "log_level": "warning",
    "context_length": CONTEXT,
    "max_total_tokens": POOL_TOKENS,
    "random_seed": 1,
}


@dataclass(frozen=True)
class Case:
    """One way to run DFLASH.

    Attributes:
        name: for the test's name.
        pair: the fixture's name.
        block_size: B.
        options: further engine options.
        widths: how many rows are verified: whole blocks, other widths each step, or what pays; with
            `late` a device behind the host chooses which.
        all_seeds: whether every seeded request is asked, or the first three batches.
        token_map: whether the draft proposes from a part of the vocabulary.
        environment: more of the engine's environment.
    """

    name: str
    pair: str
    block_size: int
    options: dict[str, Any] = field(default_factory=dict)
    widths: Literal["whole", "random", "measured", "random late", "measured late"] = "whole"
    all_seeds: bool = False
    token_map: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def dflash_options(pair: Pair, block_size: int) -> dict[str, Any]:
    """Return what turns DFLASH on."""
    return {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(pair.draft),
        "speculative_num_draft_tokens": block_size,
    }


def prompts_for(pair: Pair) -> Prompt:
    """Return the maker of prompts: pieces of real text where the tokenizer knows words."""
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    words = tokenizer(_TEXT)["input_ids"]
    is_real = len(tokenizer) > 1000

    def prompt(length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        if is_real:
            start = int(torch.randint(len(words), (1,), generator=generator))
            return (words[start:] + words * (1 + length // len(words)))[:length]
        drawn = torch.randint(PRINTABLE.start, PRINTABLE.stop, (length,), generator=generator)
        return drawn.tolist()

    return prompt


@contextmanager
def engine(
    pair: Pair, *, environment: dict[str, str] | None = None, **options: Any
) -> Iterator[Any]:
    """Start an engine with more in its environment, and stop it in the end.

    Whole blocks are verified, unless the environment says otherwise: steps can then be compared.
    """
    import sglang

    with last_words(), TemporaryDirectory() as folder:
        variables, paths = dict(os.environ), list(sys.path)
        # Its ranks meet in a file: a port may be another's before they bind it. Servers under
        # test keep to ports. Replicas (dp_size) would need a file each.
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/ranks"
        os.environ.update({"SGLANG_DFLASH_BUDGET": "fixed", **(environment or {})})
        sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # the engine inherits it
        try:
            started = sglang.Engine(model_path=str(pair.target), **{**_COMMON, **options})
        finally:
            os.environ.clear()
            os.environ.update(variables)
            sys.path[:] = paths
        try:
            yield started
        finally:
            started.shutdown()
            gc.collect()


def environment_of(case: Case) -> dict[str, str]:
    """Return the environment that gives a case its widths."""
    if case.widths == "random":
        return with_test_plugin(DFLASH_RANDOM_WIDTHS="1", **case.environment)
    if case.widths.endswith("late"):
        how = case.widths.removesuffix(" late")
        return with_test_plugin(
            DFLASH_LATE=how, SGLANG_DFLASH_BUDGET="measured", **case.environment
        )
    budget = "fixed" if case.widths == "whole" else "measured"
    return {"SGLANG_DFLASH_BUDGET": budget, **case.environment}


def with_test_plugin(**variables: str) -> dict[str, str]:
    """Return the environment in which the plugin in `mutant/` is loaded, and reads `variables`."""
    paths = [str(Path(__file__).parent / "mutant"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths), **variables}
