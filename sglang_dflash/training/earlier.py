# SPDX-License-Identifier: Apache-2.0
"""The draft that another one goes on from: what it decides, and what may differ."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_dflash.draft.checkpoint import read_draft_config
from sglang_dflash.errors import UnsupportedCheckpoint, draft_given_as
from sglang_dflash.training.settings import NEW_DRAFT, DraftSettings, SettingsError

if TYPE_CHECKING:
    from sglang_dflash.draft.config import DraftConfig

__all__ = ["check_alike", "earlier_sizes", "named_as_start", "read_earlier", "settled"]

logger = logging.getLogger(__name__)

# What may change between a draft and one that goes on from it: no weight depends on it.
_FREE_OF_THE_START = frozenset(
    {"source", "architecture", "block_size", "dtype", "mask_token"}
    | {"max_position_embeddings", "num_target_layers", "selector_top_k"}
    # What a row sees has no weights: a trained draft loses little to a window, and learns it.
    | {"sliding_windows", "causal"}
)
# What a draft may get that goes on from one without.
_ADDED = frozenset({"selector_rank", "conv_kernel_size", "conv_group_size"})


def read_earlier(settings: DraftSettings) -> DraftConfig | None:
    """Return what the draft is that the settings start from, or None for a new one.

    Raises:
        SettingsError: it is no DFlash draft, or the settings contradict it.
    """
    if settings.init_from_draft is None:
        return None
    with named_as_start():
        earlier = read_draft_config(settings.init_from_draft)
    stated = {name: value for name, value in vars(settings).items() if value is not None}
    check_alike(stated, earlier, settings.init_from_draft)
    added = (settings.num_layers or earlier.num_layers) - earlier.num_layers
    if added:
        logger.info(
            "%d layers are added to the %d of %s",
            added,
            earlier.num_layers,
            settings.init_from_draft,
        )
    return earlier


@contextmanager
def named_as_start() -> Iterator[None]:
    """Name the setting, not a server's option, where an earlier draft cannot be read.

    Raises:
        SettingsError: in place of UnsupportedCheckpoint.
    """
    try:
        with draft_given_as("draft.init_from_draft"):
            yield
    except UnsupportedCheckpoint as error:
        raise SettingsError(str(error)) from error


def settled(settings: DraftSettings, earlier: DraftConfig | None) -> DraftSettings:
    """Return the settings with what they leave open, as far as it is no target's matter.

    Args:
        settings: Of the draft.
        earlier: The draft that it goes on from, which decides; None for a new one.

    Raises:
        SettingsError: what is stated does not fit what was open.
    """
    found = dict(NEW_DRAFT)
    if earlier is not None:
        windows = earlier.sliding_windows
        own = {
            **vars(earlier),
            "sliding_layers": tuple(i for i, each in enumerate(windows) if each is not None),
            "sliding_window": next((each for each in windows if each is not None), None),
        }
        # A part that it lacks has no size there.
        found |= {name: own[name] for name in NEW_DRAFT if own[name]}
    if settings.sliding_layers == ():
        found["sliding_window"] = None
    is_open = [name for name in found if getattr(settings, name) is None]
    return dataclasses.replace(settings, **{name: found[name] for name in is_open})


def earlier_sizes(earlier: DraftConfig) -> dict[str, Any]:
    """Return the keys of config.json by which a draft has the shape of an earlier one."""
    sizes = {
        "hidden_size": earlier.hidden_size,
        "intermediate_size": earlier.intermediate_size,
        "num_attention_heads": earlier.num_heads,
        "num_key_value_heads": earlier.num_kv_heads,
        "head_dim": earlier.head_dim,
        "rms_norm_eps": earlier.rms_norm_eps,
        "rope_theta": earlier.rope_theta,
        "attention_bias": earlier.attention_bias,
    }
    scaling = dict(earlier.rope_scaling or {})
    if earlier.rotary_dim != earlier.head_dim:
        scaling["rope_dim"] = earlier.rotary_dim
    if scaling:
        sizes["rope_scaling"] = scaling
    if not earlier.rope_is_neox_style:
        sizes["rope_is_neox_style"] = False
    if earlier.causal != tuple(window is not None for window in earlier.sliding_windows):
        sizes["is_causal"] = earlier.causal[0]  # stated for all layers, then
    return sizes


def check_alike(own: Mapping[str, Any], earlier: DraftConfig, folder: str) -> None:
    """Refuse a draft to which an earlier one's weights do not belong.

    Args:
        own: Of the draft or its settings, under the names of `DraftConfig`; others are left alone.
        earlier: The earlier draft.
        folder: Where that is, for the message.

    Raises:
        SettingsError: naming all that differs.
    """
    found = dataclasses.asdict(earlier)
    differing = [
        name
        for name, value in found.items()
        if name in own and own[name] != value and not _may_change(name, own[name], found)
    ]
    if not differing:
        return
    said = ", ".join(f"{name} ({found[name]!r}, now {own[name]!r})" for name in differing)
    can_be_stated = {each.name for each in dataclasses.fields(DraftSettings)}
    way_out = (
        "leave these settings out to have its own, or start from another draft"
        if can_be_stated.issuperset(differing)
        else "training cannot go on from such a draft; start from another"
    )
    raise SettingsError(f"draft.init_from_draft: {folder} has another {said}: {way_out}")


def _may_change(name: str, value: Any, found: dict[str, Any]) -> bool:
    """Whether a draft with another value may go on from one with these."""
    if name == "num_layers":  # more of them can begin without effect
        return value > found[name]
    if name == "vocab_size":  # codebooks have a row for each token
        return not found["selector_rank"]
    if name == "mask_token_id":
        return found[name] is None
    return name in _FREE_OF_THE_START or (name in _ADDED and not found[name])
