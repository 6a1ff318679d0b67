# SPDX-License-Identifier: Apache-2.0
"""An engine with a trace, asked in closed loops of real prompts; for scripts that look at steps."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.config import DatasetSpec
from bench.machine import describe_machine, git_state, shareable, versions
from bench.manifest import describe_models
from bench.places import dated
from bench.prompts import encode, load_prompts
from sglang_dflash.demo.model import bundled_draft, ensure_target
from sglang_dflash.trace import Trace, read_trace

__all__ = ["KINDS", "Load", "TracedEngine", "arguments", "parsed", "traced_engine"]

DATASETS = {"code": "humaneval", "maths": "gsm8k", "chat": "mt-bench"}
KINDS = tuple(DATASETS)
RESULTS = (".json", ".png")


class Load(NamedTuple):
    """Requests that are asked in a closed loop.

    Attributes:
        concurrency: requests under way at a time.
        kinds: of prompts, in turn.
        requests: how many each of them is followed by, itself included.
    """

    concurrency: int
    kinds: tuple[str, ...] = KINDS
    requests: int = 1


class TracedEngine:
    """An engine under way, and the file that it writes its steps to.

    Attributes:
        manifest: what its numbers are taken on and with, as it was when the engine started.
    """

    def __init__(
        self, engine: Any, file: Path, max_new_tokens: int, manifest: dict[str, Any]
    ) -> None:
        self._engine, self._file, self._max_new_tokens = engine, file, max_new_tokens
        self.manifest = manifest
        tokenizer = engine.tokenizer_manager.tokenizer
        self._prompts = {}
        for kind, dataset in DATASETS.items():
            texts = load_prompts(DatasetSpec(dataset, source="sample"), 0, Path()).texts
            self._prompts[kind] = itertools.cycle([encode(tokenizer, text, {}) for text in texts])

    def serve(self, load: Load) -> float:
        """Serve a load to its end; return when it began, Unix seconds."""
        prompts = itertools.chain.from_iterable(
            zip(*(self._prompts[kind] for kind in load.kinds), strict=False)
        )
        params = {"temperature": 0, "max_new_tokens": self._max_new_tokens, "ignore_eos": True}

        async def ask_in_turn() -> None:
            for _ in range(load.requests):
                await self._engine.async_generate(input_ids=next(prompts), sampling_params=params)

        async def ask_all() -> None:
            await asyncio.gather(*(ask_in_turn() for _ in range(load.concurrency)))

        began = time.time()
        self._engine.loop.run_until_complete(ask_all())
        return began

    def trace(self) -> Trace:
        """Return the steps so far, the latest one left out."""
        return read_trace(self._file)


@contextmanager
def traced_engine(args: argparse.Namespace) -> Iterator[TracedEngine]:
    """Start an engine with DFLASH and a trace, and stop it in the end."""
    import sglang

    target, draft = str(args.target or ensure_target()), str(args.draft or bundled_draft())
    manifest = _manifest({"target": target, "draft": draft})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        os.environ["SGLANG_DFLASH_TRACE"] = str(file)
        engine = sglang.Engine(
            model_path=target,
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=draft,
            speculative_num_draft_tokens=args.block_size,
            dtype=args.dtype,
            context_length=2048,
            max_total_tokens=65536,
            log_level="error",
            random_seed=0,
        )
        try:
            yield TracedEngine(engine, file, args.max_new_tokens, manifest)
        finally:
            engine.shutdown()
            del os.environ["SGLANG_DFLASH_TRACE"]


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of what every traced script takes.

    Args:
        description: the script's docstring.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it runs")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", type=Path, help="default: the bundled one")
    parser.add_argument(
        "--out", type=Path, help="for .json and .png; default: bench/results/DATE-NAME"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    return parser


def parsed(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """Return the command line with `--out` filled in; ends the process where it cannot be written.

    Asked before the engine starts: a record that another has made is evidence, and minutes of
    measuring are lost where there is no folder.

    Args:
        parser: of `arguments`, and what the script has added to it.
        name: of the results, without date and suffix.
    """
    args = parser.parse_args()
    args.out = args.out or dated(name, quick=args.quick)
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    for suffix in RESULTS:
        file = args.out.with_suffix(suffix)
        if file.exists() and not args.overwrite:
            parser.error(f"{file} exists: name another by --out, or add --overwrite")
    return args


def _manifest(models: dict[str, str]) -> dict[str, Any]:
    """Return what the numbers are taken on, and with which models."""
    command = shareable(
        " ".join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    )
    return {
        "machine": describe_machine(), "versions": versions(), "git": git_state(),
        "command": command, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **describe_models(models),
    }  # fmt: skip
