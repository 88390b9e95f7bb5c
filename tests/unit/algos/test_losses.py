"""What a loss refuses, what it asks of an engine, and that each of its knobs does something."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from strop.algos.kl import Estimator
from strop.algos.losses import (
    CISPO,
    DRO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    CrossEntropy,
    DPPOTotalVariation,
    KLCov,
    PolicyGradient,
    PolicyInputs,
    PolicyLoss,
)
from strop.algos.sequence_losses import GMPO, GSPO
from strop.algos.value_losses import ClippedValue, ValueInputs
from strop.types import Layout, Outputs, Want

LAYOUT = Layout((4,))
MASK = torch.ones(4, dtype=torch.bool)
OLD = torch.tensor([-1.0, -1.5, -0.5, -2.0])
SCORES = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]] * 4)
OUTPUTS = Outputs(
    logprobs_T=OLD + torch.tensor([0.6, -0.7, 1.3, -1.2]),
    entropy_T=torch.ones(4),
    router_logits_TLE=SCORES,
    router_shares_TLE=SCORES.softmax(-1),
)
INPUTS = PolicyInputs(
    behavior_logprobs_T=OLD,
    advantages_T=torch.tensor([1.0, -1.0, -0.7, 0.4]),
    reference_logprobs_T=OLD - 0.3,
    selected_T=torch.tensor([True, False, False, False]),
    expert_fractions_LE=torch.tensor([[0.4, 0.3, 0.2, 0.1]]),
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClippedSurrogate(clip_low=-0.1, clip_high=0.2), "clip_low=-0.1"),
        (lambda: ClippedSurrogate(clip_low=1.1, clip_high=0.2), "clip_low=1.1"),
        (lambda: ClippedSurrogate(clip_low=0.2, clip_high=-0.2), "clip_high=-0.2"),
        (lambda: ClippedSurrogate(clip_low=0.2, clip_high=float("nan")), "clip_high=nan"),
        (lambda: ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=1.0), "must exceed 1"),
        (lambda: GSPO(clip_low=2.0, clip_high=0.2), "clip_low=2.0"),
        (lambda: ClipCov(clip_low=2.0, clip_high=0.2), "clip_low=2.0"),
        (lambda: CISPO(ratio_max=0.5), "ratio_max=0.5"),
        (lambda: CISPO(ratio_min=1.5, ratio_max=2.0), "ratio_min=1.5"),
        (lambda: CISPO(ratio_min=-0.5, ratio_max=2.0), "ratio_min=-0.5"),
        (lambda: SAPO(temperature_bad=0.0), "must be positive"),
        (lambda: SAPO(temperature_good=-1.0), "must be positive"),
        (lambda: DPPOTotalVariation(low=-0.1, high=0.1), "trust region"),
        (lambda: DPPOTotalVariation(low=0.1, high=-0.1), "trust region"),
        (lambda: DPPOTotalVariation(low=0.1, high=0.1, ratio_max=0.9), "trust region"),
        (lambda: GMPO(clip_low=-0.1), "between -clip_low"),
        (lambda: GMPO(clip_high=-0.1), "between -clip_low"),
        (lambda: ClippedValue(clip=-0.1), "must not be negative"),
    ],
)
def test_knobs_without_meaning_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_bounds_at_their_edges_are_not() -> None:
    """Each is taken as it is given, not moved to a safer value."""
    assert ClippedSurrogate(clip_low=0.0, clip_high=0.0).clip_low == 0.0
    assert ClippedSurrogate(clip_low=1.0, clip_high=5.0).clip_low == 1.0
    assert CISPO(ratio_min=1.0, ratio_max=1.0).ratio_min == 1.0
    assert CISPO(ratio_min=0.0, ratio_max=1.0).ratio_min == 0.0
    assert DPPOTotalVariation(low=0.0, high=0.0, ratio_max=1.0).low == 0.0
    assert GMPO(clip_low=0.0, clip_high=0.0).clip_high == 0.0
    assert ClippedValue(clip=0.0).clip == 0.0


def test_numbers_that_are_not_there_are_missed() -> None:
    bare = PolicyInputs(behavior_logprobs_T=OLD, advantages_T=torch.ones(4))
    for loss, message in (
        (PolicyGradient(kl_coefficient=0.1), "no reference_logprobs_T"),
        (PolicyGradient(entropy_coefficient=0.1), "gave no entropy_T"),
        (PolicyGradient(z_coefficient=0.1), "gave no router_logits_TLE"),
        (ClipCov(clip_low=0.2, clip_high=0.2), "needs selected_T"),
        (KLCov(), "needs selected_T"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(Outputs(logprobs_T=OLD), bare, LAYOUT, MASK)
    with pytest.raises(ValueError, match="no expert_fractions_LE"):
        PolicyGradient(balance_coefficient=0.1)(OUTPUTS, bare, LAYOUT, MASK)
    with pytest.raises(ValueError, match="value head"):
        ClippedValue()(Outputs(logprobs_T=OLD), ValueInputs(old_values_T=OLD, returns_T=OLD), LAYOUT, MASK)


def test_a_loss_asks_only_for_what_it_uses() -> None:
    assert PolicyGradient().want == Want(per_row=True)
    assert PolicyGradient(entropy_coefficient=-0.1).want == Want(entropy=True, per_row=True)
    assert PolicyGradient(z_coefficient=0.1).want == PolicyGradient(balance_coefficient=0.1).want
    assert PolicyGradient(z_coefficient=0.1).want == Want(router_logits=True)  # the head alone does not see them
    assert CrossEntropy().want == Want(per_row=True)
    assert ClippedValue().want == Want(values=True)


def test_a_reference_without_a_cost_is_measured_all_the_same() -> None:
    loss_T, metrics = PolicyGradient()(OUTPUTS, INPUTS, LAYOUT, MASK)
    torch.testing.assert_close(loss_T, -INPUTS.advantages_T * OUTPUTS.logprobs_T)
    assert metrics["kl/reference"].result > 0


KNOBS: list[tuple[PolicyLoss, dict[str, Any]]] = [
    (
        ClippedSurrogate(clip_low=0.2, clip_high=0.2),
        {"clip_low": 0.4, "clip_high": 0.4, "dual_clip": 1.5},
    ),
    (GSPO(clip_low=0.01, clip_high=0.01, dual_clip=None), {"clip_low": 0.5, "clip_high": 0.0, "dual_clip": 1.0001}),
    (ClipCov(clip_low=0.2, clip_high=0.2), {"clip_low": 0.4, "clip_high": 0.4, "dual_clip": 1.5}),
    (CISPO(ratio_min=0.5, ratio_max=1.5), {"ratio_min": 0.3, "ratio_max": 2.0}),
    (SAPO(), {"temperature_good": 2.0, "temperature_bad": 2.0}),
    (DRO(beta=0.1), {"beta": 0.2}),
    (DPPOTotalVariation(low=0.05, high=0.05, ratio_max=1.5), {"low": 0.5, "high": 0.5, "ratio_max": 9.0}),
    (KLCov(), {"coefficient": 0.5}),
    (GMPO(clip_low=0.1, clip_high=0.1), {"clip_low": 0.5, "clip_high": 0.5}),
]
TERMS = {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "balance_coefficient": 0.1, "z_coefficient": 0.1}


@pytest.mark.parametrize(
    ("loss", "knob", "value"),
    [(loss, knob, value) for loss, knobs in KNOBS for knob, value in (knobs | TERMS).items()],
)
def test_c10_every_knob_changes_the_loss(loss: PolicyLoss, knob: str, value: float) -> None:
    """C10: one advantage above and one below zero, ratios far out on both sides; each of them alone is looked at."""
    changed = replace(loss, **{knob: value})
    seen = False
    for sign in (1.0, -1.0):
        inputs = replace(INPUTS, advantages_T=sign * INPUTS.advantages_T)
        seen |= not torch.equal(loss(OUTPUTS, inputs, LAYOUT, MASK)[0], changed(OUTPUTS, inputs, LAYOUT, MASK)[0])
    for sign in (1.0, -1.0):  # a sequence's ratio moves only where all advantages agree
        inputs = replace(INPUTS, advantages_T=torch.full((4,), sign))
        outputs = replace(OUTPUTS, logprobs_T=OLD + sign * 0.3)
        seen |= not torch.equal(loss(outputs, inputs, LAYOUT, MASK)[0], changed(outputs, inputs, LAYOUT, MASK)[0])
        outputs = replace(OUTPUTS, logprobs_T=OLD - sign * 0.3)
        seen |= not torch.equal(loss(outputs, inputs, LAYOUT, MASK)[0], changed(outputs, inputs, LAYOUT, MASK)[0])
    assert seen


def test_c10_every_knob_is_in_the_list_above() -> None:
    for loss, knobs in KNOBS:
        assert {f.name for f in fields(loss)} == set(knobs) | set(TERMS) | {"kl_estimator"}


def test_c10_the_estimator_changes_the_loss() -> None:
    losses = {
        estimator: PolicyGradient(kl_coefficient=1.0, kl_estimator=estimator)(OUTPUTS, INPUTS, LAYOUT, MASK)[0]
        for estimator in (Estimator.K1, Estimator.K2, Estimator.K3)
    }
    assert not torch.equal(losses[Estimator.K1], losses[Estimator.K2])
    assert not torch.equal(losses[Estimator.K2], losses[Estimator.K3])


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_reads_only_what_is_trained(clip: float | None) -> None:
    mask_T = torch.tensor([True, False, True, False])
    results: list[tuple[torch.Tensor, torch.Tensor, dict[str, float]]] = []
    for bad in (0.0, float("nan"), float("inf")):

        def spoil(value: torch.Tensor, bad: float = bad) -> torch.Tensor:
            return torch.where(mask_T, value, bad)

        values_T = spoil(torch.tensor([0.5, 1.0, -1.0, 2.0])).requires_grad_()
        inputs = ValueInputs(old_values_T=spoil(torch.zeros(4)), returns_T=spoil(torch.ones(4)))
        loss_T, metrics = ClippedValue(clip=clip)(Outputs(logprobs_T=OLD, values_T=values_T), inputs, LAYOUT, mask_T)
        (loss_T * torch.tensor([0.5, 0.0, 2.0, 0.0])).sum().backward()
        assert values_T.grad is not None
        results.append((loss_T.detach(), values_T.grad, {k: m.result for k, m in metrics.items()}))
    for loss_T, gradient_T, metrics in results[1:]:
        assert torch.equal(loss_T, results[0][0])
        assert torch.equal(gradient_T, results[0][1])
        assert metrics == results[0][2]
    assert results[0][2]["value/mean"] == -0.25
    assert results[0][2]["value/error"] == pytest.approx((0.25 + 4) / 2)
    expected = [0.125, 0.0, 2.0, 0.0] if clip is None else [0.32, 0.0, 2.0, 0.0]
    torch.testing.assert_close(results[0][0], torch.tensor(expected))
    slope = [-0.25, 0.0, -4.0, 0.0] if clip is None else [0.0, 0.0, -4.0, 0.0]  # past its clip a value is left alone
    torch.testing.assert_close(results[0][1], torch.tensor(slope))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "loss",
    [
        ClippedSurrogate(clip_low=0.0, clip_high=0.0),
        CISPO(ratio_min=1.0, ratio_max=1.0),
        DPPOTotalVariation(low=0.0, high=0.0, ratio_max=1.0),
        GMPO(clip_low=0.0, clip_high=0.0),
        GSPO(clip_low=0.0, clip_high=0.0),
    ],
)
def test_a_ratio_on_its_bound_is_not_clipped(loss: PolicyLoss, sign: float) -> None:
    """On the policy's own data every ratio is exactly 1: nothing counts as clipped, and the gradient is REINFORCE's."""
    logprobs_T = OLD.clone().requires_grad_()
    inputs = PolicyInputs(behavior_logprobs_T=OLD, advantages_T=torch.full((4,), sign))
    loss_T, metrics = loss(Outputs(logprobs_T=logprobs_T), inputs, LAYOUT, MASK)
    loss_T.sum().backward()
    assert logprobs_T.grad is not None
    torch.testing.assert_close(logprobs_T.grad, torch.full((4,), -sign))
    assert all(m.result == 0.0 for name, m in metrics.items() if "clip_fraction" in name)


def test_published_values_are_the_defaults() -> None:
    assert (SAPO().temperature_good, SAPO().temperature_bad) == (1.0, 1.05)
    assert (GMPO().clip_low, GMPO().clip_high) == (0.4, 0.4)
    assert DPPOTotalVariation(low=0.1, high=0.1).ratio_max == 20.0
    assert KLCov().coefficient == 1.0
    assert CISPO(ratio_max=5.0).ratio_min == 0.0
    assert PolicyGradient().kl_estimator is Estimator.K3
    assert (PolicyGradient().kl_coefficient, PolicyGradient().entropy_coefficient) == (0.0, 0.0)


def test_a_value_inside_its_clip_is_not_counted_as_clipped() -> None:
    """Nor by a rounding error: the bounded value is the value itself there, to the bit."""
    generator = torch.Generator().manual_seed(0)
    old_T = torch.randn(1000, generator=generator)
    outputs = Outputs(logprobs_T=torch.zeros(1000), values_T=old_T + 0.1 * torch.rand(1000, generator=generator))
    inputs = ValueInputs(old_values_T=old_T, returns_T=torch.randn(1000, generator=generator))
    everywhere = torch.ones(1000, dtype=torch.bool)
    held_T, metrics = ClippedValue(clip=0.2)(outputs, inputs, Layout((1000,)), everywhere)
    assert metrics["value/clip_fraction"].result == 0.0
    assert torch.equal(held_T, ClippedValue()(outputs, inputs, Layout((1000,)), everywhere)[0])


def test_what_is_only_measured_is_not_differentiated() -> None:
    entropy_T, reference_T = torch.ones(4, requires_grad=True), OLD.clone().requires_grad_()
    outputs = Outputs(logprobs_T=OLD.clone().requires_grad_(), entropy_T=entropy_T)
    inputs = replace(INPUTS, reference_logprobs_T=reference_T)
    loss_T, metrics = PolicyGradient()(outputs, inputs, LAYOUT, MASK)
    loss_T.sum().backward()
    assert entropy_T.grad is None and reference_T.grad is None
    assert not any(isinstance(m.value, torch.Tensor) and m.value.requires_grad for m in metrics.values())
    assert metrics["policy/entropy"].result == 1.0


@pytest.mark.parametrize("loss", [loss for loss, _ in KNOBS if not isinstance(loss, CISPO)])
def test_a_token_without_an_advantage_is_never_clipped(loss: PolicyLoss) -> None:
    _, metrics = loss(OUTPUTS, replace(INPUTS, advantages_T=torch.zeros(4)), LAYOUT, MASK)
    assert all(m.result == 0.0 for name, m in metrics.items() if "clip_fraction" in name)


def test_a_ratio_at_its_bound_is_not_extreme() -> None:
    """`policy/ratio_extreme` counts what is outside of [1/2, 2]: neither 2 nor 1/2 is, and what is a bit further is."""
    bound = math.log(2.0)
    for gap, extreme in ((bound, 0.0), (-bound, 0.0), (math.nextafter(bound, 1.0), 1.0), (-bound - 1e-12, 1.0)):
        zero_T = torch.zeros(2, dtype=torch.float64)
        outputs = Outputs(logprobs_T=torch.tensor([gap, 9.0], dtype=torch.float64))
        inputs = PolicyInputs(behavior_logprobs_T=zero_T, advantages_T=zero_T + 1.0)
        _, metrics = PolicyGradient()(outputs, inputs, Layout((2,)), torch.tensor([True, False]))
        assert metrics["policy/ratio_extreme"].result == extreme, gap
