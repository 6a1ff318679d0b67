# SPDX-License-Identifier: Apache-2.0
"""The exact law of every verified row: what the sampler would see at that place.

A block's rows are computed together, but row j stands j tokens further on: it has j more tokens in
its output, which penalties count and which may end a minimum length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "Cuts",
    "Penalties",
    "forbid_early_stops",
    "keep_most_likely",
    "penalise",
    "to_probs",
]

# A chunk of rows is worked on at a time, so that no second tensor as large as the logits is made.
_CHUNK_BYTES = 64 << 20


class Penalties(NamedTuple):
    """What n requests ask to be done about tokens that stand in their output already.

    Attributes:
        counts: [n, V] int32, how often each token stands in the output, the anchor included.
        frequency: [n, 1] float32, subtracted for each time.
        presence: [n, 1] float32, subtracted once.
        repetition: [n, 1] float32, divides a logit above 0 and multiplies one below; 1 is none.
    """

    counts: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor


class Cuts(NamedTuple):
    """Which tokens of R rows may be drawn at all.

    Attributes:
        top_ks: [R] int32, how many of the most probable; a huge number for all.
        top_ps: [R] float32, until their sum exceeds this; 1 for all.
        min_ps: [R] float32, at least this share of the best one's probability; 0 for all.
        max_top_k: the host's bound on `top_ks`, or None: fewer tokens are then sorted.
    """

    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    max_top_k: int | None


def penalise(out: torch.Tensor, proposals: torch.Tensor, penalties: Penalties) -> None:
    """Penalise each row for the output so far and for the block's tokens before it.

    Args:
        out: [n, B, V] logits, changed in place; row j follows the anchor and j proposals.
        proposals: [n, B-1] int64.
        penalties: of the n requests.

    Source: `sglang/srt/sampling/penaltylib`, whose order this keeps: frequency and presence are
        subtracted, then repetition scales.

    Cost: B passes over [n, V]; no sync.
    """
    num_proposals = proposals.shape[1]
    places = proposals.unsqueeze(1).expand(-1, num_proposals + 1, -1)  # [n, B, B-1]
    unpenalised = out.gather(2, places)
    for row in out.unbind(1):
        row.copy_(_penalised(row, penalties.counts, penalties))
    # A token of the block counts once more in the rows behind it, so its logit is done again.
    same = (proposals.unsqueeze(2) == proposals.unsqueeze(1)).to(torch.int32)  # [n, B-1, B-1]
    times_before = torch.zeros_like(places, dtype=torch.int32)
    times_before[:, 1:] = same.cumsum(1)
    counts = penalties.counts.gather(1, proposals).unsqueeze(1) + times_before
    three = [values.unsqueeze(2) for values in penalties[1:]]
    out.scatter_(2, places, _penalised(unpenalised, counts, Penalties(counts, *three)))


def _penalised(logits: torch.Tensor, counts: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    there = counts > 0
    less = penalties.frequency * counts + penalties.presence * there
    factor = torch.where(there, penalties.repetition, 1.0)
    logits = logits - less
    return torch.where(logits < 0, logits * factor, logits / factor)


def forbid_early_stops(
    out: torch.Tensor,
    stop_bias: torch.Tensor,
    num_output: torch.Tensor,
    min_new_tokens: torch.Tensor,
) -> None:
    """Rule stop tokens out of the rows that come before a request's minimum length.

    Args:
        out: [n, B, V] logits, changed in place.
        stop_bias: [n, V], -inf at a request's stop tokens and 0 elsewhere.
        num_output: [n] int64, tokens in the output, the anchor included.
        min_new_tokens: [n] int64.
    """
    for j, row in enumerate(out.unbind(1)):
        too_early = (num_output + j < min_new_tokens).unsqueeze(1)
        row.add_(torch.where(too_early, stop_bias, 0.0))


def to_probs(out: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Turn rows of logits into probabilities at a temperature.

    Args:
        out: [R, V] float32, changed in place.
        temperatures: [R, 1] float32, above 0.
    """
    step = _rows_in_chunk(out)
    for rows, heat in zip(out.split(step), temperatures.split(step), strict=True):
        rows.div_(heat)
        rows.copy_(torch.softmax(rows, dim=-1))


def keep_most_likely(out: torch.Tensor, cuts: Cuts) -> None:
    """Set the probabilities that top-k, top-p and min-p cut to 0, and scale the rest to sum to 1.

    The three share one order: both k and p cut what `softmax` gave, and min-p what they left.

    Args:
        out: [R, V] probabilities, changed in place.
        cuts: of the R rows.

    Source: `sglang/srt/layers/sampler.py`, `top_k_top_p_min_p_sampling_from_probs_torch`, whose
        choice among equal probabilities (the sort's) this shares.
    """
    step = max(1, _rows_in_chunk(out) // 4)  # a sort has indices of 8 bytes beside its values
    limits = (values.split(step) for values in cuts[:3])
    for rows, top_ks, top_ps, min_ps in zip(out.split(step), *limits, strict=True):
        if cuts.max_top_k is not None and cuts.max_top_k < rows.shape[1]:
            values, tokens = rows.topk(cuts.max_top_k, dim=-1, sorted=True)
        else:
            values, tokens = rows.sort(dim=-1, descending=True)
        ranks = torch.arange(values.shape[1], device=values.device)
        before = values.cumsum(-1).sub_(values)
        cut = (ranks >= top_ks.unsqueeze(1)) | (before > top_ps.unsqueeze(1))
        cut |= values < values[:, :1] * min_ps.unsqueeze(1)
        values.masked_fill_(cut, 0.0)
        values.div_(values.sum(-1, keepdim=True))
        rows.zero_().scatter_(1, tokens, values)


def _rows_in_chunk(rows: torch.Tensor) -> int:
    return max(1, _CHUNK_BYTES // (rows.shape[-1] * rows.element_size()))
