# SPDX-License-Identifier: Apache-2.0
"""From the draft's own probability of a proposal to the chance that verify accepts it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["Calibrator", "Prior", "observed", "survival"]

_NUM_KINDS = 2  # greedy traffic is row 0, sampled traffic row 1
_PROBABILITY_FLOOR = 1e-4  # log-odds stay within +-9.2
_LARGEST_STEP = 1.0  # of an intercept; a saturated logistic would overshoot
_LARGEST_SLOPE_STEP = 0.2
_SURPRISE = 4.0  # standard deviations of a position's accepted proposals in one step
_SLOPE_RANGE = (0.0, 4.0)
_INTERCEPT_RANGE = (-12.0, 12.0)


@dataclass(frozen=True)
class Prior:
    """What is believed before anything was seen.

    Attributes:
        slope: of the log-odds of the draft's probability. The defaults are the median over five
            published drafts that vLLM's adaptive verification starts from.
        intercept: of every position.
        observations: how many observed proposals the belief in the slope, and in each intercept,
            weighs.
    """

    slope: float = 0.5
    intercept: float = -0.2
    observations: float = 8.0


class Calibrator:
    """A logistic curve per position, learnt online from what verify accepted.

    `chance = sigmoid(slope * logit(probability) + intercept[position])`, one slope for all
    positions, greedy and sampled traffic apart. It maximises the posterior of the recent
    observations by one Newton step an update: the Hessian of "one slope, an intercept per position"
    is an arrow, so solving it is elementwise. Everything stays on the device: no host sync.

    An observation is a proposal that was verified and whose predecessors were all accepted. A
    position forgets by its *own* observations only, so what is not observed keeps its estimate and
    does not drift to the prior. A chance that is too high heals by itself, for its rows are
    verified; one that is too low heals through the probes of `controller.py`.

    Args:
        block_size: B.
        device: where updates run.
        prior: what is believed at the start.
        window: effective number of observations that a position remembers.
    """

    def __init__(
        self,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        prior: Prior | None = None,
        window: float = 1024.0,
    ) -> None:
        prior = prior or Prior()
        shape = (_NUM_KINDS, block_size - 1)
        self._window = window
        self._prior_slope = prior.slope
        self._prior_intercept = prior.intercept
        self._prior_weight = prior.observations / 4  # the Fisher information of a coin is 1/4
        self.slope = torch.full((_NUM_KINDS,), prior.slope, device=device)
        self.intercepts = torch.full(shape, prior.intercept, device=device)
        self.num_observed = torch.zeros(shape, device=device)
        # Hessian of the recent data: [slope, slope], [slope, intercept], [intercept, intercept].
        self._information = torch.zeros((3, *shape), device=device)

    def chances(self, probs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Return the chance that each proposal is accepted if all before it are.

        Args:
            probs: [n, w-1] float, the draft's own (`Proposal.confidence`); w is how many rows of
                each block it ran over, B at most.
            sampled: [n] bool, False for greedy requests.

        Returns:
            [n, w-1] float32 in (0, 1).
        """
        kind = sampled.long()
        intercepts = self.intercepts[kind, : probs.shape[1]]
        return torch.sigmoid(self.slope[kind, None] * _log_odds(probs) + intercepts)

    def update(
        self,
        probs: torch.Tensor,
        sampled: torch.Tensor,
        widths: torch.Tensor,
        num_accepted: torch.Tensor,
    ) -> None:
        """Learn from one verified step, or several together.

        Args:
            probs: [n, w-1] float, as given to `chances`.
            sampled: [n] bool, False for greedy requests.
            widths: [n] int in 1..B, verified rows; width 1 (padding, too) says nothing.
            num_accepted: [n] int in 0..widths-1, accepted proposals.
        """
        seen, accepted = observed(probs.shape[1], widths, num_accepted)
        x = _log_odds(probs)
        chance = self.chances(probs, sampled)
        error = (accepted.float() - chance) * seen  # [n, w-1]
        weight = chance * (1 - chance) * seen
        of_kind = torch.stack([~sampled, sampled]).to(x.dtype)  # [2, n]
        terms = torch.stack([error * x, error, weight * x * x, weight * x, weight, seen.float()])
        sums = torch.einsum("tn,snk->stk", of_kind, terms)  # [6, 2, w-1]
        sums = F.pad(sums, (0, self.intercepts.shape[1] - sums.shape[2]))  # [6, 2, B-1]
        count = sums[5]
        keep = torch.exp(-count / self._window)
        # The traffic changed: a step contradicts the curve beyond chance, so half of it is dropped.
        surprised = sums[1].square() > _SURPRISE**2 * (sums[4] + 1)
        keep = torch.where(surprised, 0.5 * keep, keep)
        self._information = keep * self._information + sums[2:5]
        self.num_observed = keep * self.num_observed + count
        self._newton_step(sums[0].sum(dim=1), sums[1], forgotten=1 - keep)

    def _newton_step(
        self, slope_gradient: torch.Tensor, gradients: torch.Tensor, forgotten: torch.Tensor
    ) -> None:
        """Move [2] slopes and [2, B-1] intercepts; what was forgotten is replaced by the prior."""
        pull = self._prior_weight * forgotten
        gradients = gradients + pull * (self._prior_intercept - self.intercepts)
        slope_gradient = slope_gradient + pull.mean(dim=1) * (self._prior_slope - self.slope)
        cross = self._information[1]
        diagonal = self._information[2] + self._prior_weight
        corner = self._information[0].sum(dim=1) + self._prior_weight
        schur = corner - (cross * cross / diagonal).sum(dim=1)  # > 0 by Cauchy-Schwarz
        slope_step = (slope_gradient - (cross * gradients / diagonal).sum(dim=1)) / schur
        slope_step = slope_step.clamp(-_LARGEST_SLOPE_STEP, _LARGEST_SLOPE_STEP)
        slope = (self.slope + slope_step).clamp(*_SLOPE_RANGE)
        # The best intercepts for the slope that was reached, bounds and all.
        steps = (gradients - cross * (slope - self.slope)[:, None]) / diagonal
        steps = steps.clamp(-_LARGEST_STEP, _LARGEST_STEP)
        self.slope = slope
        self.intercepts = (self.intercepts + steps).clamp(*_INTERCEPT_RANGE)


def observed(
    num_proposals: int, widths: torch.Tensor, num_accepted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which proposals a step observed, and which of them were accepted.

    With 3 of 5 proposals verified and 1 accepted, proposals 0 and 1 are observed (accepted,
    refused); 2 was verified behind a refusal and says nothing, nor do 3 and 4.

    Args:
        num_proposals: B-1.
        widths: [n] int in 1..B, verified rows, anchor included.
        num_accepted: [n] int in 0..widths-1.

    Returns:
        Two [n, B-1] bool tensors; the second is a subset of the first.
    """
    position = torch.arange(num_proposals, device=widths.device)
    seen = (position < widths[:, None] - 1) & (position <= num_accepted[:, None])
    return seen, seen & (position < num_accepted[:, None])


def survival(chances: torch.Tensor) -> torch.Tensor:
    """Return the chance that a proposal and all before it are accepted.

    Args:
        chances: [n, B-1] float, each given that all before are accepted.

    Returns:
        [n, B-1], non-increasing along a request. 1 + its sum over the first w-1 columns is the
        expected number of tokens that width w commits.
    """
    return chances.cumprod(dim=1)


def _log_odds(probs: torch.Tensor) -> torch.Tensor:
    # One NaN of a draft would stay in what is learnt for good.
    return torch.logit(probs.float().nan_to_num(nan=0.5), eps=_PROBABILITY_FLOOR)
