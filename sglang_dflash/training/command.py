# SPDX-License-Identifier: Apache-2.0
"""`sglang-dflash train`: the arguments, and the run from target to draft.

Reading the arguments loads neither torch nor transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dflash.errors import UnsupportedCheckpoint
from sglang_dflash.files import place_problem, whole_file
from sglang_dflash.training.prompts import check_sources
from sglang_dflash.training.settings import LoopSettings, Settings, SettingsError
from sglang_dflash.training.settings_file import settings_from_dict, settings_from_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sglang_dflash.training.model import BlockDraft

__all__ = ["add_train_parser", "run_train"]

FAILED, BAD_USAGE = 1, 2


def add_train_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the sub-command to a command line; return its parser."""
    parser = subparsers.add_parser(
        "train",
        help="make a DFlash draft for a target",
        description=(
            "Lets TARGET answer prompts, and trains a draft on these texts. OUT is the draft's "
            "folder afterwards; a run that was stopped goes on with --resume."
        ),
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="the target: a folder or a hub name")
    add("out", metavar="OUT", type=Path, help="folder of the draft")
    add(
        "--prompts",
        action="append",
        metavar="SOURCE",
        help="FILE, FILE:N or auto:N, where the target makes prompts up; repeatable. "
        "Default: data.prompts of the config, else auto:2000",
    )
    add("--config", type=Path, metavar="YAML", help="settings: sections draft, data and train")
    add("--steps", type=int, metavar="N", help="train.steps")
    add("--block-size", type=int, metavar="B", help="draft.block_size, the anchor included")
    add("--num-layers", type=int, metavar="N", help="draft.num_layers")
    add("--seed", type=int, metavar="N", help="data.seed and train.seed")
    add("--init-from-target-layers", action="store_true", default=None, help="start from these")
    add("--init-from-draft", metavar="DRAFT", help="start from this draft, to fit it to a target")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of the texts; "
        "default: OUT/training/data; with --resume, where the run has them",
    )
    add(
        "--more-texts",
        action="append",
        metavar="DIR",
        help="texts that an earlier run made, learnt beside this run's; repeatable",
    )
    add("--data-only", action="store_true", help="make the texts, and stop")
    add("--resume", action="store_true", help="go on from OUT's last state")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    add("--quiet", action="store_true", help="no progress bars and no log")
    parser.set_defaults(run=lambda arguments, _: run_train(arguments))
    return parser


def run_train(arguments: argparse.Namespace) -> int:
    """Make texts and train; return 0, 1 where no draft is possible, 2 for bad arguments.

    Under torchrun each process runs this; the texts must be there then.
    """
    try:
        settings = _settings(arguments)
        _check_folder(arguments)
        check_sources(settings.data.prompts)
        _train(arguments, settings)
    except SettingsError as error:
        return _complain(error, BAD_USAGE)
    except UnsupportedCheckpoint as error:
        return _complain(error, FAILED)
    return 0


def _complain(error: Exception, code: int) -> int:
    sys.stderr.write(f"sglang-dflash train: {error}\n")
    return code


def _settings(arguments: argparse.Namespace) -> Settings:
    """Return the config's settings under those of the flags."""
    stated: dict[str, dict[str, Any]] = {
        "draft": {
            "block_size": arguments.block_size,
            "num_layers": arguments.num_layers,
            "init_from_target_layers": arguments.init_from_target_layers,
            "init_from_draft": arguments.init_from_draft,
        },
        "data": {
            "prompts": arguments.prompts,
            "more_texts": arguments.more_texts,
            "seed": arguments.seed,
        },
        "train": {"steps": arguments.steps, "seed": arguments.seed},
    }
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in stated.items()
    }
    flags = {section: values for section, values in given.items() if values}
    if arguments.config is None:
        return settings_from_dict(flags)
    return settings_from_yaml(arguments.config, flags)


def _check_folder(arguments: argparse.Namespace) -> None:
    _check_place("OUT", arguments.out)
    run = arguments.out / "training"
    if (run / "state.pt").exists() and not arguments.resume and not arguments.data_only:
        raise SettingsError(f"{arguments.out} holds a run: add --resume, or name another folder")
    if (arguments.out / "config.json").exists() and not run.exists():
        raise SettingsError(f"{arguments.out} holds a model that is no run of this: name another")
    if arguments.resume and not run.exists():
        raise SettingsError(f"--resume: {arguments.out} holds no run; leave the option out")


def _check_place(option: str, path: Path) -> None:
    """Refuse a path at which no folder can be written."""
    if problem := place_problem(path):
        raise SettingsError(f"{option} {path}: {problem}")


class _Start(NamedTuple):
    """What a run begins with.

    Attributes:
        settings: Nothing that the draft decides is open in them any more.
        target: Where it was loaded, on the CPU.
        tokenizer: The target's.
        config: The draft's config.json.
        draft: Its first weights.
    """

    settings: Settings
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: dict[str, Any]
    draft: BlockDraft


def _train(arguments: argparse.Namespace, settings: Settings) -> None:
    """Make the texts as far as they are missing, and train; the order of a run."""
    from sglang_dflash.training.checkpoint import state_path
    from sglang_dflash.training.data import build_corpus
    from sglang_dflash.training.frozen import borrowed
    from sglang_dflash.training.loop import Trainer
    from sglang_dflash.training.ranks import process_rank

    with process_rank(arguments.device) as rank:
        quiet = arguments.quiet or not rank.is_first
        if not quiet:
            _show_log()
        run = arguments.out / "training"
        texts = _texts_folder(arguments, run)
        is_complete = _texts_are_complete(arguments, texts, rank.count)
        settings, target, tokenizer, config, draft = _start(arguments, settings)
        if not is_complete:  # else none of its layers has to run
            target.to(rank.device)
        run.mkdir(parents=True, exist_ok=True)
        # A run that was stopped while it made its texts has no state yet.
        has_state = state_path(run).exists()
        recipe = _recipe(arguments, settings, texts)
        accepted = partial(_write_recipe, run, recipe) if rank.is_first else None
        corpus = build_corpus(
            texts,
            target,
            tokenizer,
            settings.data,
            tuple(config["dflash_config"]["target_layer_ids"]),
            quiet=quiet,
            accepted=None if has_state or arguments.data_only else accepted,
        )
        _check_split(corpus.split(held_out=False), settings.train)
        if arguments.data_only:
            return
        embedding, head = borrowed(target, rank.device)
        del target  # its layers are done; the draft needs their memory
        trainer = Trainer(draft, embedding, head, corpus, settings, config, rank)
        trainer.run(run, arguments.out, resume=has_state, quiet=quiet, accepted=accepted)


def _texts_are_complete(arguments: argparse.Namespace, texts: Path, num_processes: int) -> bool:
    """Tell whether all texts are there, or refuse a place or a way in which none can be made."""
    from sglang_dflash.training.data import corpus_is_complete

    if corpus_is_complete(texts):
        return True
    _check_place("--data" if arguments.data else "--data, by default", texts)
    if num_processes > 1:
        raise SettingsError(
            f"{texts}: the texts are not all there; make them by one process with --data-only "
            "before torchrun"
        )
    return False


def _start(arguments: argparse.Namespace, settings: Settings) -> _Start:
    """Load the target, and make the draft on the CPU: a GPU's sums could have other bits.

    Raises:
        SettingsError: the target, the earlier draft or the settings cannot be used together.
        UnsupportedCheckpoint: the target can have no draft.
    """
    from sglang_dflash.training.earlier import read_earlier, settled
    from sglang_dflash.training.initial import draft_config_json
    from sglang_dflash.training.target import load_target

    earlier = read_earlier(settings.draft)
    settings = dataclasses.replace(settings, draft=settled(settings.draft, earlier))
    target, tokenizer = load_target(arguments.target)
    config = draft_config_json(target, tokenizer, settings.draft, earlier)
    return _Start(settings, target, tokenizer, config, _first_draft(config, target, settings))


def _show_log() -> None:
    """Let be seen what the package logs: what is left out, and what the texts can need."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("sglang_dflash").setLevel(logging.INFO)


def _first_draft(config: dict[str, Any], target: PreTrainedModel, settings: Settings) -> BlockDraft:
    from sglang_dflash.training.initial import continued_draft, new_draft

    if settings.draft.init_from_draft is not None:
        return continued_draft(config, settings.draft.init_from_draft, seed=settings.train.seed)
    return new_draft(
        config,
        target,
        seed=settings.train.seed,
        from_target_layers=settings.draft.init_from_target_layers,
    )


def _check_split(numbers: list[int], settings: LoopSettings) -> None:
    if len(numbers) < settings.texts_per_batch:
        raise SettingsError(
            f"train.texts_per_batch is {settings.texts_per_batch}, and there are {len(numbers)} "
            "texts to train on: give more prompts, or take fewer a batch"
        )


def _recipe_path(run: Path) -> Path:
    return run / "settings.json"


def _recipe(arguments: argparse.Namespace, settings: Settings, texts: Path) -> str:
    """Return what a model card needs to say how the draft was made, and `--resume` to go on."""
    is_named = texts != arguments.out / "training" / "data"
    recipe = {
        "target": arguments.target,
        "data": str(texts.resolve()) if is_named else None,
        "settings": settings.as_dict(),
    }
    return json.dumps(recipe, indent=1) + "\n"


def _write_recipe(run: Path, recipe: str) -> None:
    """Put a recipe in place of the last one; a kill leaves one or the other."""
    with whole_file(_recipe_path(run)) as unfinished:
        unfinished.write_text(recipe, encoding="utf-8")


def _texts_folder(arguments: argparse.Namespace, run: Path) -> Path:
    """Return where the texts are: a run that is resumed knows it."""
    if arguments.data is not None:
        return arguments.data
    known = _known_folder(_recipe_path(run)) if arguments.resume else None
    if known is None:
        return run / "data"
    if not Path(known).is_dir():
        raise SettingsError(f"--resume: the texts were in {known}, and are not: name --data")
    return Path(known)


def _known_folder(path: Path) -> str | None:
    """Return where a recipe says that the texts are; None for the usual place.

    Raises:
        SettingsError: the recipe cannot be read.
    """
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))).get("data")
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(
            f"--resume: {path} cannot be read, which says where the texts are ({error}): name "
            "their folder by --data"
        ) from error
