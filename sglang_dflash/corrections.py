# SPDX-License-Identifier: Apache-2.0
"""Where SGLang's plain sampling depends on chance, made definite: what DFLASH is held against.

Both apply with and without DFLASH, so that turning it on changes no text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

__all__ = ["draw_by_request", "draws_by_rank", "penalise_in_order"]


def draws_by_rank(info: SamplingBatchInfo) -> torch.Tensor:
    """Return [R] bool: whether a row's seeded noise goes by rank, for it is cut, or by token id."""
    return (info.top_ks != TOP_K_ALL) | (info.top_ps != 1.0)


def draw_by_request(
    original: Callable[..., tuple[torch.Tensor, object]],
    sampler: Sampler,
    probs: torch.Tensor,
    sampling_info: SamplingBatchInfo,
    positions: torch.Tensor,
    simple_sampling_case: bool,
) -> tuple[torch.Tensor, object]:
    """Draw each seeded row as its own options ask, whatever its batch mates do.

    SGLang draws all rows over ranks as soon as one of them has top-k or top-p, and over token ids
    otherwise: with the same seed, another text. And of tokens that tie for the first place, which
    is frequent in bfloat16, a greedy row among sampled ones gets the one that a sort puts first;
    among greedy ones the first by id. `--enable-deterministic-inference` promises that a request's
    text does not depend on its batch, and speculation changes who is in a batch when.

    Args:
        original: `Sampler._sample_from_probs`.
        sampler: its self.
        probs: [R, V].
        sampling_info: the options of the R rows.
        positions: [R].
        simple_sampling_case: whether no row is cut.
    """
    drawn, capture = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    if sampling_info.sampling_seed is None or simple_sampling_case:
        return drawn, capture
    without_capture = dataclasses.replace(sampling_info, sampling_mask_batch_indices=None)
    by_id, _ = original(sampler, probs, without_capture, positions, True)
    drawn = torch.where(draws_by_rank(sampling_info), drawn, by_id.to(drawn.dtype))
    best = probs.argmax(dim=-1).to(drawn.dtype)
    return torch.where(sampling_info.top_ks == 1, best, drawn), capture


def penalise_in_order(
    original: Callable[..., None],
    orchestrator: BatchedPenalizerOrchestrator,
    logits: torch.Tensor,
    repeat: int | None = None,
) -> None:
    """Subtract the sum of frequency and presence penalties, then scale by the repetition penalty.

    Without overlap scheduling SGLang applies them one by one in the order of a set of classes,
    which is another one in each process; with it, like this.

    Args:
        original: `BatchedPenalizerOrchestrator.apply`.
        orchestrator: its self.
        logits: [n, V], changed in place.
        repeat: rows a request; SGLang orders those itself.
    """
    if repeat is not None:
        original(orchestrator, logits, repeat)
        return
    additive = torch.zeros_like(logits)
    orchestrator.accumulate_additive_penalties(additive)
    logits.add_(additive)
    for penalizer in orchestrator.penalizers.values():
        if penalizer.is_multiplicative:
            penalizer.apply(logits)
