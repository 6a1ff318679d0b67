# SPDX-License-Identifier: Apache-2.0
"""The tensors of a draft checkpoint: which there must be, and which there are."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dflash.errors import DRAFT_OPTION, UnsupportedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_dflash.draft.config import DraftConfig

__all__ = [
    "BORROWED",
    "canonical_weight_name",
    "check_weights",
    "expected_weights",
    "read_weight_shapes",
    "weight_files",
]

_INDEX = "model.safetensors.index.json"
# Names that one exporter or another gives, and ours.
_ALIASES = {
    # z-lab's own code holds the codebooks as embeddings.
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
# The target's, [V, H], which some trainers save once more (`draft/borrowed.py` compares them).
BORROWED = ("embed_tokens.weight", "lm_head.weight")
# Buffers that old exports hold and that are computed from the config instead.
_COMPUTED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_MAX_HEADER_BYTES = 100 * 2**20  # the format's own bound


def canonical_weight_name(name: str) -> str | None:
    """Return a checkpoint tensor's name as `expected_weights` has it.

    Args:
        name: The name in the file, with or without a leading `model.`.

    Returns:
        The name, or None for rotary tables, which are computed and not loaded.
    """
    bare = name.removeprefix("model.")
    if bare.endswith(_COMPUTED_SUFFIXES):
        return None
    return _ALIASES.get(bare, bare)


def expected_weights(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a draft, as stored (not fused).

    Args:
        config: The draft.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    weights: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_context_features * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
        weights[f"{layer}.input_layernorm.weight"] = (hidden,)
        weights[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        weights[f"{attention}.q_norm.weight"] = (head_dim,)
        weights[f"{attention}.k_norm.weight"] = (head_dim,)
        for name, rows, columns in (
            ("q_proj", q_size, hidden),
            ("k_proj", kv_size, hidden),
            ("v_proj", kv_size, hidden),
            ("o_proj", hidden, q_size),
        ):
            weights[f"{attention}.{name}.weight"] = (rows, columns)
            if config.attention_bias:
                weights[f"{attention}.{name}.bias"] = (rows,)
        for name in ("gate_proj", "up_proj"):
            weights[f"{layer}.mlp.{name}.weight"] = (config.intermediate_size, hidden)
        weights[f"{layer}.mlp.down_proj.weight"] = (hidden, config.intermediate_size)
    return weights | _dflash2_weights(config)


def _dflash2_weights(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    hidden, taps, rank = config.hidden_size, config.conv_kernel_size, config.selector_rank
    weights: dict[str, tuple[int, ...]] = {}
    if taps:
        width = 2 * taps * (hidden // config.conv_group_size)
        for i in range(config.num_layers):
            for conv in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                weights[f"{conv}.base_kernel"] = (2, taps, hidden)
                weights[f"{conv}.kernel_projection.weight"] = (width, hidden)
    if rank:
        assert config.vocab_size is not None, "from_dict asks for it"
        for side in ("predecessor", "successor"):
            weights[f"candidate_selector.{side}_codebook"] = (config.vocab_size, rank)
        weights["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    return weights


def check_weights(
    found: Mapping[str, tuple[int, ...]], config: DraftConfig, source: str | Path
) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of its config.json.

    Copies of the target's embedding and output head may be there besides.

    Args:
        found: Name -> shape as the files have them.
        config: The draft.
        source: Where the files lie, for the message.

    Raises:
        UnsupportedCheckpoint: with every missing, unexpected, doubled and misshaped tensor.
    """
    expected = expected_weights(config)
    allowed = expected | _borrowed_shapes(found, config)
    seen: dict[str, str] = {}
    problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "twice": [], "shape": []}
    for name, shape in found.items():
        canonical = canonical_weight_name(name)
        if canonical is None:
            continue
        if canonical not in allowed:
            problems["unexpected"].append(f"{name} {list(shape)}")
        elif canonical in seen:
            problems["twice"].append(f"{seen[canonical]} and {name}")
        elif tuple(shape) != allowed[canonical]:
            problems["shape"].append(
                f"{name} is {list(shape)}, expected {list(allowed[canonical])}"
            )
        seen.setdefault(canonical, name)
    problems["missing"] = [
        f"{name} {list(shape)}" for name, shape in expected.items() if name not in seen
    ]
    if any(problems.values()):
        listed = "; ".join(
            f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names
        )
        raise UnsupportedCheckpoint(
            f"{source}: the weights are not those of its config.json: {listed}. Missing "
            "ones point to an incomplete download, others to a config.json of another draft or to "
            "parts that the config.json does not name.",
            option=DRAFT_OPTION,
        )


def _borrowed_shapes(
    found: Mapping[str, tuple[int, ...]], config: DraftConfig
) -> dict[str, tuple[int, ...]]:
    rows = {canonical_weight_name(name): shape[0] for name, shape in found.items() if shape}
    vocab_size = config.vocab_size
    return {
        name: (vocab_size or rows[name], config.hidden_size) for name in BORROWED if name in rows
    }


def weight_files(path: str | Path) -> list[Path]:
    """Return the safetensors files of a checkpoint's folder, one or those of its index.

    Args:
        path: The folder of the checkpoint.

    Raises:
        UnsupportedCheckpoint: there are none, or the index names files that are not there.
    """
    folder = Path(path)
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if files:
            return files
        raise UnsupportedCheckpoint(
            f"{path}: no *.safetensors there. Download the draft again, or convert its "
            "weights to safetensors.",
            option=DRAFT_OPTION,
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedCheckpoint(
            f"{path}: {_INDEX} has no readable weight_map ({error!r}). Download the draft again.",
            option=DRAFT_OPTION,
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UnsupportedCheckpoint(
            f"{path}: {_INDEX} names files that are not there: {', '.join(missing)}. "
            "Download the draft again.",
            option=DRAFT_OPTION,
        )
    return [folder / name for name in names]


def read_weight_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor in a checkpoint's folder, from the headers alone.

    Args:
        path: The folder of the checkpoint.

    Raises:
        UnsupportedCheckpoint: there are no weights, a file is damaged, or a name is in two files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        for name, shape in _header_shapes(file).items():
            if name in shapes:
                raise UnsupportedCheckpoint(
                    f"{path}: {name} is in more than one file ({file.name} and another). "
                    "Remove the files that do not belong to this checkpoint.",
                    option=DRAFT_OPTION,
                )
            shapes[name] = shape
    return shapes


def _header_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Read one file's header: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = stream.read(length) if 0 < length <= _MAX_HEADER_BYTES else b""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise UnsupportedCheckpoint(
            f"{file}: not a safetensors file ({error!r}). Download the draft again.",
            option=DRAFT_OPTION,
        ) from error
    expected_bytes = 8 + length + end
    if file.stat().st_size != expected_bytes:
        raise UnsupportedCheckpoint(
            f"{file}: {file.stat().st_size} bytes, expected {expected_bytes}: an "
            "incomplete download. Download the draft again.",
            option=DRAFT_OPTION,
        )
    return shapes
