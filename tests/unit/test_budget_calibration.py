# SPDX-License-Identifier: Apache-2.0
"""The calibrator on simulated verify results whose law is known."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.budget import calibration
from sglang_dflash.budget.calibration import Calibrator, Prior, observed, survival
from sglang_dflash.budget.reliability import Reliability, reliability

BLOCK = 6
SLOPE = 1.1
INTERCEPTS = torch.tensor([0.9, 0.3, 0.0, -0.4, -1.0])


def draw(
    n: int, generator: torch.Generator, intercepts: torch.Tensor = INTERCEPTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the draft's probabilities [n, B-1] and how many proposals the target confirms [n]."""
    log_odds = 0.8 + 1.5 * torch.randn(n, BLOCK - 1, generator=generator)
    chance = torch.sigmoid(SLOPE * log_odds + intercepts)
    confirmed = torch.rand(n, BLOCK - 1, generator=generator) < chance
    return torch.sigmoid(log_odds), confirmed.int().cumprod(dim=1).sum(dim=1)


def train(
    calibrator: Calibrator,
    steps: int,
    generator: torch.Generator,
    *,
    n: int = 16,
    width: int = BLOCK,
    intercepts: torch.Tensor = INTERCEPTS,
    sampled: bool = False,
) -> list[Reliability]:
    """Show the calibrator steps at one width; return the reliability of each step."""
    diagrams = []
    kinds = torch.full((n,), sampled)
    for _ in range(steps):
        probs, confirmed = draw(n, generator, intercepts)
        widths = torch.full((n,), width)
        num_accepted = confirmed.clamp_max(width - 1)
        seen, accepted = observed(BLOCK - 1, widths, num_accepted)
        diagrams.append(reliability(calibrator.chances(probs, kinds), seen, accepted))
        calibrator.update(probs, kinds, widths, num_accepted)
    return diagrams


def error_of(diagrams: list[Reliability]) -> float:
    total = Reliability(*map(sum, zip(*diagrams, strict=True)))
    return float(total.expected_calibration_error())


def test_observations_are_verified_and_follow_no_refusal() -> None:
    widths = torch.tensor([4, 4, 1, 6])
    num_accepted = torch.tensor([1, 3, 0, 5])
    seen, accepted = observed(5, widths, num_accepted)
    assert seen.int().tolist() == [
        [1, 1, 0, 0, 0],  # the second was refused, the third says nothing
        [1, 1, 1, 0, 0],  # all three verified were accepted, the fourth was not verified
        [0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1],
    ]
    assert accepted.sum(dim=1).tolist() == [1, 3, 0, 5]


def test_starts_from_the_prior() -> None:
    calibrator = Calibrator(BLOCK, prior=Prior(slope=0.5, intercept=-0.2))
    probs = torch.tensor([[0.5, 0.9, 0.0, 1.0, 0.1]])
    chances = calibrator.chances(probs, torch.tensor([False]))
    expected = torch.sigmoid(0.5 * torch.logit(probs, eps=1e-4) - 0.2)
    torch.testing.assert_close(chances, expected)
    assert bool(((chances > 0) & (chances < 1)).all())


def test_learns_the_law_and_its_error_falls() -> None:
    generator = torch.Generator().manual_seed(0)
    calibrator = Calibrator(BLOCK)
    diagrams = train(calibrator, 400, generator)
    assert error_of(diagrams[:5]) > 0.06
    assert error_of(diagrams[-200:]) < 0.02
    assert float(calibrator.slope[0]) == pytest.approx(SLOPE, abs=0.15)
    torch.testing.assert_close(calibrator.intercepts[0], INTERCEPTS, atol=0.35, rtol=0)


def test_one_request_at_a_time_is_enough() -> None:
    generator = torch.Generator().manual_seed(1)
    diagrams = train(Calibrator(BLOCK), 800, generator, n=1)
    assert error_of(diagrams[-500:]) < 0.05


def test_agrees_with_a_batch_fit_of_the_same_observations() -> None:
    """The oracle maximises the whole likelihood at once."""
    generator = torch.Generator().manual_seed(2)
    calibrator = Calibrator(BLOCK, window=1e9)
    theta = torch.zeros(BLOCK, dtype=torch.float64, requires_grad=True)
    steps = []
    for _ in range(150):
        probs, confirmed = draw(16, generator)
        widths = torch.full((16,), BLOCK)
        steps.append((torch.logit(probs).double(), *observed(BLOCK - 1, widths, confirmed)))
        calibrator.update(probs, torch.zeros(16, dtype=torch.bool), widths, confirmed)
    x, seen, accepted = (torch.cat(parts) for parts in zip(*steps, strict=True))
    optimiser = torch.optim.LBFGS([theta], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        logits = theta[0] * x + theta[1:]
        value = torch.nn.functional.binary_cross_entropy_with_logits(
            logits[seen], accepted[seen].double()
        )
        value.backward()
        return value

    optimiser.step(loss)
    online = torch.cat([calibrator.slope[:1], calibrator.intercepts[0]]).double()
    torch.testing.assert_close(online, theta.detach(), atol=0.2, rtol=0)


def test_counting_what_was_not_observed_would_bias_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: rows behind a refusal counted as refused."""

    def all_verified(
        num_proposals: int, widths: torch.Tensor, num_accepted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position = torch.arange(num_proposals)
        verified = position < widths[:, None] - 1
        return verified, verified & (position < num_accepted[:, None])

    last = []
    for rule in (observed, all_verified):
        monkeypatch.setattr(calibration, "observed", rule)
        calibrator = Calibrator(BLOCK)
        train(calibrator, 100, torch.Generator().manual_seed(3), n=32)
        last.append(float(calibrator.intercepts[0, -1] - INTERCEPTS[-1]))
    assert abs(last[0]) < 0.4
    assert last[1] < -1.0


def test_a_position_that_is_not_verified_keeps_its_estimate() -> None:
    generator = torch.Generator().manual_seed(4)
    calibrator = Calibrator(BLOCK)
    train(calibrator, 200, generator)
    before = calibrator.intercepts.clone(), calibrator.num_observed.clone()
    train(calibrator, 200, generator, width=2)
    torch.testing.assert_close(calibrator.num_observed[:, 1:], before[1][:, 1:], atol=0, rtol=0)
    assert float((calibrator.intercepts[0, 1:] - before[0][0, 1:]).abs().max()) < 0.5


def test_width_one_says_nothing() -> None:
    calibrator = Calibrator(BLOCK)
    probs = torch.rand(4, BLOCK - 1, generator=torch.Generator().manual_seed(5))
    widths, num_accepted = torch.ones(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    calibrator.update(probs, torch.zeros(4, dtype=torch.bool), widths, num_accepted)
    assert float(calibrator.num_observed.abs().sum()) == 0
    assert calibrator.slope.tolist() == [0.5, 0.5]
    torch.testing.assert_close(calibrator.intercepts, torch.full((2, BLOCK - 1), -0.2))


def test_greedy_and_sampled_traffic_do_not_mix() -> None:
    generator = torch.Generator().manual_seed(6)
    calibrator = Calibrator(BLOCK)
    train(calibrator, 50, generator, sampled=True)
    assert calibrator.slope[0].item() == 0.5
    assert float(calibrator.num_observed[0].sum()) == 0
    assert calibrator.slope[1].item() != 0.5


def test_a_mixed_batch_equals_its_parts() -> None:
    generator = torch.Generator().manual_seed(7)
    whole, parts = Calibrator(BLOCK), Calibrator(BLOCK)
    probs, confirmed = draw(12, generator)
    kinds, widths = torch.arange(12) % 3 == 0, torch.full((12,), BLOCK)
    whole.update(probs, kinds, widths, confirmed)
    for kind in (False, True):
        mine = kinds == kind
        parts.update(probs[mine], kinds[mine], widths[mine], confirmed[mine])
    torch.testing.assert_close(whole.slope, parts.slope)
    torch.testing.assert_close(whole.intercepts, parts.intercepts)


@pytest.mark.parametrize("n", [1, 32])
def test_follows_traffic_that_changes(n: int) -> None:
    generator = torch.Generator().manual_seed(8)
    calibrator = Calibrator(BLOCK)
    bad = torch.full((BLOCK - 1,), -6.0)
    train(calibrator, 1000 // n + 50, generator, n=n, intercepts=bad)
    probs = torch.full((1, BLOCK - 1), 0.9)
    greedy = torch.tensor([False])
    assert float(calibrator.chances(probs, greedy)[0, 0]) < 0.1
    train(calibrator, 600 // n + 10, generator, n=n)
    truth = torch.sigmoid(SLOPE * torch.logit(probs) + INTERCEPTS)[0, 0]
    assert float(calibrator.chances(probs, greedy)[0, 0]) == pytest.approx(float(truth), abs=0.15)


def test_extreme_probabilities_stay_finite() -> None:
    calibrator = Calibrator(BLOCK)
    sampled, widths = torch.tensor([False, True]), torch.tensor([BLOCK, BLOCK])
    for probs in (torch.zeros(2, BLOCK - 1), torch.ones(2, BLOCK - 1)):
        for _ in range(500):
            calibrator.update(probs, sampled, widths, torch.tensor([BLOCK - 1, 0]))
        chances = calibrator.chances(probs, sampled)
        assert bool(torch.isfinite(chances).all())
        assert float(chances[0].min()) > 0.8
        assert float(chances[1, 0]) < 0.2


def test_survival_is_the_running_product() -> None:
    chances = torch.tensor([[0.5, 0.5, 1.0]])
    assert survival(chances).tolist() == [[0.5, 0.25, 0.25]]


def test_reliability_of_a_known_case() -> None:
    chances = torch.tensor([[0.05, 0.05, 0.95, 1.0, 0.5]])
    seen = torch.tensor([[True, True, True, True, False]])
    accepted = torch.tensor([[False, True, True, True, True]])
    diagram = reliability(chances, seen, accepted)
    assert diagram.counts.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert diagram.accepted.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    # |0.1 - 1| + |1.95 - 2| over 4 observations
    assert float(diagram.expected_calibration_error()) == pytest.approx(0.95 / 4)
