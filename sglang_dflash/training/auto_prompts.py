# SPDX-License-Identifier: Apache-2.0
"""Prompts that the target makes up itself: a user's turn that it completes."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from sglang_dflash.files import whole_file
from sglang_dflash.training.answers import answer
from sglang_dflash.training.captured import Capture
from sglang_dflash.training.prompts import AUTO, Prompt, prompt_tokens
from sglang_dflash.training.settings import DataSettings, SettingsError
from sglang_dflash.training.target import stop_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["auto_file", "auto_prompts", "generator_for", "known_auto_prompts"]

_TEMPERATURE, _MAX_TOKENS = 1.0, 128
_SENTINEL = "\u2042prompt\u2042"  # finds where the user's text stands in the chat template


def auto_file(folder: Path) -> Path:
    """Return where the prompts of a folder of texts are kept."""
    return folder / "auto-prompts.json"


def known_auto_prompts(folder: Path) -> list[str]:
    """Return the prompts that a folder of texts has so far, empty ones among them."""
    path = auto_file(folder)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def auto_prompts(
    folder: Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    number: int,
    *,
    quiet: bool = False,
) -> list[Prompt]:
    """Return prompts that the target made up, those of an earlier run first.

    Args:
        folder: Where they are kept.
        target: Who makes them up.
        tokenizer: Its tokenizer.
        settings: With the beginnings that it completes.
        number: How many; empty ones are left out afterwards.
        quiet: No progress bar.

    Raises:
        SettingsError: nothing tells the target to begin.
    """
    path = auto_file(folder)
    made = known_auto_prompts(folder)
    stops = stop_tokens(target, tokenizer)
    starts = settings.auto_starts
    with tqdm(total=number, desc="prompts", unit="prompt", disable=quiet) as bar:
        bar.update(len(made))
        while len(made) < number:
            count = min(settings.batch_size, number - len(made))
            chosen = [starts[(len(made) + i) % len(starts)] for i in range(count)]
            texts = answer(
                target,
                [_user_turn(start, tokenizer, settings) for start in chosen],
                [_TEMPERATURE] * count,
                Capture(),
                max_new_tokens=_MAX_TOKENS,
                top_k=settings.top_k,
                stop_ids=stops,
                generator=generator_for(settings.seed, 1, len(made)),
            )
            for start, text in zip(chosen, texts, strict=True):
                answered = text.tokens[text.start :].tolist()
                words = str(tokenizer.decode(answered, skip_special_tokens=True))
                made.append((start + words).strip())
            bar.update(count)
            with whole_file(path) as unfinished:
                unfinished.write_text(json.dumps(made), encoding="utf-8")
    return [Prompt(AUTO, text) for text in made[:number] if text]


def generator_for(seed: int, purpose: int, number: int) -> torch.Generator:
    """Return a generator that a place in the work owns, so that resuming needs no state."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _user_turn(start: str, tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> list[int]:
    """Return the target's input up to a user's turn that has only begun."""
    if tokenizer.chat_template is not None:
        whole = prompt_tokens(_SENTINEL, tokenizer, settings)
        before = str(tokenizer.decode(whole)).split(_SENTINEL)[0]
        return list(tokenizer(before + start, add_special_tokens=False)["input_ids"])
    tokens = list(tokenizer(start)["input_ids"])
    if not tokens and tokenizer.bos_token_id is None:
        raise SettingsError(
            f"--prompts {AUTO}: the target has neither a chat template nor a token that begins a "
            "text: give data.auto_starts, or prompts in a file"
        )
    return tokens or [tokenizer.bos_token_id]
