# SPDX-License-Identifier: Apache-2.0
"""The state that a run resumes from, and the draft that it leaves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file

from sglang_dflash.draft.checkpoint import draft_folder
from sglang_dflash.draft.token_map import own_token_map, write_token_map
from sglang_dflash.files import whole_file
from sglang_dflash.training.earlier import named_as_start
from sglang_dflash.training.settings import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_dflash.training.model import BlockDraft
    from sglang_dflash.training.optimizers import Optimizers

__all__ = [
    "ALL_BATCHES",
    "Resumed",
    "export_draft",
    "known_tokens",
    "load_state",
    "save_state",
    "state_path",
]

# Of an identity, in the section train: the batches of a step, which several processes share.
ALL_BATCHES = "accumulate x processes"
_LATER = (ALL_BATCHES, "prompts_sha256")  # runs are resumed that began before these were there


class Resumed(NamedTuple):
    """Where a run stopped.

    Attributes:
        step: Steps that were done.
        metrics: What was summed up since the last measurement.
    """

    step: int
    metrics: dict[str, Any]


def state_path(folder: Path) -> Path:
    """Return where a run's state is kept."""
    return folder / "state.pt"


def save_state(
    folder: Path,
    draft: BlockDraft,
    optimizer: Optimizers,
    resumed: Resumed,
    identity: dict[str, Any],
) -> None:
    """Write the state in place of the last one; a kill leaves one or the other.

    There is no state of random generators: order and anchors are functions of a batch's number.
    """
    state = {
        "draft": draft.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": resumed.step,
        "metrics": resumed.metrics,
        "identity": json.dumps(identity, sort_keys=True),
    }
    with whole_file(state_path(folder)) as unfinished:
        torch.save(state, unfinished)


def load_state(
    folder: Path, draft: BlockDraft, optimizer: Optimizers, identity: dict[str, Any]
) -> Resumed:
    """Fill draft and optimizer with a run's state; return where it stopped.

    Raises:
        SettingsError: there is none, or it is of a run with other settings.
    """
    path = state_path(folder)
    if not path.exists():
        raise SettingsError(f"--resume: {path} is not there; leave the option out to begin")
    device = next(draft.parameters()).device
    state = torch.load(path, map_location=device, weights_only=True)
    differing = _differing(json.loads(state["identity"]), identity)
    if differing:
        raise SettingsError(
            f"--resume: {path} is of a run with another {', '.join(differing)}: restore these "
            "settings, or begin anew in another folder"
        )
    draft.load_state_dict(state["draft"])
    optimizer.load_state_dict(state["optimizer"])
    return Resumed(state["step"], state["metrics"])


def _differing(found: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Return what a state and this run do not have alike, in words."""
    differing = []
    for section, values in identity.items():
        known = found.get(section, {})
        for key, value in values.items():
            is_replaced = key == "accumulate" and ALL_BATCHES in known
            is_unknown = key in _LATER and key not in known
            if not is_replaced and not is_unknown and known.get(key) != value:
                differing.append(f"{section}.{key} ({known.get(key)!r}, now {value!r})")
    return differing


def known_tokens(seen: torch.Tensor, earlier: str | None) -> torch.Tensor | None:
    """Return the tokens that a draft has learnt to propose; None where that may be any.

    Args:
        seen: [k] int64, of its texts.
        earlier: The draft that it goes on from, a folder or a Hub id; None where it is new.

    Returns:
        [k'] int64: those seen, and those in the earlier draft's map; without a map, None.
    """
    if earlier is None:
        return seen
    with named_as_start():
        own = own_token_map(draft_folder(earlier))
    return None if own is None else torch.cat([seen, own]).unique()


def export_draft(
    folder: Path, draft: BlockDraft, config: dict[str, Any], tokens: torch.Tensor | None
) -> None:
    """Write a draft that SGLang serves.

    Args:
        folder: Of config.json, model.safetensors and the token map.
        draft: The weights, written in the type that the config names.
        config: The config.json.
        tokens: [k] int64, from `known_tokens`; None writes no token map.
    """
    dtype = getattr(torch, config["dtype"])
    weights = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    with whole_file(folder / "model.safetensors") as unfinished:
        save_file(weights, unfinished, metadata={"format": "pt"})
    text = json.dumps(config, indent=1) + "\n"
    with whole_file(folder / "config.json") as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    if tokens is not None:
        write_token_map(folder, tokens)
