# SPDX-License-Identifier: Apache-2.0
"""A target's sizes, and rows of its embedding and output head, read from its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from sglang_dflash.draft.checkpoint import local_folder
from sglang_dflash.errors import UnsupportedCheckpoint

__all__ = ["TargetFiles", "first_difference"]

_OPTION = "TARGET"
_CHUNK_ROWS = 4096  # read and compared at a time
_DENSE = ("F16", "BF16", "F32")
_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"
# Where models for text alone and for images too keep them.
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")
# Config keys by which a target scales its embeddings outside the weight.
_SCALES = ("embedding_multiplier", "scale_emb")


class TargetFiles(NamedTuple):
    """A target, as its config.json describes it.

    Attributes:
        source: A folder or a Hub id.
        hidden_size: H.
        vocab_size: V.
        num_layers: Its decoder layers.
        is_tied: Whether the output head is the embedding.
    """

    source: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    is_tied: bool

    @classmethod
    def read(cls, source: str) -> TargetFiles:
        """Return what a target's config.json says.

        Args:
            source: A folder, or a Hub id, of which the config alone is fetched.

        Raises:
            UnsupportedCheckpoint: there is none that transformers can load, or the target scales
                its embeddings.
        """
        from transformers import AutoConfig

        folder = local_folder(source, ["*.json"], option=_OPTION)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise UnsupportedCheckpoint(
                f"{_OPTION} {source}: its config.json cannot be read ({error}). Give the folder "
                "or the Hub id of the target."
            ) from error
        text = config.get_text_config()
        _refuse_scaled(text, source)
        sizes = {key: getattr(text, key, None) for key in _SIZES}
        missing = [key for key, value in sizes.items() if type(value) is not int]
        if missing:
            raise UnsupportedCheckpoint(
                f"{_OPTION} {source}: its config.json has no {', '.join(missing)}. Give the "
                "folder or the Hub id of the target."
            )
        # Models for images too state it beside their text's config, or in it.
        tied = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
        return cls(source, *sizes.values(), is_tied=bool(tied))

    @contextmanager
    def rows(self, name: str) -> Iterator[Any]:
        """Yield the rows of `embed_tokens.weight` or `lm_head.weight`, to be read by slices.

        Args:
            name: Which of the two; where they are tied, both are the embedding.

        Yields:
            safetensors' slice of [V, H].

        Raises:
            UnsupportedCheckpoint: it is not there, is quantised, or has another shape.
        """
        stored_name, file = self._place(_EMBED if self.is_tied else name)
        with self._open(file) as stored:
            rows = stored.get_slice(stored_name)
            shape, dtype = list(rows.get_shape()), rows.get_dtype()
            if dtype not in _DENSE or shape != [self.vocab_size, self.hidden_size]:
                raise UnsupportedCheckpoint(
                    f"{_OPTION} {self.source}: {stored_name} is {dtype} {shape}, expected "
                    f"{' or '.join(_DENSE)} [{self.vocab_size}, {self.hidden_size}] to compare "
                    "the draft's copy with: give the target before it was quantised or resized."
                )
            yield rows

    def _place(self, name: str) -> tuple[str, Path]:
        """Return a weight's full name and the file that holds it."""
        wanted = [prefix + name for prefix in _PREFIXES]
        places = self._places(wanted)
        for full in wanted:
            if full in places:
                return full, places[full]
        raise UnsupportedCheckpoint(
            f"{_OPTION} {self.source}: has no {name} in its safetensors to compare the draft's "
            "copy with: give the target as published, in safetensors."
        )

    def _places(self, wanted: list[str]) -> dict[str, Path]:
        """Return the files of those weights that are there; of a Hub's, no others are fetched."""
        folder = local_folder(self.source, ["*.json"], option=_OPTION)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                found = {name: str(names[name]) for name in wanted if name in names}
            except (ValueError, KeyError, TypeError) as error:
                raise self._damaged(index, error) from error
            folder = local_folder(self.source, [*found.values(), "*.json"], option=_OPTION)
            return {name: folder / file for name, file in found.items()}
        folder = local_folder(self.source, ["*.json", "*.safetensors"], option=_OPTION)
        places = {}
        for file in sorted(folder.glob("*.safetensors")):
            with self._open(file) as stored:
                places |= dict.fromkeys(stored.keys(), file)
        return places

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise self._damaged(file, error) from error

    def _damaged(self, file: Path, error: Exception) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(
            f"{_OPTION} {self.source}: {file.name} cannot be read ({error!r}). Download the target "
            "again."
        )


def first_difference(copy: Any, rows: Any, tokens: torch.Tensor) -> int | None:
    """Return the first row of a draft's copy that is not the target's, or None.

    They are compared in the copy's type, into which the target's rows were cast for it.

    Args:
        copy: safetensors' slice of [k, H].
        rows: The target's, of [V, H].
        tokens: [k] int64, the target's row that each row of the copy is of.
    """
    for start in range(0, len(tokens), _CHUNK_ROWS):
        ids = tokens[start : start + _CHUNK_ROWS]
        part = copy[start : start + len(ids)]
        first = int(ids.min())
        own = rows[first : int(ids.max()) + 1][ids - first]
        differs = (own.to(part.dtype) != part).any(dim=1)
        if differs.any():
            return start + int(differs.nonzero()[0])
    return None


def _refuse_scaled(text: Any, source: str) -> None:
    scaled = [key for key in _SCALES if getattr(text, key, None) not in (None, 1, 1.0)]
    if scaled or str(text.model_type).startswith("gemma"):
        raise UnsupportedCheckpoint(
            f"{_OPTION} {source}: it scales its embeddings ({', '.join(scaled) or text.model_type})"
            ", and no source says whether its drafts in the speculators format were trained with "
            "that. Serve this draft with vLLM."
        )
