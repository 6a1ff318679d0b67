# SPDX-License-Identifier: Apache-2.0
"""Texts on disk: some hundreds a safetensors file, read row by row from the mapped file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_dflash.files import whole_file
from sglang_dflash.training.captured import Text

__all__ = ["Corpus", "TextInfo", "manifest_path", "read_manifest", "shard_path", "write_shard"]

_TENSORS = ("tokens", "features", "law_ids", "law_logprobs")


class TextInfo(NamedTuple):
    """What is known of a stored text without reading it.

    Attributes:
        shard: Number of its file.
        first: Its first row in the file.
        length: T, its tokens.
        start: Position of the answer's first token.
        temperature: The answer was decoded at.
        held_out: Whether it is kept for measuring.
        kind: Where its prompt is from.
    """

    shard: int
    first: int
    length: int
    start: int
    temperature: float
    held_out: bool
    kind: str


def manifest_path(folder: Path) -> Path:
    """Return where a folder says how its texts are made."""
    return folder / "manifest.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what a folder says of how its texts are made; nothing where it does not."""
    path = manifest_path(folder)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def shard_path(folder: Path, number: int) -> Path:
    """Return where a shard lies."""
    return folder / f"texts-{number:05d}.safetensors"


def write_shard(path: Path, texts: list[Text], infos: list[TextInfo]) -> None:
    """Write some texts to one file, which is there whole or not at all.

    Args:
        path: The file.
        texts: Any number; a shard whose answers were all too short has none.
        infos: One a text; `first` and `shard` are those that `Corpus` will state.
    """
    rows = {name: [getattr(text, name) for text in texts] for name in _TENSORS}
    tensors = {name: torch.cat(found) if found else torch.empty(0) for name, found in rows.items()}
    with whole_file(path) as unfinished:
        save_file(tensors, unfinished, metadata={"texts": json.dumps(infos)})


class Corpus:
    """All texts of some folders of shards.

    Attributes:
        infos: One a text, in the order of folders and shards; `shard` counts through the folders.
        prompts_sha256: Of each folder's prompts; None where it does not say.
    """

    def __init__(self, *folders: Path) -> None:
        paths = [path for each in folders for path in sorted(each.glob("texts-*.safetensors"))]
        self.prompts_sha256 = [read_manifest(each).get("prompts_sha256") for each in folders]
        self._files = [safe_open(path, framework="pt") for path in paths]
        self.infos = [
            TextInfo(*stated)._replace(shard=number)
            for number, file in enumerate(self._files)
            for stated in json.loads(file.metadata()["texts"])
        ]

    def split(self, *, held_out: bool) -> list[int]:
        """Return the numbers of the texts to measure on, or of those to train on."""
        return [i for i, info in enumerate(self.infos) if info.held_out == held_out]

    def read(self, number: int) -> Text:
        """Return a text by its number."""
        info = self.infos[number]
        rows = slice(info.first, info.first + info.length)
        file = self._files[info.shard]
        parts = {name: file.get_slice(name)[rows] for name in _TENSORS}
        return Text(start=info.start, **parts)

    def vocabulary(self, numbers: list[int]) -> torch.Tensor:
        """Return the tokens that occur in some texts, rising, [V'] int64."""
        slices = [file.get_slice("tokens") for file in self._files]
        infos = [self.infos[number] for number in numbers]
        seen = [slices[i.shard][i.first : i.first + i.length] for i in infos]
        return torch.cat(seen).unique().to(torch.int64)
