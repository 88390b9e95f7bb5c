"""Small numbers worked out by hand: what each advantage and each loss gives, and the slope of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from strop.algos import advantages
from strop.algos.losses import (
    CISPO,
    DRO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    DPPOKullbackLeibler,
    DPPOTotalVariation,
    ImportanceSampling,
    KLCov,
    PolicyGradient,
    PolicyInputs,
    PolicyLoss,
)
from strop.algos.sequence_losses import GMPO, GSPO, GSPOToken
from strop.algos.token_advantages import optimal_token_baseline
from strop.types import Layout, Outputs

ONE_RIGHT = np.array([[1.0, 0.0, 0.0]])  # mean 1/3, deviation sqrt(1/3)
PAIR = np.array([[1.0, 0.0]])
COUNTS = np.array([[1, 3]])


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (lambda: advantages.grpo(ONE_RIGHT, scale_by_std=False), [[2 / 3, -1 / 3, -1 / 3]]),
        (lambda: advantages.grpo(ONE_RIGHT, scale_by_std=True, eps=0.0), [[2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5]]),
        (lambda: advantages.grpo(ONE_RIGHT, scale_by_std=True, eps=1.0), np.array([[2, -1, -1]]) / 3 / (3**-0.5 + 1)),
        (lambda: advantages.rloo(ONE_RIGHT), [[1.0, -0.5, -0.5]]),
        (lambda: advantages.remax(PAIR, np.array([0.25])), [[0.75, -0.25]]),
        (lambda: advantages.opo(PAIR, COUNTS), [[0.75, -0.25]]),  # baseline 1 token of 4
        (
            lambda: advantages.gpg(np.array([[1.0, 0.0], [1.0, 1.0]])),
            [[1.0, -1.0], [0.0, 0.0]],
        ),  # 4 / 2
        (lambda: advantages.gpg(PAIR, scale_by_std=True, eps=0.5), [[0.5 / (0.5**0.5 + 0.5), -0.5 / (0.5**0.5 + 0.5)]]),
        (
            lambda: advantages.gdpo([PAIR, np.zeros((1, 2))]),
            [[0.5**0.5, -(0.5**0.5)]],
        ),
        (lambda: advantages.leave_one_out_max(np.array([[1.0, 0.25, 0.0]]), scale_by_std=False), [[0.75, 0.0, 0.0]]),
        # Of the three pairs two hold the right one: R = 2/3, deviation sqrt(2)/3. A wrong one is in two pairs.
        (lambda: advantages.pass_at_k(ONE_RIGHT, 2), np.array([[1 / 3, -1 / 6, -1 / 6]]) / (2**0.5 / 3)),
        (lambda: advantages.pass_at_k(PAIR, 1), [[1.0, -1.0]]),
        # 0.5 once and -0.5 three times: mean -0.25, deviation 0.5.
        (lambda: advantages.reinforce_plus_plus_baseline(PAIR, COUNTS), [[1.5, -0.5]]),
    ],
)
def test_advantages(ours: Callable[[], np.ndarray], expected: object) -> None:
    np.testing.assert_allclose(ours(), np.asarray(expected), rtol=2e-6)


def test_optimal_token_baseline() -> None:
    """p 0.5 of (0.5, 0.5): W 0.5. p 0.9 of (0.9, 0.1): W 0.02. The baseline is 0.5 / 0.52."""
    ours_T = optimal_token_baseline(
        PAIR, np.log([0.5, 0.9]), np.array([0.5, 0.82]), np.array([True, True]), np.array([[1, 1]])
    )
    np.testing.assert_allclose(ours_T, [1 - 0.5 / 0.52, -0.5 / 0.52], rtol=1e-6)


X = math.log(1.5)
P = math.log(0.6)
SIGMOID = 1 / (1 + math.exp(-0.5))
COLD = 1 / (1 + math.exp(-1.05 * 0.5))

# One token whose probability rose from 0.4 to 0.6: ratio 1.5. Loss and slope where A = 2, then where A = -2.
LOSSES: list[tuple[PolicyLoss, tuple[float, float], tuple[float, float]]] = [
    (ClippedSurrogate(clip_low=0.2, clip_high=0.28), (-2.56, 0.0), (3.0, 3.0)),
    (ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=1.4), (-2.56, 0.0), (2.8, 0.0)),
    (ClippedSurrogate(clip_low=0.2, clip_high=0.6), (-3.0, -3.0), (3.0, 3.0)),
    (ImportanceSampling(), (-3.0, -3.0), (3.0, 3.0)),
    (PolicyGradient(), (-2 * P, -2.0), (2 * P, 2.0)),
    (CISPO(ratio_max=1.3), (-2.6 * P, -2.6), (2.6 * P, 2.6)),
    (
        SAPO(),
        (-8 * SIGMOID, -12 * SIGMOID * (1 - SIGMOID)),
        (8 / 1.05 * COLD, 12 * COLD * (1 - COLD)),
    ),
    (DRO(beta=0.5), (-2 * P + 0.25 * X**2, -2 + 0.5 * X), (2 * P + 0.25 * X**2, 2 + 0.5 * X)),
    (DPPOTotalVariation(low=0.1, high=0.1), (0.0, 0.0), (3 * P, 3.0)),  # 0.2 apart, and A = -2 leads back
    (DPPOTotalVariation(low=0.1, high=0.25), (-3 * P, -3.0), (3 * P, 3.0)),
    (DPPOTotalVariation(low=0.1, high=0.25, ratio_max=1.2), (-2.4 * P, -2.4), (2.4 * P, 2.4)),
    (DPPOKullbackLeibler(low=0.1, high=0.05), (0.0, 0.0), (3 * P, 3.0)),  # 0.2 log 1.5 = 0.0811
    (DPPOKullbackLeibler(low=0.1, high=0.1), (-3 * P, -3.0), (3 * P, 3.0)),
    (ClipCov(clip_low=0.2, clip_high=0.6), (0.0, 0.0), (0.0, 0.0)),
    (KLCov(coefficient=0.7), (-3 + 0.7 * X, -2.3), (3 + 0.7 * X, 3.7)),
    (GSPO(clip_low=0.2, clip_high=0.28), (-2.56, 0.0), (3.0, 3.0)),
    (GSPOToken(clip_low=0.2, clip_high=0.6), (-3.0, -3.0), (3.0, 3.0)),
    (GMPO(), (-2 * math.exp(0.4), 0.0), (3.0, 3.0)),
]


@pytest.mark.parametrize(("loss", "good", "bad"), LOSSES, ids=lambda v: type(v).__name__)
def test_losses(loss: PolicyLoss, good: tuple[float, float], bad: tuple[float, float]) -> None:
    for advantage, (value, slope) in ((2.0, good), (-2.0, bad)):
        logprobs_T = torch.tensor([P], dtype=torch.float64, requires_grad=True)
        inputs = PolicyInputs(
            behavior_logprobs_T=torch.tensor([math.log(0.4)], dtype=torch.float64),
            advantages_T=torch.tensor([advantage], dtype=torch.float64),
            selected_T=torch.tensor([True]),
        )
        loss_T, _ = loss(Outputs(logprobs_T=logprobs_T), inputs, Layout((1,)), torch.tensor([True]))
        loss_T.sum().backward()
        assert logprobs_T.grad is not None
        assert float(loss_T.detach()[0]) == pytest.approx(value, abs=1e-12)
        assert float(logprobs_T.grad[0]) == pytest.approx(slope, abs=1e-12)


def test_selected_tokens_are_told() -> None:
    """Three of five tokens selected, one of them masked: half of the four that count."""
    mask_T = torch.tensor([True, True, True, True, False])
    inputs = PolicyInputs(
        behavior_logprobs_T=torch.full((5,), -1.0),
        advantages_T=torch.ones(5),
        selected_T=torch.tensor([True, False, False, True, True]),
    )
    for loss in (ClipCov(clip_low=0.2, clip_high=0.2), KLCov()):
        _, metrics = loss(Outputs(logprobs_T=torch.full((5,), -1.0)), inputs, Layout((5,)), mask_T)
        assert metrics["policy/selected_fraction"].result == 0.5


def test_gmpo_tells_what_it_clipped() -> None:
    """Log ratios -0.5, 0.5, 0.5, -0.5, 0.2 with bounds 0.4: clipped where the advantage leads further out."""
    x_T = torch.tensor([-0.5, 0.5, 0.5, -0.5, 0.2], dtype=torch.float64)
    inputs = PolicyInputs(
        behavior_logprobs_T=torch.full((5,), -2.0, dtype=torch.float64),
        advantages_T=torch.tensor([-0.5, 0.5, 0.5, 0.5, -0.5], dtype=torch.float64),
    )
    _, metrics = GMPO()(Outputs(logprobs_T=x_T - 2.0), inputs, Layout((5,)), torch.ones(5, dtype=torch.bool))
    assert metrics["policy/clip_fraction_low"].result == pytest.approx(0.2)
    assert metrics["policy/clip_fraction_high"].result == pytest.approx(0.4)
