# SPDX-License-Identifier: Apache-2.0
"""Token maps: proposals from the tokens that texts are made of.

The head is most of a small draft's work. Most tokens of a vocabulary hardly ever occur, so the
draft does well to choose among the others alone (FR-Spec, arXiv 2502.14856). Exact all the same:
what is never proposed is still drawn by the target.

`--speculative-token-map FILE` names a map, in SGLang's format; a draft's folder may hold its own.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch

from sglang_dflash.errors import DRAFT_OPTION, UnsupportedCheckpoint
from sglang_dflash.files import whole_file

__all__ = [
    "TOKEN_MAP_FILE",
    "own_token_map",
    "read_token_map",
    "token_map_of",
    "write_token_map",
]

TOKEN_MAP_FILE = "token_map.pt"

_FLAG = "--speculative-token-map"
_UNREADABLE = (OSError, EOFError, ValueError, TypeError, RuntimeError, UnpicklingError)


def token_map_of(folder: Path, stated: str | None) -> str | None:
    """Return which token map serves: the option's, else the one in the draft's folder, else none.

    Args:
        folder: the draft's, local.
        stated: `--speculative-token-map`.
    """
    own = folder / TOKEN_MAP_FILE
    return stated or (str(own) if own.is_file() else None)


def own_token_map(folder: Path) -> torch.Tensor | None:
    """Return the map that `write_token_map` left in a draft's folder, [k] int64, or None.

    Raises:
        UnsupportedCheckpoint: the file cannot be read.
    """
    path = folder / TOKEN_MAP_FILE
    if not path.is_file():
        return None
    try:
        return torch.tensor(torch.load(path, weights_only=True))
    except _UNREADABLE as error:
        raise UnsupportedCheckpoint(
            f"{folder}: its {TOKEN_MAP_FILE} holds no list of token ids ({error}). Download the "
            "draft again.",
            option=DRAFT_OPTION,
        ) from error


def write_token_map(folder: Path, tokens: torch.Tensor) -> None:
    """Leave a map of [k] token ids in a draft's folder."""
    with whole_file(folder / TOKEN_MAP_FILE) as unfinished:
        torch.save(tokens.tolist(), unfinished)


def read_token_map(path: str, vocab_size: int, option: str = _FLAG) -> torch.Tensor:
    """Return the tokens that may be proposed, [k] int64, rising, none twice.

    Args:
        path: a file that `torch.save` wrote, holding token ids; SGLang's format, or its place on
            the hub.
        vocab_size: V.
        option: by which it was given: with a draft that has one, the draft's.

    Raises:
        ValueError: the file cannot be read, or holds others than tokens of the vocabulary.
    """
    from sglang.srt.speculative.spec_utils import load_token_map

    try:
        tokens = load_token_map(path).flatten()
    except _UNREADABLE as error:
        raise ValueError(
            f"{option} {path}: no list of token ids can be read from it ({error}); it is what "
            f"torch.save wrote, as `sglang-dflash train` leaves {TOKEN_MAP_FILE} beside a draft"
        ) from error
    tokens = tokens.unique()
    if not len(tokens) or tokens[0] < 0 or tokens[-1] >= vocab_size:
        found = f"{int(tokens[0])} to {int(tokens[-1])}" if len(tokens) else "none"
        raise ValueError(
            f"{option} {path}: expected token ids from 0 to {vocab_size - 1}, found {found}; it "
            "may be another model's"
        )
    return tokens
