# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings as a checkpoint's config.json states them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang_dflash.errors import UnsupportedCheckpoint

__all__ = ["RopeSettings", "rope_unsupported_reason"]

# Per scaling type: the keys that must be there, and those that may be. Both SGLang and
# transformers read exactly these, with the same meaning.
_SCALING_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        ),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"beta_fast", "beta_slow", "truncate"}),
    ),
}
# With an explicit `rope_dim` these are leftovers copied from the target.
_SUPERSEDED_BY_ROPE_DIM = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})


@dataclass(frozen=True)
class RopeSettings:
    """Base, scaling and width of a checkpoint's rotary embedding.

    Attributes:
        theta: The base.
        scaling: `{"rope_type": ..., ...}` for linear, llama3 or yarn; None for the plain form.
        rotary_dim: Leading channels of a head that rotate, or None for all of them.
    """

    theta: float
    scaling: dict[str, Any] | None
    rotary_dim: int | None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> RopeSettings:
        """Return the settings of a config.json, in its transformers 4 or 5 spelling.

        Args:
            config: The parsed config.json.

        Raises:
            UnsupportedCheckpoint: `rope_unsupported_reason(config)` gives a reason.
        """
        reason = rope_unsupported_reason(config)
        if reason is not None:
            raise UnsupportedCheckpoint(reason)
        stated = _stated(config)
        rope_dim = stated.pop("rope_dim", None)
        theta = stated.pop("rope_theta", config.get("rope_theta"))
        # Leftovers of the target beside `rope_dim`, or a factor of 1.
        stated = {k: v for k, v in stated.items() if k not in _SUPERSEDED_BY_ROPE_DIM}
        scaling = stated if stated.get("rope_type", "default") != "default" else None
        return cls(float(theta if theta is not None else 10000.0), scaling, rope_dim)


def rope_unsupported_reason(config: dict[str, Any]) -> str | None:
    """Return in one line why a config's rotary embedding cannot be honoured, or None.

    Args:
        config: The parsed config.json.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, dict):
            return f"{key} is {config[key]!r}, expected an object"
    stated = _stated(config)
    nested = [key for key, value in stated.items() if isinstance(value, dict)]
    if nested:
        return f"rope_parameters differ by layer type ({', '.join(nested)})"
    return _theta_reason(config, stated) or _width_reason(config, stated) or _scaling_reason(stated)


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """Return rope_parameters (v5) or rope_scaling (v4), its type under `rope_type`."""
    stated = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    legacy_type = stated.pop("type", None)
    if legacy_type is not None:
        stated.setdefault("rope_type", legacy_type)
    return {key: value for key, value in stated.items() if value is not None}


def _theta_reason(config: dict[str, Any], stated: dict[str, Any]) -> str | None:
    thetas = [source.get("rope_theta") for source in (stated, config)]
    thetas = [theta for theta in thetas if theta is not None]
    if not all(map(_is_positive, thetas)):
        return f"rope_theta is {thetas!r}, expected a number above 0"
    if len(set(thetas)) > 1:
        return f"rope_theta is {config['rope_theta']} but {thetas[0]} in rope_parameters"
    return None


def _width_reason(config: dict[str, Any], stated: dict[str, Any]) -> str | None:
    rope_dim, head_dim = stated.get("rope_dim"), config.get("head_dim")
    if rope_dim is None:
        if config.get("partial_rotary_factor") in (None, 1):
            return None
        return (
            f"partial_rotary_factor {config['partial_rotary_factor']} without rope_dim: "
            "trainers ignore it and servers do not, so the trained width is unknown"
        )
    if type(rope_dim) is not int or rope_dim < 2 or rope_dim % 2:
        return f"rope_dim is {rope_dim!r}, expected an even number of channels"
    if type(head_dim) is not int or rope_dim > head_dim:
        return f"rope_dim is {rope_dim}, more than head_dim {head_dim!r}"
    return None


def _scaling_reason(stated: dict[str, Any]) -> str | None:
    ignored = {"rope_type", "rope_theta", "rope_dim"}
    if "rope_dim" in stated:
        ignored |= _SUPERSEDED_BY_ROPE_DIM
    elif stated.get("partial_rotary_factor") == 1:
        ignored.add("partial_rotary_factor")
    keys = set(stated) - ignored
    kind = stated.get("rope_type", "default")
    if kind == "default":
        return f"rope keys {sorted(keys)} are unknown" if keys else None
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        return f"rope_type {kind!r} (supported: default, {', '.join(_SCALING_KEYS)})"
    required, optional = _SCALING_KEYS[kind]
    if required - keys:
        return f"rope_type {kind!r} lacks {sorted(required - keys)}"
    if keys - required - optional:
        return f"rope_type {kind!r} with unknown keys {sorted(keys - required - optional)}"
    wrong = {
        key: stated[key]
        for key in keys
        if not (isinstance(stated[key], bool) if key == "truncate" else _is_positive(stated[key]))
    }
    return f"rope_type {kind!r} with values that are no such numbers: {wrong}" if wrong else None


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
