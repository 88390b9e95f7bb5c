"""Estimates of divergence: their values, the gradients they really have in expectation, and divergence as a cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algos.kl import Coefficient, Estimator, estimate, penalised_rewards
from strop.algos.token_advantages import returns_to_go

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
STRAIGHT_THROUGH = {
    Estimator.K1_STRAIGHT_THROUGH: Estimator.K1,
    Estimator.K3_STRAIGHT_THROUGH: Estimator.K3,
    Estimator.ABS_STRAIGHT_THROUGH: Estimator.ABS,
}


def value_and_slope(estimator: Estimator, logprob: float, reference: float) -> tuple[float, float]:
    logprobs_T = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    kl_T = estimate(estimator, logprobs_T, torch.tensor([reference], dtype=torch.float64), torch.tensor([True]))
    kl_T.sum().backward()
    assert logprobs_T.grad is not None
    return float(kl_T.detach()), float(logprobs_T.grad)


AT_ONE = {  # d = 1: value and slope
    Estimator.K1: (1.0, 1.0),
    Estimator.K2: (0.5, 1.0),
    Estimator.K3: (0.36788, 0.63212),
    Estimator.ABS: (1.0, 1.0),
    Estimator.K1_STRAIGHT_THROUGH: (1.0, 1.0),
    Estimator.K3_STRAIGHT_THROUGH: (0.36788, 1.0),
    Estimator.ABS_STRAIGHT_THROUGH: (1.0, 1.0),
}


@pytest.mark.parametrize("estimator", list(Estimator))
def test_a16_a17_every_estimator_runs_and_has_a_gradient(estimator: Estimator) -> None:
    """A16, A17: logprob -1, reference -2."""
    assert value_and_slope(estimator, -1.0, -2.0) == pytest.approx(AT_ONE[estimator], abs=1e-5)


@EXAMPLES
@given(st.floats(-8, -0.01), st.floats(-8, -0.01))
def test_straight_through_reports_one_and_follows_k2(logprob: float, reference: float) -> None:
    for estimator, base in STRAIGHT_THROUGH.items():
        value, slope = value_and_slope(estimator, logprob, reference)
        assert value == pytest.approx(value_and_slope(base, logprob, reference)[0], abs=1e-12)
        assert slope == pytest.approx(value_and_slope(Estimator.K2, logprob, reference)[1], abs=1e-12)


def expected_gradient(estimator: Estimator, logits_V: Tensor, reference_V: Tensor) -> Tensor:
    """The mean over all tokens, weighted by the policy's own constant probabilities, of the estimator's gradient."""
    logits_V = logits_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    everywhere = torch.ones(len(logits_V), dtype=torch.bool)
    kl_V = estimate(estimator, logprobs_V, reference_V.log(), everywhere)
    (logprobs_V.detach().exp() * kl_V).sum().backward()
    assert logits_V.grad is not None
    return logits_V.grad


def true_gradient(logits_V: Tensor, reference_V: Tensor, *, reverse: bool = False) -> Tensor:
    logits_V = logits_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    forward = (logprobs_V.exp() * (logprobs_V - reference_V.log())).sum()
    backward = (reference_V * (reference_V.log() - logprobs_V)).sum()
    (backward if reverse else forward).backward()
    assert logits_V.grad is not None
    return logits_V.grad


@pytest.mark.parametrize(("estimator", "slope"), [(Estimator.K1, 0.0), (Estimator.K2, -0.5493), (Estimator.K3, -0.4)])
def test_a18_what_each_gradient_really_descends(estimator: Estimator, slope: float) -> None:
    """A18: two tokens, equal logits, reference (.9, .1). Only k2's mean gradient is that of the divergence."""
    logits_V, reference_V = torch.zeros(2, dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64)
    assert float(true_gradient(logits_V, reference_V)[0]) == pytest.approx(-0.5493, abs=1e-4)
    assert float(expected_gradient(estimator, logits_V, reference_V)[0]) == pytest.approx(slope, abs=1e-4)


@EXAMPLES
@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_a18_on_any_distribution(seed: int, vocabulary: int) -> None:
    """A18: k2 and the straight-through forms descend KL(policy, reference); k3 the reverse; k1 nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits_V = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    reference_V = torch.randn(vocabulary, generator=generator, dtype=torch.float64).softmax(-1)
    truth_V = true_gradient(logits_V, reference_V)
    for estimator in (Estimator.K2, *STRAIGHT_THROUGH):
        torch.testing.assert_close(expected_gradient(estimator, logits_V, reference_V), truth_V, rtol=1e-9, atol=1e-12)
    reverse_V = true_gradient(logits_V, reference_V, reverse=True)
    torch.testing.assert_close(expected_gradient(Estimator.K3, logits_V, reference_V), reverse_V, rtol=1e-9, atol=1e-12)
    assert expected_gradient(Estimator.K1, logits_V, reference_V).abs().max() < 1e-12
    # And the values: k1 and k3 have the divergence as their mean.
    logprobs_V = logits_V.log_softmax(-1)
    divergence = float((logprobs_V.exp() * (logprobs_V - reference_V.log())).sum())
    for estimator in (Estimator.K1, Estimator.K3):
        kl_V = estimate(estimator, logprobs_V, reference_V.log(), torch.ones(vocabulary, dtype=torch.bool))
        assert float((logprobs_V.exp() * kl_V).sum()) == pytest.approx(divergence, abs=1e-12)


@pytest.mark.parametrize("estimator", list(Estimator))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_masked_places_may_hold_anything(estimator: Estimator, poison: float) -> None:
    mask_T = torch.tensor([True, False, True])
    results: list[tuple[Tensor, Tensor]] = []
    for bad in (0.0, poison):
        logprobs_T = torch.tensor([-1.0, bad, -2.0], dtype=torch.float64, requires_grad=True)
        reference_T = torch.tensor([-1.5, -bad, -0.5], dtype=torch.float64)
        kl_T = estimate(estimator, logprobs_T, reference_T, mask_T)
        (kl_T * torch.tensor([0.5, 0.0, -2.0])).sum().backward()
        assert logprobs_T.grad is not None
        results.append((kl_T.detach(), logprobs_T.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][0][1] == 0.0 and results[0][1][1] == 0.0


def test_k3_of_a_token_that_the_policy_has_given_up_is_finite() -> None:
    value, slope = value_and_slope(Estimator.K3, -2000.0, -1.0)
    assert np.isfinite(value) and np.isfinite(slope)
    assert value == pytest.approx(np.expm1(20.0) - 1999.0)


def test_a22_what_the_policy_did_not_choose_costs_nothing() -> None:
    """A22: kl (.1, 5, .1) around a tool's token, coefficient 1, reward 1: the first return is 0.8."""
    mask_T = np.array([True, False, True])
    for tool_kl in (5.0, np.nan, np.inf):
        rewards_T = penalised_rewards(np.array([0.0, 0.0, 1.0]), np.array([0.1, tool_kl, 0.1]), mask_T, 1.0)
        np.testing.assert_allclose(returns_to_go(rewards_T, mask_T, np.array([3])), [0.8, 0.0, 0.9])


def test_a23_the_measured_divergence_stays_what_it_was() -> None:
    """A23: kl (.1, .2, .3), coefficient .5, reward 1 at the end."""
    kl_T, rewards_T = np.array([0.1, 0.2, 0.3]), np.array([0.0, 0.0, 1.0])
    ours_T = penalised_rewards(rewards_T, kl_T, np.ones(3, bool), 0.5)
    np.testing.assert_allclose(ours_T, [-0.05, -0.1, 0.85])
    assert kl_T.mean() == pytest.approx(0.2)
    assert rewards_T.tolist() == [0.0, 0.0, 1.0]
    assert not np.shares_memory(ours_T, rewards_T)


def test_coefficient() -> None:
    fixed = Coefficient(value=0.1)
    assert fixed.after(kl=100.0, tokens=1000) is fixed
    led = Coefficient(value=0.1, target=6.0, horizon=10_000)
    assert led.after(kl=6.6, tokens=1000).value == pytest.approx(0.1 * (1 + 0.1 * 0.1))  # 10 % too far
    assert led.after(kl=600.0, tokens=1000).value == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # held to 20 %
    assert led.after(kl=0.0, tokens=1000).value == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert led.value == 0.1
    for wrong in ({"value": -1.0}, {"value": 1.0, "target": 0.0}, {"value": 1.0, "horizon": 0.0}):
        with pytest.raises(ValueError, match="must"):
            Coefficient(**wrong)
