# SPDX-License-Identifier: Apache-2.0
"""Linear layers over weights in oneDNN's own layout.

A plain weight is repacked inside every call. Kept packed, a step of one row runs about 1.8x
faster in bfloat16, and 8 to 64 rows about 1.5x faster in float32 (AVX-512). The plain weight
stays too: embeddings, KV injection and weight updates read it.

oneDNN chooses how to sum by the shape of the whole product. Where a row's result must not depend on
the other rows, each product therefore has one shape, whatever is asked: a group of a few rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash.cpu.host_memory import free_memory

__all__ = [
    "PackedEmbeddingMethod",
    "PackedLinearMethod",
    "PackedWeight",
    "pack_linear_layers",
    "packed_linear",
    "repack_linear_layers",
]

logger = logging.getLogger(__name__)

_ROWS_HINT = 32  # the row count oneDNN picks a layout for; the same one serves all
_GROUP_ROWS = 8  # of a product on its own; they take hardly longer than one, for the weight is read
_MEMORY_SHARE = 0.4  # of the free memory, which packed weights may take


class PackedWeight:
    """A weight in oneDNN's layout, held so that who has bound it sees it change."""

    __slots__ = ("_in_groups", "tensor")

    def __init__(self, weight: torch.Tensor, *, batch_invariant: bool = False) -> None:
        """Pack `weight` [out, in] float.

        Args:
            weight: the plain weight.
            batch_invariant: whether a row's product must not depend on the rows beside it.
        """
        self._in_groups = batch_invariant
        self.pack(weight)

    def pack(self, weight: torch.Tensor) -> None:
        """Take over the values of `weight` [out, in] float."""
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias.

        Args:
            x: [..., in] of the weight's dtype.
            bias: [out] or None.
        """
        if self._in_groups:
            return _in_groups(lambda rows: packed_linear(rows, self.tensor, bias), x)
        return packed_linear(x, self.tensor, bias)


def _in_groups(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return product(x), computed over groups of a fixed number of rows, the last one padded.

    Args:
        product: maps [rows, in] to [rows, out], each row by itself.
        x: [..., in] float.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % _GROUP_ROWS
    padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    groups = [product(group) for group in padded.split(_GROUP_ROWS)]
    out = groups[0] if len(groups) == 1 else torch.cat(groups)
    return out[: rows.shape[0]].view(*x.shape[:-1], out.shape[-1])


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias.

    In float32 a single row is computed as two: oneDNN's matrix-vector product sums in another
    order than its matrix product, and a row's result must not depend on how many rows its step has.

    Args:
        x: [..., in] of the weight's dtype.
        packed: the weight [out, in] in oneDNN's layout.
        bias: [out] or None.
    """
    if x.dtype is torch.float32 and x.numel() == x.shape[-1]:
        pair = x.reshape(1, -1).expand(2, -1).contiguous()
        out = torch.ops.mkldnn._linear_pointwise(pair, packed, bias, "none", [], "")
        return out[:1].view(*x.shape[:-1], -1)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinearMethod(UnquantizedLinearMethod):
    """`UnquantizedLinearMethod` over a packed copy of the layer's weight."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight again: SGLang calls this when a checkpoint was loaded."""
        layer.packed_weight.pack(layer.weight)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias.

        Args:
            layer: the layer.
            x: [..., in] float.
            bias: [out] float, or None.
        """
        if x.dtype is not layer.weight.dtype:
            return super().apply(layer, x, bias)
        return layer.packed_weight.product(x, bias)


class PackedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """`UnquantizedEmbeddingMethod` whose output-head product uses a packed copy."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight again: SGLang calls this when a checkpoint was loaded."""
        layer.packed_weight.pack(layer.weight)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits x @ weight.T + bias.

        Args:
            layer: the output head, or the embedding it is tied to.
            x: [..., hidden] float; cast to the weight's dtype.
            bias: [vocabulary] float, or None.
        """
        return layer.packed_weight.product(x.to(layer.weight.dtype), bias)


def pack_linear_layers(
    model: torch.nn.Module, *, batch_invariant: bool, processes: int = 1
) -> None:
    """Give every unquantised linear layer and the output head of `model` a packed weight.

    Does nothing for a dtype oneDNN has no kernel for here, or where the copies would take more
    than a fixed share of the free memory; then says so once.

    Args:
        model: the model, loaded.
        batch_invariant: whether a row's result must not depend on the rows beside it. Layers that
            stay as they are cannot promise it: a warning says so.
        processes: how many do so at the same time, each with its part of the model.
    """
    plain = _plain_layers(model)
    needed = processes * sum(each.weight.numel() * each.weight.element_size() for each in plain)
    free = free_memory()
    if needed > _MEMORY_SHARE * free:
        logger.warning(
            "Linear layers stay unpacked and slower: packed copies need %.1f GiB, and %.1f GiB are "
            "free, of which they may take %d %%. Free memory to have them.",
            needed / 2**30,
            free / 2**30,
            int(100 * _MEMORY_SHARE),
        )
        plain = []
    for layer in plain:
        layer.packed_weight = PackedWeight(layer.weight, batch_invariant=batch_invariant)
        is_head = isinstance(layer, VocabParallelEmbedding)
        layer.quant_method = PackedEmbeddingMethod() if is_head else PackedLinearMethod()
    unpacked = len(_products(model)) - len(plain)
    if batch_invariant and unpacked:
        logger.warning(
            "--enable-deterministic-inference: the logits may still depend on the batch, as %d "
            "linear layers are not packed (quantised, of a dtype without a kernel on this machine, "
            "or no memory). Serve the plain model in bfloat16 or float32.",
            unpacked,
        )


def repack_linear_layers(model: torch.nn.Module) -> None:
    """Pack the weights of `model` again, after they were changed in place."""
    for module in model.modules():
        if isinstance(getattr(module, "packed_weight", None), PackedWeight):
            module.packed_weight.pack(module.weight)


def _plain_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that can be packed, each once."""
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return [
        layer
        for layer in _products(model)
        if type(layer.quant_method) in plain and _has_kernel(layer.weight.dtype)
    ]


def _products(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the linear layers and the output head, each once."""
    head = getattr(model, "lm_head", None)
    return [
        module
        for module in model.modules()
        if isinstance(module, LinearBase)
        or (module is head and isinstance(module, VocabParallelEmbedding))
    ]


def _has_kernel(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype is torch.float32
