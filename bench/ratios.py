# SPDX-License-Identifier: Apache-2.0
"""Ratios of engines in one run: same prompts, interleaved, warm, medians with spread.

    python -m bench.ratios --engines plain,dflash --concurrency 1,4 --rounds 5

Engines: plain (SGLang without speculation), dflash (this plugin), dflash-fixed (this plugin, whole
blocks whatever they cost), upstream (SGLang's own DFLASH worker; on a CPU with the shims of
bench/upstream_on_cpu), vllm (--vllm-python: an interpreter that has it). Every ratio is taken
within a round and over the first engine named.

    python -m bench.ratios --draft random --warmup-steps 200 --concurrency 1,2,4,8,16,32

A draft of random weights, judged after 200 steps at each concurrency.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm
from transformers import AutoTokenizer

from bench.config import Load
from bench.machine import shareable
from bench.manifest import describe_models
from bench.plan import answer_lengths
from bench.prompts import encode
from bench.random_draft import write_random_draft
from sglang_dflash.demo.model import bundled_draft, ensure_target

HERE = Path(__file__).parent
LEARNS = ("dflash",)  # from what was accepted
DRAFTS = ("dflash", "dflash-fixed", "upstream")  # have a draft
ENGINES = ("plain", *DRAFTS, "vllm")
Number = TypeVar("Number", int, float)


@dataclass
class Child:
    """An engine in a process of its own."""

    name: str
    process: subprocess.Popen
    log: Path

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one line, wait for one line."""
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next reply."""
        line = self.process.stdout.readline()
        if not line:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"the {self.name} engine ended:\n{tail}")
        return json.loads(line)


def start(name: str, args: argparse.Namespace, target: Path, draft: Path) -> Child:
    """Start an engine's process and wait until it serves."""
    environment = dict(os.environ)
    python, script = sys.executable, "serve_sglang.py"
    options: dict[str, Any] = {
        "model_path": str(target), "dtype": args.dtype, "context_length": 2048,
        "max_total_tokens": 65536, "log_level": "error", "random_seed": 0,
    }  # fmt: skip
    if name in DRAFTS:
        options |= {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(draft),
            "speculative_num_draft_tokens": args.block_size,
        }
    if name == "dflash-fixed":
        environment["SGLANG_DFLASH_BUDGET"] = "fixed"
    if name == "upstream":
        environment["SGLANG_DFLASH_WORKER"] = "upstream"
        shims = str(HERE / "upstream_on_cpu")
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [shims, environment.get("PYTHONPATH")])
        )
    if name == "vllm":
        python, script = args.vllm_python, "serve_vllm.py"
        cores = sorted(os.sched_getaffinity(0))  # by itself it leaves one idle
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        options = {
            "model": str(target), "dtype": args.dtype, "max_model_len": 2048,
            "enforce_eager": True, "seed": 0, "disable_log_stats": True,
        }  # fmt: skip
    log = Path(tempfile.mkstemp(prefix=f"bench-{name}-", suffix=".log")[1])
    process = subprocess.Popen(
        [python, str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=log.open("w"), text=True, env=environment,
    )  # fmt: skip
    child = Child(name, process, log)
    child.ask(options)
    return child


def measure(children: list[Child], args: argparse.Namespace, target: Path) -> list[dict[str, Any]]:
    """Return one record per round, concurrency and engine; the order of engines rotates."""
    lines = (HERE / "data/prompts.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [encode(tokenizer, json.loads(line)["prompt"], {}) for line in lines]
    asked = Load(max_new_tokens=args.max_new_tokens, random_range_ratio=args.random_range_ratio)
    records = []
    points = [(r, c) for r in range(args.rounds + 1) for c in args.concurrency]
    if args.warmup_steps:  # one concurrency after the other, each with a warm-up of its own
        points.sort(key=lambda point: args.concurrency.index(point[1]))
    for round_number, concurrency in tqdm(points, desc="rounds"):
        count = concurrency * args.answers_per_slot
        first = round_number * count
        lengths = answer_lengths(asked, count, round_number)
        batch = [prompts[(first + i) % len(prompts)] for i in range(count)]
        if round_number == 0:
            warm_up(children, batch, concurrency, args)
        turn = round_number % len(children)
        for child in children[turn:] + children[:turn]:
            reply = child.ask(
                {
                    "prompts": batch,
                    "concurrency": concurrency,
                    "lengths": lengths,
                    "temperature": args.temperature,
                }
            )
            if round_number > 0:  # round 0 warms up
                records.append(
                    {"round": round_number, "concurrency": concurrency, "engine": child.name}
                    | reply
                )
    return records


def warm_up(
    children: list[Child], batch: list[str], concurrency: int, args: argparse.Namespace
) -> None:
    """Let the engines that learn take their steps at this batch's concurrency."""
    for child in children:
        steps = 0.0
        while child.name in LEARNS and steps < args.warmup_steps:
            left = max(16, int(args.warmup_steps - steps))
            reply = child.ask(
                {
                    "prompts": batch[:concurrency],
                    "concurrency": concurrency,
                    "lengths": [left] * concurrency,
                    "temperature": 0.0,
                }
            )
            steps += reply["steps"] / concurrency


def summarise(records: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Return one row per concurrency and engine."""
    rows = []
    for concurrency in dict.fromkeys(r["concurrency"] for r in records):
        mine = [r for r in records if r["concurrency"] == concurrency]
        base = {r["round"]: r for r in mine if r["engine"] == names[0]}
        for name in names:
            own = [r for r in mine if r["engine"] == name]
            rates = [_rate(r) for r in own]
            ratios = [_rate(r) / _rate(base[r["round"]]) for r in own]
            steps = sum(r["steps"] for r in own)
            accepted = sum(r["accepted"] for r in own)
            tau = 1 + accepted / steps if steps else 1.0  # answers of one token take none
            same = [r["tokens"] == base[r["round"]]["tokens"] for r in own]
            rows.append(
                {
                    "concurrency": concurrency, "engine": name,
                    "tokens_per_s": statistics.median(rates), "low": min(rates), "high": max(rates),
                    "ratio": statistics.median(ratios),
                    "ratio_low": min(ratios), "ratio_high": max(ratios),
                    "acceptance_length": tau,
                    "ratio_over_tau": statistics.median(ratios) / tau,
                    "identical_rounds": sum(same), "rounds": len(same),
                }
            )  # fmt: skip
    return rows


def _rate(record: dict[str, Any]) -> float:
    return sum(len(tokens) for tokens in record["tokens"]) / record["seconds"]


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Return the rows as Markdown."""
    lines = [
        f"| concurrency | engine | tokens/s (range) | over {names[0]} (range) | tau | ratio / tau"
        " | identical |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['concurrency']} | {r['engine']} | {r['tokens_per_s']:.1f} "
        f"({r['low']:.1f}-{r['high']:.1f}) | {r['ratio']:.2f} ({r['ratio_low']:.2f}-"
        f"{r['ratio_high']:.2f}) | {r['acceptance_length']:.2f} | {r['ratio_over_tau']:.2f} | "
        f"{r['identical_rounds']}/{r['rounds']} |"
        for r in rows
    ]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return what the numbers were taken on."""
    info = Path("/proc/cpuinfo")
    cpu = next(
        (li.split(":")[1].strip() for li in info.read_text().splitlines() if "model name" in li),
        platform.processor(),
    )
    packages = ("sglang-dflash", "sglang", "torch", "transformers")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in packages},
        "command": ["python", "-m", "bench.ratios", *map(shareable, sys.argv[1:])],
    }


def _described(args: argparse.Namespace, target: Path, draft: Path) -> dict[str, Any]:
    """Return what the numbers are taken on, and with which models."""
    models = {"target": str(target)}
    if set(args.engines) & set(DRAFTS):
        models["draft"] = str(draft)
    return {"machine": machine(), **describe_models(models)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; what a run would only find out at its end is refused here.

    Args:
        arguments: The words; None takes the process's own.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.quick:
        args.rounds, args.max_new_tokens = 1, 16
        args.concurrency, args.warmup_steps = args.concurrency[:2], min(args.warmup_steps, 20)
    if "vllm" in args.engines and args.vllm_python is None:
        parser.error("--engines vllm needs --vllm-python, an interpreter that has vLLM")
    if "vllm" in args.engines and args.answers_per_slot > 1:
        parser.error("--engines vllm: it is given one batch at a time: add --answers-per-slot 1")
    if args.max_new_tokens < 2:
        parser.error("--max-new-tokens 1: the first token is the prompt's; take 2 or more")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ratios", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--engines", type=_engines, default=["plain", "dflash"])
    parser.add_argument("--concurrency", type=_positives, default=[1, 4])
    parser.add_argument("--rounds", type=_positive, default=5)
    parser.add_argument("--max-new-tokens", type=_positive, default=64)
    parser.add_argument(
        "--random-range-ratio",
        type=_share,
        default=0.5,
        help="an answer's length is drawn from this share of --max-new-tokens up to all of it",
    )
    parser.add_argument(
        "--answers-per-slot",
        type=_positive,
        default=3,
        help="answers a round, over the concurrency: when one ends, the next begins (1 with vllm)",
    )
    parser.add_argument("--temperature", type=_temperature, default=0.0)
    parser.add_argument("--block-size", type=_positive, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", type=Path, help="default: the bundled one; random: its shapes")
    parser.add_argument(
        "--warmup-steps", type=_count, default=0, help="of engines that learn, at each concurrency"
    )
    parser.add_argument("--quick", action="store_true", help="little, to see that it runs")
    parser.add_argument("--vllm-python", help="interpreter with vLLM")
    parser.add_argument("--json", type=_writable, help="where to write all records")
    return parser


def _engines(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"'{name}' is not one of {', '.join(ENGINES)}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"'{text}': name each engine once")
    return names


def _count(text: str) -> int:
    return _number(text, int, "a whole number, 0 or more", lambda number: number >= 0)


def _positive(text: str) -> int:
    return _number(text, int, "a whole number, 1 or more", lambda number: number >= 1)


def _positives(text: str) -> list[int]:
    numbers = [_positive(part) for part in text.split(",")]
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"'{text}': each number once")
    return numbers


def _share(text: str) -> float:
    return _number(text, float, "a number above 0, at most 1", lambda number: 0 < number <= 1)


def _temperature(text: str) -> float:
    return _number(text, float, "a number, 0 or more", lambda number: 0 <= number < math.inf)


def _number(text: str, kind: type[Number], wanted: str, allows: Callable[[Number], bool]) -> Number:
    """Return the text as a number, or raise what argparse shows with the option's name."""
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not allows(number):
        raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}")
    return number


def _writable(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def main() -> None:
    """Run and print."""
    args = parse()
    target, draft = args.target or ensure_target(), args.draft or bundled_draft()
    scratch = tempfile.TemporaryDirectory(prefix="bench-")  # gone at the end
    if str(draft) == "random":
        draft = write_random_draft(bundled_draft(), Path(scratch.name) / "random")
    # As they are now: a folder may hold others at the end.
    described = _described(args, target, draft) if args.json else {}
    children = [start(name, args, target, draft) for name in args.engines]
    records = measure(children, args, target)
    rows = summarise(records, args.engines)
    print(table(rows, args.engines))
    if args.json:
        for record in records:
            record["tokens"] = sum(len(tokens) for tokens in record["tokens"])
        result = described | {"rows": rows, "records": records}
        args.json.write_text(json.dumps(result, indent=1))
    for child in children:
        child.process.stdin.close()
        child.process.wait(timeout=60)


if __name__ == "__main__":
    main()
