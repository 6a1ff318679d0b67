# SPDX-License-Identifier: Apache-2.0
"""The exact law of every verified row: what the sampler would see at that place.

A block's rows are computed together, but row j stands j tokens further on: it has j more tokens in
its output, which penalties count and which may end a minimum length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from sglang_dflash.verify.rows import Rows

__all__ = [
    "Cuts",
    "Penalties",
    "Renorms",
    "add_bias",
    "forbid_early_stops",
    "keep_by_value",
    "keep_most_likely",
    "penalise",
    "rows_in_chunk",
    "to_probs",
]

# Rows are worked on a chunk at a time: what is made beside the logits has a bound, or fits caches.
_CHUNK_BYTES = 16 << 20  # on a CPU
_DEVICE_CHUNK_BYTES = 256 << 20  # enough that launching kernels is not what takes the time
_SORT_COPIES = 4  # values, and indices of 8 bytes
_PENALTY_COPIES = 6  # sums of the requests, what is subtracted, factors, and results


class Penalties(NamedTuple):
    """What n requests ask to be done about tokens that stand in their output already.

    Attributes:
        sums: [n, V] float32, `step` added up for each time a token stands in the output, the anchor
            included: one by one, as SGLang does, for three times 0.3 is another float32.
        frequency: [n, 1] float32, subtracted for each time.
        presence: [n, 1] float32, subtracted once.
        repetition: [n, 1] float32, divides a logit above 0 and multiplies one below; 1 is none.
    """

    sums: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    @staticmethod
    def step(frequency: torch.Tensor) -> torch.Tensor:
        """Return what `sums` grow by: the frequency penalty [...], or 1 where there is none."""
        return torch.where(frequency != 0, frequency, 1.0)

    @property
    def subtracted(self) -> torch.Tensor:
        """What frequency and presence take from each logit, shaped as the sums."""
        return self.sums * (self.frequency != 0) + self.presence * (self.sums != 0)

    @property
    def factors(self) -> torch.Tensor:
        """What repetition then divides each logit by, or multiplies it if below 0."""
        return torch.where(self.sums != 0, self.repetition, 1.0)


class Cuts(NamedTuple):
    """Which tokens of M rows may be drawn at all.

    Attributes:
        top_ks: [M] int32, how many of the most probable; a huge number for all.
        top_ps: [M] float32, until their sum exceeds this; 1 for all.
        min_ps: [M] float32, at least this share of the best one's probability; 0 for all.
        max_top_k: the host's bound on `top_ks`, or None: fewer tokens are then sorted.
    """

    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    max_top_k: int | None


class Renorms(NamedTuple):
    """What cuts without sorting: of tokens that tie at the border all stay.

    Attributes:
        top_k: (probabilities [m, V], top_ks [m]) -> those of the k most probable, scaled to sum to
            1.
        top_p: (probabilities [m, V], top_ps [m]) -> those of which the more probable ones sum to
            less than p, scaled to sum to 1.
    """

    top_k: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    top_p: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def penalise(out: torch.Tensor, rows: Rows, proposals: torch.Tensor, penalties: Penalties) -> None:
    """Penalise each row for the output so far and for the block's tokens before it.

    Args:
        out: [M, V] logits, changed in place; row j of a block follows the anchor and j proposals.
        rows: which rows they are.
        proposals: [n, B-1] int64.
        penalties: of the n requests.

    Source: `sglang/srt/sampling/penaltylib`, whose order this keeps: frequency and presence are
        subtracted, then repetition scales.
    """
    places = rows.each(proposals)  # [M, B-1]
    unpenalised = out.gather(1, places)
    for part in _chunks(out, rows.request):
        own = Penalties(*(values[part.request] for values in penalties))
        part.out.copy_(_penalised(part.out, own))
    # A token of the block counts once more in the rows behind it, so its logit is done again.
    same = (proposals.unsqueeze(2) == proposals.unsqueeze(1)).to(torch.int32)  # [n, B-1, B-1]
    times_before = torch.nn.functional.pad(same.cumsum(1, dtype=torch.int32), (0, 0, 1, 0))
    times = rows.take(times_before)  # [M, B-1]
    sums, *amounts = (rows.each(v) for v in (penalties.sums.gather(1, proposals), *penalties[1:]))
    for number in range(proposals.shape[1]):
        sums = torch.where(times > number, sums + Penalties.step(amounts[0]), sums)
    out.scatter_(1, places, _penalised(unpenalised, Penalties(sums, *amounts)))


def _penalised(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    logits = logits - penalties.subtracted
    factors = penalties.factors
    return torch.where(logits < 0, logits * factors, logits / factors)


def forbid_early_stops(
    out: torch.Tensor,
    rows: Rows,
    stop_bias: torch.Tensor,
    num_output: torch.Tensor,
    min_new_tokens: torch.Tensor,
) -> None:
    """Rule stop tokens out of the rows that come before a request's minimum length.

    Args:
        out: [M, V] logits, changed in place.
        rows: which rows they are.
        stop_bias: [n, V], -inf at a request's stop tokens and 0 elsewhere.
        num_output: [n] int64, tokens in the output, the anchor included.
        min_new_tokens: [n] int64.
    """
    too_early = rows.each(num_output) + rows.offset < rows.each(min_new_tokens)  # [M]
    for part in _chunks(out, rows.request, too_early.unsqueeze(1)):
        part.out.add_(torch.where(part.values, stop_bias[part.request], 0.0))


def add_bias(out: torch.Tensor, rows: Rows, bias: torch.Tensor) -> None:
    """Add each request's bias to all its rows.

    Args:
        out: [M, V] logits, changed in place.
        rows: which rows they are.
        bias: [n, V].
    """
    for part in _chunks(out, rows.request):
        part.out.add_(bias[part.request])


def to_probs(out: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Turn rows of logits into probabilities at a temperature.

    Where options that contradict each other forbid every token, token 0 is left, as argmax has it.

    Args:
        out: [M, V] float32, changed in place.
        temperatures: [M, 1] float32, above 0.
    """
    step = rows_in_chunk(out)
    for part, heat in zip(out.split(step), temperatures.split(step), strict=True):
        part.copy_(torch.softmax(part.div_(heat), dim=-1)).nan_to_num_(nan=0.0)
        part[:, 0] += part.sum(dim=-1) == 0


def keep_most_likely(out: torch.Tensor, cuts: Cuts) -> None:
    """Set the probabilities that top-k, top-p and min-p cut to 0, and scale the rest to sum to 1.

    The three share one order; min-p cuts what the others left. Of tokens that tie at the border
    those stay that the sort puts first; on a CPU a greedy row keeps the first of its best by id.

    Args:
        out: [M, V] probabilities, changed in place.
        cuts: of the M rows.

    Source: `sglang/srt/layers/sampler.py`, `top_k_top_p_min_p_sampling_from_probs_torch`, whose
        choice among equal probabilities (the sort's) this shares.
    """
    most = None if cuts.max_top_k is None or cuts.max_top_k >= out.shape[1] else cuts.max_top_k
    step = rows_in_chunk(out, copies=2 + _SORT_COPIES * (most or out.shape[1]) / out.shape[1])
    for rows in _rows_to_sort(out, cuts).split(step):
        part, (top_ks, top_ps, min_ps) = out[rows], (values[rows] for values in cuts[:3])
        if most is not None:
            values, tokens = part.topk(most, dim=-1, sorted=True)
        else:
            values, tokens = part.sort(dim=-1, descending=True)
        cut = torch.arange(values.shape[1], device=values.device) >= top_ks.unsqueeze(1)
        before = values.cumsum(-1).sub_(values)
        cut |= before > top_ps.unsqueeze(1)
        cut |= values < values[:, :1] * min_ps.unsqueeze(1)
        values.masked_fill_(cut, 0.0)
        values.div_(values.sum(-1, keepdim=True))
        out[rows] = part.zero_().scatter_(1, tokens, values)


def _rows_to_sort(out: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Return which rows need an order, [m] int64, and cut the greedy ones.

    On a CPU, where a sort takes a hundred times as long as a softmax; a host that looks at a device
    would wait for it, so there it is all of them.
    """
    if not out.is_cpu:
        return torch.arange(len(out), device=out.device)
    greedy = cuts.top_ks == 1
    some = (cuts.top_ks < out.shape[1]) | (cuts.top_ps < 1) | (cuts.min_ps > 0)
    for row in greedy.nonzero()[:, 0].tolist():
        best = out[row].argmax()
        out[row].zero_()[best] = 1.0
    return (some & ~greedy).nonzero()[:, 0]


def keep_by_value(out: torch.Tensor, cuts: Cuts, renorms: Renorms, *, in_turn: bool) -> None:
    """Do as `keep_most_likely`, but keep all tokens that tie at the border, and sort nothing.

    A greedy row keeps its best token alone, the first by id.

    Args:
        out: [M, V] probabilities, changed in place.
        cuts: of the M rows.
        renorms: what cuts.
        in_turn: whether top-p cuts what top-k left, scaled to sum to 1, and min-p the rest; else
            both cut what they are given, and there is no min-p.

    Source: `sglang/srt/layers/sampler.py`, `_sample_from_probs` with flashinfer: in turn with
        min-p, jointly without.
    """
    limits = (values.split(rows_in_chunk(out, copies=3)) for values in (out, *cuts[:3]))
    for part, top_ks, top_ps, min_ps in zip(*limits, strict=True):
        best = part.argmax(dim=-1, keepdim=True)
        dense = part.contiguous()  # a padded vocabulary's rows lie apart
        kept = renorms.top_k(dense, top_ks)
        if in_turn:
            kept = renorms.top_p(kept, top_ps)
            least = kept.max(dim=-1, keepdim=True).values * min_ps.unsqueeze(1)
            kept.masked_fill_(kept < least, 0.0)
        else:
            kept.masked_fill_(renorms.top_p(dense, top_ps) <= 0, 0.0)
        part.copy_(kept.div_(kept.sum(-1, keepdim=True)))
        greedy = (top_ks == 1).unsqueeze(1)
        part.masked_fill_(greedy, 0.0).scatter_add_(1, best, greedy.to(part.dtype))


class _Part(NamedTuple):
    out: torch.Tensor  # [m, V]
    request: torch.Tensor  # [m]
    values: torch.Tensor  # [m, ...]


def _chunks(
    out: torch.Tensor, request: torch.Tensor, values: torch.Tensor | None = None
) -> Iterator[_Part]:
    step = rows_in_chunk(out, copies=_PENALTY_COPIES)
    columns = (out, request, request if values is None else values)
    for parts in zip(*(column.split(step) for column in columns), strict=True):
        yield _Part(*parts)


def rows_in_chunk(rows: torch.Tensor, copies: float = 1) -> int:
    """Return how many rows to work on at a time: on a CPU one for each thread at least.

    Args:
        rows: [M, V].
        copies: tensors as large as the chunk that the work makes.
    """
    size = _CHUNK_BYTES if rows.is_cpu else _DEVICE_CHUNK_BYTES
    fitting = int(size / (copies * rows.shape[-1] * rows.element_size()))
    return max(fitting, torch.get_num_threads() if rows.is_cpu else 1)
