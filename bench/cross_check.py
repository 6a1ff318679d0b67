# SPDX-License-Identifier: Apache-2.0
"""One point by this harness and by `sglang.bench_serving`: same server, prompts and answer length.

    python -m bench.cross_check bench/configs/cpu-smollm2.yaml --engine plain --concurrency 4

Starts the engine's server, warms it up, and lets the two measure it in turn (A B, then B A). Prints
each round, the command of `bench_serving`, and the median ratio of ours to theirs. Exit codes: 0
tokens/s and mean TTFT agree within --within, 1 they do not, 2 a mistake.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.commands import command_of, models_of
from bench.config import Recipe, load_recipe
from bench.errors import BenchError
from bench.load import Target, flush_cache, run_load
from bench.measures import measure
from bench.plan import Level, Point
from bench.promptsets import PromptSets
from bench.records import PointRecord
from bench.server import Server, free_port

__all__ = ["main"]

MEASURES = ("tokens/s", "mean TTFT ms", "mean TPOT ms")
JUDGED = 2  # the first two
Figures = tuple[float, ...]


def main() -> int:
    """Measure and compare; return the exit code."""
    args = _parser().parse_args()
    try:
        recipe = load_recipe(args.recipe)
        return _check(recipe, args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(recipe: Recipe, args: argparse.Namespace) -> int:
    for what, name, items in (("engine", args.engine, recipe.engines),
                              ("dataset", args.dataset, recipe.datasets)):  # fmt: skip
        if name not in (names := [item.name for item in items]):
            raise BenchError(f"--{what} {name}: not one of {', '.join(names)}")
    engine = recipe.engine(args.engine)
    if not engine.is_sglang:
        raise BenchError(f"--engine {args.engine}: only SGLang's servers are checked")
    models = models_of(recipe, fetch=True)
    prompts = PromptSets(recipe, args.recipe.parent, models["target"])
    point = Point(args.engine, args.dataset, Level(args.concurrency), 0)
    ids = prompts.of(point, args.requests)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = command_of(recipe, engine, models, port)
        log = Path(folder) / "server.log"
        with Server(args.engine, command, port, log, sglang=True) as server:
            server.wait_ready(recipe.servers.start_timeout_s)
            target = Target(server, models["target"], prompts.count_tokens)
            theirs = _command(server.url, models["target"], Path(folder), len(ids), args)
            prompts.write_conversations(Path(folder) / "prompts.jsonl", ids)
            print(shlex.join(theirs), flush=True)
            run_load(
                target, ids[: args.concurrency], point.level, recipe.load,
                lengths=[args.max_new_tokens] * args.concurrency,
            )  # fmt: skip
            rounds = []
            for number in range(args.rounds):
                ask = [lambda: _ours(target, ids, point, recipe, args), lambda: _theirs(theirs)]
                found = [ask[i]() for i in ((0, 1) if number % 2 == 0 else (1, 0))]
                rounds.append(tuple(found if number % 2 == 0 else found[::-1]))
                print(f"round {number + 1}: ours {_shown(rounds[-1][0])}; bench_serving "
                      f"{_shown(rounds[-1][1])}", flush=True)  # fmt: skip
    return _judge(rounds, args.within)


def _ours(
    target: Target, ids: list[list[int]], point: Point, recipe: Recipe, args: argparse.Namespace
) -> Figures:
    """Measure the point as a sweep does; tokens/s is of the whole run, as bench_serving's is."""
    flush_cache(target.server)
    lengths = [args.max_new_tokens] * len(ids)
    found = run_load(target, ids, point.level, recipe.load, lengths=lengths)
    if failed := [request.error for request in found if request.error is not None]:
        raise BenchError(f"{len(failed)} of {len(found)} requests failed: {failed[0]}")
    figures = measure(PointRecord(point, 0, "rss", True, "", tuple(found)))
    return (
        figures["whole_run_tokens_per_s"], figures["ttft_ms"]["mean"], figures["tpot_ms"]["mean"],
    )  # fmt: skip


def _theirs(command: list[str]) -> Figures:
    out = Path(command[-1])
    out.unlink(missing_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"bench_serving ended with exit code {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found["output_throughput"], found["mean_ttft_ms"], found["mean_tpot_ms"]


def _command(
    url: str, model: str, folder: Path, requests: int, args: argparse.Namespace
) -> list[str]:
    return [
        sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url,
        "--model", model, "--dataset-name", "custom", "--dataset-path",
        str(folder / "prompts.jsonl"), "--sharegpt-output-len", str(args.max_new_tokens),
        "--num-prompts", str(requests), "--max-concurrency", str(args.concurrency),
        "--warmup-requests", "0", "--flush-cache", "--output-file", str(folder / "theirs.json"),
    ]  # fmt: skip


def _judge(rounds: list[tuple[Figures, ...]], within: float) -> int:
    agrees = True
    for place, name in enumerate(MEASURES):
        ratios = [ours[place] / theirs[place] for ours, theirs in rounds]
        middle = statistics.median(ratios)
        agrees &= place >= JUDGED or abs(middle - 1) <= within
        print(f"{name}: ours / bench_serving {middle:.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
    print(f"tokens/s and TTFT agree within {within:.0%}: {'yes' if agrees else 'NO'}")
    return 0 if agrees else 1


def _shown(figures: Figures) -> str:
    return ", ".join(f"{value:.1f} {name}" for value, name in zip(figures, MEASURES, strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("--engine", default="plain")
    parser.add_argument("--dataset", default="gsm8k")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--within", type=float, default=0.05, help="of 1, the median ratio")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
