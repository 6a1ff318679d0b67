# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m bench sweep | report | compare | offline`.

Exit codes: 0 done; 1 some points failed, or a regression; 2 a mistake, named; 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from bench.config import load_recipe
from bench.errors import BenchError
from bench.places import dated

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code."""
    args = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # so that servers are taken down and views written
    try:
        return args.run(args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    sweep = commands.add_parser("sweep", help="measure a recipe's engines over its load levels")
    sweep.set_defaults(run=_sweep)
    sweep.add_argument("recipe", type=Path, metavar="CONFIG.yaml")
    sweep.add_argument("--quick", action="store_true", help="the recipe's short form")
    sweep.add_argument("--dry-run", action="store_true", help="print commands and plan only")
    where = sweep.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="DIR", help="the new run folder")
    where.add_argument("--resume", type=Path, metavar="DIR", help="go on with this run folder")

    report = commands.add_parser("report", help="redraw runs; several are drawn side by side")
    report.set_defaults(run=_report)
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    report.add_argument("--out", type=Path, metavar="DIR", help="needed for several runs")

    compare = commands.add_parser("compare", help="exit 1 where run B is slower than run A")
    compare.set_defaults(run=_compare)
    compare.add_argument("old", type=Path, metavar="A")
    compare.add_argument("new", type=Path, metavar="B")
    compare.add_argument("--fail-below", type=float, default=0.97, metavar="RATIO")
    compare.add_argument(
        "--metric", choices=("speedup", "output_tokens_per_s"), default="speedup",
        help="speed-up over the run's own baseline (default), or tokens/s on an equal machine",
    )  # fmt: skip

    offline = commands.add_parser("offline", help="one batch per dataset through sgl.Engine")
    offline.set_defaults(run=_offline)
    offline.add_argument("recipe", type=Path, metavar="CONFIG.yaml")
    offline.add_argument("--quick", action="store_true", help="the recipe's short form")
    offline.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the record")
    return parser


def _sweep(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, quick=args.quick)
    if args.dry_run:
        from bench.dryrun import describe_sweep

        print(describe_sweep(recipe, args.recipe.parent))
        return 0
    from bench.report import write_report
    from bench.sweep import run_sweep

    out = args.resume or args.out or dated(recipe.name, quick=args.quick)
    command = f"python -m bench sweep {args.recipe}{' --quick' if args.quick else ''}"
    try:
        complete = run_sweep(recipe, args.recipe.parent, out, resume=args.resume is not None)
    except KeyboardInterrupt:
        if out.is_dir():
            write_report([out], out)
            print(f"interrupted; go on by: {command} --resume {out}", file=sys.stderr)
        return 130
    print((write_report([out], out) / "summary.md").read_text(encoding="utf-8"))
    print(f"run folder: {out}")
    if not complete:
        print(f"some points failed; try them again by: {command} --resume {out}", file=sys.stderr)
    return 0 if complete else 1


def _report(args: argparse.Namespace) -> int:
    from bench.report import write_report

    if args.out is None and len(args.runs) > 1:
        raise BenchError("several runs: name a folder for their common report by --out")
    print(write_report(args.runs, args.out or args.runs[0]) / "report.html")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from bench.regression import compare_runs

    text, passed = compare_runs(args.old, args.new, args.metric, args.fail_below)
    print(text)
    return 0 if passed else 1


def _offline(args: argparse.Namespace) -> int:
    from bench.offline import run_offline

    recipe = load_recipe(args.recipe, quick=args.quick)
    print(run_offline(recipe, args.recipe.parent, args.out))
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
