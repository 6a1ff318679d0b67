# SPDX-License-Identifier: Apache-2.0
"""What the plugin makes definite in plain sampling, on small stand-ins for SGLang's objects."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_dflash.corrections import draw_by_request, penalise_in_order


@dataclass
class Info:
    """The options that a draw reads."""

    sampling_seed: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    sampling_mask_batch_indices: None = None


def draw_last(sampler, probs, info, positions, simple):
    """Stand for SGLang's draw: the last of the most likely, or token 0 where rows are not cut."""
    width = probs.shape[1]
    last = width - 1 - probs.flip(1).argmax(1)
    return (torch.zeros_like(last) if simple else last).to(torch.int32), None


def test_a_greedy_row_among_sampled_ones_gets_the_first_of_tied_tokens():
    probs = torch.tensor([[0.1, 0.4, 0.4, 0.1]]).repeat(3, 1)
    info = Info(
        sampling_seed=torch.tensor([1, 2, 3]),
        top_ks=torch.tensor([1, 20, TOP_K_ALL]),
        top_ps=torch.tensor([1.0, 0.9, 1.0]),
    )
    drawn, _ = draw_by_request(draw_last, None, probs, info, torch.arange(3), False)
    assert drawn.tolist() == [1, 2, 0]
    assert drawn.dtype == torch.int32


class Subtract:
    """A frequency or presence penalty."""

    is_multiplicative = False

    def __init__(self, amount: float) -> None:
        self._amount = amount

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise logits [n, V] in place."""
        logits.sub_(self._amount)


class Halve:
    """A repetition penalty."""

    is_multiplicative = True

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise logits [n, V] in place."""
        logits.mul_(0.5)


class Orchestrator:
    """SGLang's penalties, in an order of our choice."""

    def __init__(self, penalizers: list) -> None:
        self.penalizers = dict(enumerate(penalizers))

    def accumulate_additive_penalties(self, logits: torch.Tensor) -> None:
        """Apply what is subtracted to logits [n, V] in place."""
        for penalizer in self.penalizers.values():
            if not penalizer.is_multiplicative:
                penalizer.apply(logits)


def test_penalties_are_the_same_bits_in_any_order():
    logits = 16 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    want = (logits - (torch.tensor(0.3) + torch.tensor(0.45))) * 0.5
    few, much, halve = Subtract(0.3), Subtract(0.45), Halve()
    for order in ([few, much, halve], [much, few, halve], [halve, much, few]):
        got = logits.clone()
        penalise_in_order(None, Orchestrator(order), got)
        assert torch.equal(got, want)
