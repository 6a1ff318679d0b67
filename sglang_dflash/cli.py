# SPDX-License-Identifier: Apache-2.0
"""`sglang-dflash`: the console command. Reading the arguments loads neither torch nor sglang."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sglang_dflash import __version__
from sglang_dflash.training.command import add_train_parser

if TYPE_CHECKING:
    from sglang_dflash.stats import Reading

__all__ = ["main"]

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130

_DEMO_BLOCK = 4
_DAY = 86_400  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0: all well. 1: something failed, or the check did not hold. 2: bad arguments.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments, parser)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-dflash", description="DFlash speculative decoding for SGLang."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_doctor(commands)
    _add_stats(commands)
    add_train_parser(commands)
    _add_convert(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="serve a few prompts plainly and with DFLASH, and compare",
        description=(
            "Fetches SmolLM2-135M-Instruct once, serves the same prompts plainly and with the "
            "bundled draft, and shows answers, tokens per second, acceptance length and whether "
            "the texts are identical. Exit code 1 where they are not, in float32."
        ),
    )
    add = demo.add_argument
    add("--prompt", action="append", type=_text, help="use this instead; repeatable")
    add("--max-new-tokens", type=_length, default=64, metavar="N", help="default: 64")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="default: auto, which is float32 on a CPU and bfloat16 on a GPU",
    )
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    add("--target", metavar="MODEL", help="another target: a folder or a hub name")
    add("--draft", metavar="MODEL", help="another DFlash draft: a folder or a hub name")
    add(
        "--block-size",
        type=_block,
        metavar="B",
        help=f"tokens of a block, anchor included; default: {_DEMO_BLOCK} with the bundled draft, "
        "which accepts few beyond it, else the draft's own",
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    add("--verbose", action="store_true", help="show SGLang's log")
    demo.set_defaults(run=_demo)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, who serves DFLASH, and what is wrong",
        description="Exit code 1 where something keeps the plugin from working.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)


def _add_convert(commands: argparse._SubParsersAction) -> None:
    convert = commands.add_parser(
        "convert",
        help="rewrite a draft in the speculators format so that it is served",
        description=(
            "Reads a DFlash draft as vLLM's library speculators saves it, compares its embedding "
            "and output head with TARGET's, and writes it to OUT as this plugin and SGLang read "
            "drafts. Exit code 1, and nothing written, where it would be another draft there."
        ),
    )
    add = convert.add_argument
    add("draft", metavar="DRAFT", help="the draft: a folder or a hub name")
    add("target", metavar="TARGET", help="the target it will serve: a folder or a hub name")
    add("out", metavar="OUT", type=Path, help="folder to write, new or empty")
    add("--json", action="store_true", help="print one JSON object")
    convert.set_defaults(run=_convert)


def _text(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError("is empty")
    return value


def _length(value: str) -> int:
    return _integer(value, 1, 4096)


def _block(value: str) -> int:
    return _integer(value, 2, 64)


def _interval(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _DAY:  # not true of nan either
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a number of seconds above 0, up to a day ({_DAY})"
        )
    return seconds


def _integer(value: str, least: int, most: int) -> int:
    if not (value.isascii() and value.isdecimal() and least <= int(value) <= most):
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number from {least} to {most}")
    return int(value)


def _demo(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if problem := _demo_problem(arguments):
        parser.error(problem)
    from sglang_dflash.demo import DemoError
    from sglang_dflash.demo.run import DemoSettings, built_in_prompts, run_demo

    own = [("yours", prompt) for prompt in arguments.prompt or []]
    settings = DemoSettings(
        prompts=own or built_in_prompts(),
        max_new_tokens=arguments.max_new_tokens,
        dtype=arguments.dtype,
        device=arguments.device,
        target=arguments.target,
        draft=arguments.draft,
        block_size=arguments.block_size or (None if arguments.draft else _DEMO_BLOCK),
        verbose=arguments.verbose,
    )
    try:
        record = run_demo(settings)
    except DemoError as error:
        print(f"sglang-dflash demo: {error}", file=sys.stderr)
        return FAILED
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    must_match = record["settings"]["dtype"] == "float32"
    return FAILED if must_match and not record["identical"] else 0


def _demo_problem(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments taken together, found before anything starts."""
    if arguments.target and not arguments.draft:
        return "--target needs --draft: the bundled draft belongs to SmolLM2-135M-Instruct"
    for flag in ("target", "draft"):
        model = getattr(arguments, flag)
        if model and not _is_model(model):
            return f"--{flag} {model}: neither a folder with a config.json nor a hub name"
    from sglang_dflash.errors import UnsupportedCheckpoint, draft_given_as

    try:
        with draft_given_as("--draft"):
            trained = _trained_block(arguments.draft)
    except UnsupportedCheckpoint as error:
        return str(error)
    block = arguments.block_size
    if block is not None and trained is not None and block > trained:
        return f"--block-size {block}: the draft was trained for blocks of {trained}"
    if arguments.device == "cuda" and not _has_cuda():
        return "--device cuda: torch sees no CUDA device here"
    if arguments.json is not None and arguments.json.is_dir():
        return f"--json {arguments.json}: is a folder"
    if arguments.json is not None and not os.access(arguments.json.parent, os.W_OK):
        return f"--json {arguments.json}: its folder cannot be written"
    return None


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _is_model(model: str) -> bool:
    """Tell whether `model` is a model folder, or may be a name on the hub (`owner/name`)."""
    path = Path(model).expanduser()
    if path.exists():
        return (path / "config.json").is_file()
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def _trained_block(draft: str | None) -> int | None:
    """Return the block size in the draft's config; None for a draft that is not here.

    Raises:
        UnsupportedCheckpoint: its config.json cannot be read.
    """
    from sglang_dflash.demo.model import bundled_draft
    from sglang_dflash.draft.config import read_config

    folder = Path(draft).expanduser() if draft else bundled_draft()
    if not folder.exists():  # on the hub
        return None
    config = read_config(folder)
    nested = config.get("dflash_config")
    return (nested if isinstance(nested, dict) else {}).get("block_size", config.get("block_size"))


def _add_stats(commands: argparse._SubParsersAction) -> None:
    stats = commands.add_parser(
        "stats",
        help="show what the verify budget of a running server chooses",
        description=(
            "Reads the counters of a server started with --enable-metrics: verified rows, tokens "
            "a step as predicted and as seen, acceptance by position, the calibration curve."
        ),
    )
    stats.add_argument("url", metavar="URL", help="of the server, as in http://127.0.0.1:30000")
    stats.add_argument("--json", action="store_true", help="print one JSON object")
    stats.add_argument(
        "--watch",
        type=_interval,
        metavar="SECONDS",
        help="then show each interval's figures until Ctrl-C, through restarts of the server",
    )
    stats.set_defaults(run=_stats)


def _stats(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from sglang_dflash.stats import read

    if arguments.watch is not None:
        return _watch(arguments)
    try:
        _show_stats(read(arguments.url), None, as_json=arguments.json)
    except ValueError as error:
        print(error, file=sys.stderr)
        return FAILED
    return 0


def _watch(arguments: argparse.Namespace) -> NoReturn:
    """Show the figures of each interval; a reading that fails is told, and the next one tried."""
    from sglang_dflash.stats import has_restarted, read

    before = None
    while True:
        try:
            now = read(arguments.url)
        except ValueError as error:
            print(error, file=sys.stderr, flush=True)
        else:
            if before is not None and has_restarted(now, before):
                print("the server was started anew: its counters have fallen", file=sys.stderr)
                before = None
            _show_stats(now, before, as_json=arguments.json)
            before = now
        time.sleep(arguments.watch)


def _show_stats(now: Reading, before: Reading | None, *, as_json: bool) -> None:
    from sglang_dflash.stats import Stats, table

    stats = Stats.between(now, before)
    since = "the server's start" if before is None else "the last reading"
    if as_json:
        print(json.dumps({"since": since, **stats._asdict()}), flush=True)
    else:
        print(f"since {since}:\n{table(stats)}", flush=True)


def _convert(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from sglang_dflash.draft.convert import convert_draft
    from sglang_dflash.errors import UnsupportedCheckpoint

    try:
        done = convert_draft(arguments.draft, arguments.target, arguments.out)
    except UnsupportedCheckpoint as error:
        print(f"sglang-dflash convert: {error}", file=sys.stderr)
        return FAILED
    if done.verifier and Path(done.verifier).name.lower() != Path(arguments.target).name.lower():
        # Sizes and copies fit; a draft without copies may be another target's all the same.
        print(f"the draft was trained for {done.verifier}", file=sys.stderr)
    told = {"out": str(arguments.out), **done.as_json()}
    if arguments.json:
        print(json.dumps(told, indent=2))
        return 0
    for name, value in told.items():
        print(f"{name:18} {'unstated' if value is None else value}")
    return 0


def _doctor(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from sglang_dflash.doctor import diagnose

    found = diagnose()
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
        return FAILED if found.problems else 0
    for name, version in found.versions.items():
        print(f"{name:18} {version}")
    print(f"{'CPU':18} {found.cpu}")
    print(f"{'accelerator':18} {found.accelerator or 'unknown'}")
    print(f"{'platform':18} {f'{found.platform} ({found.device})' if found.platform else 'none'}")
    print(f"{'DFLASH worker':18} {found.worker}")
    for group, ok in found.entry_points.items():
        print(f"{'entry point':18} {group}: {'found' if ok else 'MISSING'}")
    for problem in found.problems:
        print(f"problem: {problem}")
    print("all well" if not found.problems else f"{len(found.problems)} problem(s)")
    return FAILED if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
