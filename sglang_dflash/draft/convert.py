# SPDX-License-Identifier: Apache-2.0
"""A draft in the speculators format, rewritten in z-lab's layout, which the plugin and SGLang read.

`draft/speculators.py` has the rules of the config.json. Those of the weights, with its names for
the sources:

- They have z-lab's names (S `models/dflash/core.py`, V `model_executor/models/qwen3_dflash.py`).
- `embed_tokens` and `lm_head` are the target's, frozen in training (S `model.py`), and left out of
  newer checkpoints where the target has them as they are (S `models/dflash/core.py`, speculators
  PR 962). A draft served here borrows both from its target: whatever is stored is compared with it.
- Of a pruned vocabulary, row i of `lm_head` is the target's row `i + d2t[i]` (V `qwen3_dflash.py`),
  and `t2d` marks these rows (S `model.py`). It becomes a token map.
- `verifier_norm` and `verifier_lm_head` serve training alone (S `models/dflash/core.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_dflash.draft.checkpoint import draft_folder
from sglang_dflash.draft.checks import check_target
from sglang_dflash.draft.config import DraftConfig, read_config
from sglang_dflash.draft.schema import MASK_SIDECAR
from sglang_dflash.draft.speculators import read_speculator
from sglang_dflash.draft.target_rows import TargetFiles, first_difference
from sglang_dflash.draft.token_map import write_token_map
from sglang_dflash.draft.weights import (
    BORROWED,
    canonical_weight_name,
    check_weights,
    expected_weights,
    read_weight_shapes,
    weight_files,
)
from sglang_dflash.errors import UnsupportedCheckpoint, draft_given_as
from sglang_dflash.files import place_problem

if TYPE_CHECKING:
    from sglang_dflash.draft.speculators import Speculator

__all__ = ["Conversion", "convert_draft"]

_TO_TARGET, _FROM_TARGET = "d2t", "t2d"
_TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
_BESIDES = (*BORROWED, *_TRAINING_ONLY, _TO_TARGET, _FROM_TARGET)
_DENSE = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)


class Conversion(NamedTuple):
    """What was written.

    Attributes:
        config: The draft, as it is read from there.
        num_tokens: Tokens of its token map, or None where it may propose any.
        compared: Weights that were found to be the target's.
        verifier: Name of the target that it was trained for, or None where not stated.
    """

    config: DraftConfig
    num_tokens: int | None
    compared: tuple[str, ...]
    verifier: str | None

    def as_json(self) -> dict[str, Any]:
        """Return what the command prints, as plain data."""
        config = self.config
        return {
            "verifier": self.verifier,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "sliding_windows": list(config.sliding_windows),
            "causal": list(config.causal),
            "tokens": "all" if self.num_tokens is None else self.num_tokens,
            "same_as_target": list(self.compared),
        }


@draft_given_as("DRAFT")
def convert_draft(draft: str, target: str, out: Path) -> Conversion:
    """Write a draft in the speculators format in z-lab's layout.

    All is checked before anything is written.

    Args:
        draft: Its folder or Hub id.
        target: The folder or Hub id of the target that it will serve.
        out: The folder to write, new or empty.

    Raises:
        UnsupportedCheckpoint: `read_speculator` refuses it, the target contradicts it, its weights
            are others than its config.json asks for, its embedding or head differ from the
            target's, or `out` holds something or cannot be written.
    """
    _check_out(out)
    read = read_speculator(read_config(draft_folder(draft)), source=draft)
    files = TargetFiles.read(target)
    config = DraftConfig.from_dict(read.config, source=draft)
    check_target(
        config,
        target_hidden_size=files.hidden_size,
        target_vocab_size=files.vocab_size,
        target_num_layers=files.num_layers,
        tp_size=1,
        target="TARGET",
    )
    stored = _Stored(draft_folder(draft, weights=True), f"DRAFT {draft}")
    weights = stored.weights(config)
    tokens = stored.tokens(read.draft_vocab_size, files.vocab_size)
    compared = stored.compare(files, tokens)
    is_pruned = len(tokens) < files.vocab_size
    _write(out, _config_json(read, files, weights), weights, tokens if is_pruned else None)
    written = DraftConfig.from_pretrained(out)
    return Conversion(written, len(tokens) if is_pruned else None, compared, read.verifier)


class _Stored:
    """The tensors of a folder in the speculators format."""

    def __init__(self, folder: Path, source: str) -> None:
        if (folder / MASK_SIDECAR).exists():
            raise UnsupportedCheckpoint(
                f"{source}: {MASK_SIDECAR}: a mask embedding of its own, and drafts take their "
                "target's. Serve this one with vLLM."
            )
        self._source = source
        self._shapes = read_weight_shapes(folder)
        self._places: dict[str, tuple[Path, str]] = {}
        for file in weight_files(folder):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    self._places[canonical_weight_name(name) or name] = (file, name)

    def weights(self, config: DraftConfig) -> dict[str, torch.Tensor]:
        """Return name -> tensor of the draft proper, each as `expected_weights` has it."""
        own = {n: s for n, s in self._shapes.items() if canonical_weight_name(n) not in _BESIDES}
        check_weights(own, config, config.source)
        weights = {name: self._tensor(name) for name in expected_weights(config)}
        packed = {str(w.dtype) for w in weights.values() if w.dtype not in _DENSE}
        if packed:
            raise UnsupportedCheckpoint(
                f"{self._source}: weights in {', '.join(sorted(packed))}, which is quantised. "
                "Convert the draft before it was quantised."
            )
        return weights

    def tokens(self, num_tokens: int, vocab_size: int) -> torch.Tensor:
        """Return [k] int64, the token that each row of the draft's output head stands for."""
        if _TO_TARGET not in self._places:
            if num_tokens != vocab_size:
                raise UnsupportedCheckpoint(
                    f"{self._source}: draft_vocab_size is {num_tokens} of {vocab_size} tokens, and "
                    f"{_TO_TARGET}, which says which, is missing. Download the draft again."
                )
            return torch.arange(vocab_size)
        offsets = self._tensor(_TO_TARGET)
        if offsets.dtype not in _INTEGERS or list(offsets.shape) != [num_tokens]:
            raise UnsupportedCheckpoint(
                f"{self._source}: {_TO_TARGET} is {offsets.dtype} {list(offsets.shape)}, expected "
                f"whole numbers [{num_tokens}]. Download the draft again."
            )
        tokens = torch.arange(num_tokens) + offsets.long()
        is_within = num_tokens > 0 and tokens.min() >= 0 and tokens.max() < vocab_size
        if not is_within or len(tokens.unique()) != num_tokens or not self._agrees(tokens):
            raise UnsupportedCheckpoint(
                f"{self._source}: {_TO_TARGET} maps to no set of {num_tokens} of the target's "
                f"{vocab_size} tokens, or to another than {_FROM_TARGET}. Download the draft again."
            )
        return tokens

    def _agrees(self, tokens: torch.Tensor) -> bool:
        """Tell whether the map from the target's tokens marks the same ones, where there is one."""
        if _FROM_TARGET not in self._places:
            return True
        marked = self._tensor(_FROM_TARGET).nonzero().flatten()
        return torch.equal(marked, tokens.sort().values)

    def compare(self, target: TargetFiles, tokens: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the copies that are the target's; refuse those that are not.

        Args:
            target: Where its weights lie.
            tokens: [k] int64, of the rows of the output head.
        """
        embed, head = BORROWED
        if head not in self._places and len(tokens) < target.vocab_size:
            raise UnsupportedCheckpoint(
                f"{self._source}: {head} is missing, which drafts with a pruned vocabulary have. "
                "Download the draft again."
            )
        compared = []
        for name, ids in ((embed, torch.arange(target.vocab_size)), (head, tokens)):
            if name in self._places:
                self._compare(name, target, ids)
                compared.append(name)
        return tuple(compared)

    def _compare(self, name: str, target: TargetFiles, tokens: torch.Tensor) -> None:
        file, stored_name = self._places[name]
        with safe_open(file, "pt") as stored, target.rows(name) as rows:
            copy = stored.get_slice(stored_name)
            shape, wanted = list(copy.get_shape()), [len(tokens), target.hidden_size]
            if shape != wanted:
                raise UnsupportedCheckpoint(
                    f"{self._source}: {name} is {shape}, expected {wanted}. Use the draft made "
                    "for this target."
                )
            row = first_difference(copy, rows, tokens)
        if row is not None:
            raise UnsupportedCheckpoint(
                f"{self._source}: {name} differs from that of TARGET {target.source}, which drafts "
                f"borrow, first in row {row} (token {int(tokens[row])}): it was made for another "
                "target, or trained one of its own. Convert it for its own target, or serve it "
                "with vLLM."
            )

    def _tensor(self, name: str) -> torch.Tensor:
        file, stored_name = self._places[name]
        with safe_open(file, "pt") as stored:
            return stored.get_tensor(stored_name)


def _check_out(out: Path) -> None:
    if problem := place_problem(out):
        raise UnsupportedCheckpoint(f"OUT {out}: {problem}")
    if out.exists() and any(out.iterdir()):
        raise UnsupportedCheckpoint(f"OUT {out}: holds something; name a new or an empty folder.")


def _config_json(
    read: Speculator, target: TargetFiles, weights: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the config.json to write; `weights` are name -> tensor, as stored."""
    config = {key: value for key, value in read.config.items() if key != "torch_dtype"}
    config["dtype"] = str(weights["fc.weight"].dtype).removeprefix("torch.")
    return config | {"num_target_layers": target.num_layers}


def _write(
    out: Path,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    tokens: torch.Tensor | None,
) -> None:
    """Write a draft's folder, config.json last: without it, it is none."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    if tokens is not None:
        write_token_map(out, tokens.sort().values)
    text = json.dumps(config, indent=1, sort_keys=True) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
