# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings as a checkpoint's config.json states them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang_dflash.errors import UnsupportedCheckpoint

__all__ = ["RopeSettings", "amplitude", "rope_unsupported_reason", "sglang_scaling"]

# Per scaling type: the keys that must be there, and those that may be. Both SGLang and
# transformers read exactly these, with the same meaning (`sglang_scaling` translates one).
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
        frozenset(
            {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        ),
    ),
}
_PLACES = ("rope_parameters", "rope_scaling")  # transformers 5's and 4's
# Either alone is ignored by both.
_TOGETHER = {"mscale", "mscale_all_dim"}
_MROPE = frozenset({"mrope_interleaved", "mrope_section"})
# With an explicit `rope_dim` these are leftovers copied from the target.
_SUPERSEDED_BY_ROPE_DIM = _MROPE | {"partial_rotary_factor"}


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
        theta = next(iter(_thetas(config)), 10000.0)
        # Leftovers of the target beside `rope_dim`, or a factor of 1.
        ignored = _SUPERSEDED_BY_ROPE_DIM | {"rope_theta"}
        stated = {k: v for k, v in stated.items() if k not in ignored}
        scaling = stated if stated.get("rope_type", "default") != "default" else None
        return cls(float(theta), scaling, rope_dim)


def rope_unsupported_reason(config: dict[str, Any]) -> str | None:
    """Return in one line why a config's rotary embedding cannot be honoured, or None.

    Args:
        config: The parsed config.json.
    """
    for key in _PLACES:
        if not isinstance(config.get(key) or {}, dict):
            return f"{key} is {config[key]!r}, expected an object"
    twice = _twice_reason(config)
    if twice is not None:
        return twice
    stated = _stated(config)
    nested = [key for key, value in stated.items() if isinstance(value, dict)]
    if nested:
        return f"rope_parameters differ by layer type ({', '.join(nested)})"
    return _theta_reason(config) or _width_reason(config, stated) or _scaling_reason(stated)


def amplitude(scaling: dict[str, Any] | None) -> float:
    """Return the factor on cosine and sine: 1.0 except with yarn.

    Args:
        scaling: `RopeSettings.scaling`.

    Source: must equal the second value of transformers' `ROPE_INIT_FUNCTIONS`. Yarn is Peng et al.
        2023 (arXiv 2309.00071); the two `mscale` keys are DeepSeek-V2's (arXiv 2405.04434).
    """
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    growth = 0.1 * math.log(scaling["factor"]) if scaling["factor"] > 1 else 0.0
    if scaling.keys() >= _TOGETHER:
        return (scaling["mscale"] * growth + 1.0) / (scaling["mscale_all_dim"] * growth + 1.0)
    return growth + 1.0


def sglang_scaling(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a scaling as SGLang's `get_rope` takes it.

    Its `attn_factor` is a factor on the amplitude, transformers' `attention_factor` the amplitude.

    Args:
        scaling: `RopeSettings.scaling`.
    """
    if scaling is None or "attention_factor" not in scaling:
        return scaling
    rest = {key: value for key, value in scaling.items() if key != "attention_factor"}
    return rest | {"attn_factor": scaling["attention_factor"] / amplitude(rest)}


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is stated, in the one place or the other."""
    return _normalised(next((config[key] for key in _PLACES if config.get(key)), {}))


def _normalised(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return a scaling without nulls, its type under `rope_type`."""
    stated = {key: value for key, value in scaling.items() if value is not None}
    legacy_type = stated.pop("type", None)
    if legacy_type is not None:
        stated.setdefault("rope_type", legacy_type)
    return stated


def _twice_reason(config: dict[str, Any]) -> str | None:
    """Return what is said twice, and not alike."""
    found = {key: config[key] for key in _PLACES if config.get(key)}
    for place, scaling in found.items():
        kinds = [scaling[key] for key in ("type", "rope_type") if scaling.get(key) is not None]
        if len(kinds) > 1 and kinds[0] != kinds[1]:
            return f"{place} has type {kinds[0]!r} and rope_type {kinds[1]!r}, expected one of them"
    # The base has a place of its own besides, which is compared apart.
    both = [_normalised(scaling | {"rope_theta": None}) for scaling in found.values()]
    plain = ({}, {"rope_type": "default"})
    if len(both) > 1 and both[0] != both[1] and not all(scaling in plain for scaling in both):
        return f"rope_parameters {both[0]} and rope_scaling {both[1]} differ, expected one of them"
    return None


def _thetas(config: dict[str, Any]) -> list[Any]:
    """Return every base that is stated, at the top level or in a scaling."""
    sources = [config, *(config[place] for place in _PLACES if config.get(place))]
    return [theta for source in sources if (theta := source.get("rope_theta")) is not None]


def _theta_reason(config: dict[str, Any]) -> str | None:
    thetas = _thetas(config)
    if not all(map(_is_positive, thetas)):
        return f"rope_theta is {thetas!r}, expected a number above 0"
    if len(set(thetas)) > 1:
        found = " but ".join(str(theta) for theta in dict.fromkeys(thetas))
        return f"rope_theta is {found} in rope_parameters or rope_scaling"
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
        keys -= _MROPE  # a draft's positions have one axis, so that its sections turn alike
        return f"rope keys {sorted(keys)} are unknown" if keys else None
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        return f"rope_type {kind!r} (supported: default, {', '.join(_SCALING_KEYS)})"
    required, optional = _SCALING_KEYS[kind]
    if required - keys:
        return f"rope_type {kind!r} lacks {sorted(required - keys)}"
    if keys - required - optional:
        return f"rope_type {kind!r} with unknown keys {sorted(keys - required - optional)}"
    if len(keys & _TOGETHER) == 1:
        return f"rope_type {kind!r} with {min(keys & _TOGETHER)}, which needs {_TOGETHER - keys}"
    wrong = {
        key: stated[key]
        for key in keys
        if not (isinstance(stated[key], bool) if key == "truncate" else _is_positive(stated[key]))
    }
    return f"rope_type {kind!r} with values that are no such numbers: {wrong}" if wrong else None


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
