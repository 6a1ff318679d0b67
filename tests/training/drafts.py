# SPDX-License-Identifier: Apache-2.0
"""Drafts made for tiny targets: one from nothing, and one that knows a few texts by heart."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pairs import PRINTABLE, Pair, random_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.training.answers import answer
from sglang_dflash.training.captured import Capture
from sglang_dflash.training.command import add_train_parser
from sglang_dflash.training.frozen import embedding_of, head_of
from sglang_dflash.training.initial import draft_config_json, new_draft
from sglang_dflash.training.loop import Trainer
from sglang_dflash.training.ranks import Rank
from sglang_dflash.training.settings import DraftSettings, LoopSettings, Settings
from sglang_dflash.training.shards import Corpus, TextInfo, shard_path, write_shard

__all__ = [
    "KNOWN_BLOCK",
    "KNOWN_TOKENS",
    "MADE_BLOCK",
    "knowing_draft",
    "known_prompts",
    "train",
    "write_varied_target",
]

MADE_BLOCK, KNOWN_BLOCK = 8, 16
_KNOWN_TEXTS, _KNOWN_STEPS = 4, 250
KNOWN_TOKENS = 1 + 5 * KNOWN_BLOCK  # of each answer: one from the prefill, then whole blocks


def train(*arguments: str | Path, quiet: bool = True) -> int:
    """Run the sub-command; return its exit code."""
    parser = argparse.ArgumentParser()
    add_train_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["train", *["--quiet"] * quiet, *map(str, arguments)])
    return parsed.run(parsed, parser)


def known_prompts() -> list[list[int]]:
    """Return the prompts of the texts that `knowing_draft` knows."""
    generator = torch.Generator().manual_seed(5)
    return [random_prompt(8, generator)[0].tolist() for _ in range(_KNOWN_TEXTS)]


def write_varied_target(pair: Pair, folder: Path) -> Path:
    """Write a target whose texts follow no chain of tokens, and return its folder.

    It is the pair's with a random head under which no token is likely after itself, and with
    attention and MLPs so strong that the token just read says little about the next one. Where
    that token decides, greedy texts soon go round in circles, which a draft knows without having
    learnt the text.
    """
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    head = target.lm_head.weight
    ids = torch.arange(len(head))
    printable = (ids >= PRINTABLE.start) & (ids < PRINTABLE.stop)
    with torch.no_grad():
        head.normal_(0, 0.25, generator=torch.Generator().manual_seed(0))
        head -= 0.25 * target.get_input_embeddings().weight
        # Half of the best logit is not the best: the text stays printable.
        likely = head[printable]
        head[~printable] = 0.5 * likely[ids[~printable] % len(likely)]
        for name, weight in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(3.0)
    target.save_pretrained(folder)
    AutoTokenizer.from_pretrained(pair.target).save_pretrained(folder)
    return folder


def knowing_draft(target_folder: Path, folder: Path) -> Path:
    """Train a draft on one batch of texts until it knows them; return its folder.

    The batch is the whole corpus, and the same texts are the held-out ones: what training says of
    them can be compared with decoding. They lie in `texts`.
    """
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    target.requires_grad_(False)
    shape = DraftSettings(num_layers=2, block_size=KNOWN_BLOCK, target_layer_ids=(0, 1, 2))
    config = draft_config_json(target, AutoTokenizer.from_pretrained(target_folder), shape)
    loop = LoopSettings(
        steps=_KNOWN_STEPS,
        texts_per_batch=_KNOWN_TEXTS,
        anchors_per_text=16,
        learning_rate=4e-3,
        position_decay=1e6,  # all positions matter alike here
        dtype="float32",
        eval_every=_KNOWN_STEPS // 5,  # the last loss is then that of the last fifth
        checkpoint_every=_KNOWN_STEPS,
    )
    trainer = Trainer(
        new_draft(config, target, seed=0, from_target_layers=False),
        embedding_of(target),
        head_of(target),
        _known_corpus(target, folder / "texts"),
        Settings(draft=shape, train=loop),
        config,
        Rank(0, 1, torch.device("cpu")),
    )
    trainer.run(folder, folder, quiet=True)
    return folder


def _known_corpus(target: object, folder: Path) -> Corpus:
    """Write the known texts, each twice: once to learn, once as held out."""
    texts = answer(
        target,  # type: ignore[arg-type]
        known_prompts(),
        [0.0] * _KNOWN_TEXTS,
        Capture(layer_ids=(0, 1, 2)),
        max_new_tokens=KNOWN_TOKENS,
        top_k=1,
        stop_ids=frozenset(),
        generator=torch.Generator().manual_seed(0),
    )
    infos, row = [], 0
    for held_out in (False, True):
        for text in texts:
            length = len(text.tokens)
            infos.append(TextInfo(0, row, length, text.start, 0.0, held_out, "known"))
            row += length
    folder.mkdir(parents=True)
    write_shard(shard_path(folder, 0), [*texts, *texts], infos)
    return Corpus(folder)
