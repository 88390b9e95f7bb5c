"""The four names that the GRPO loop and the packer call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strop.algos import advantages, filters, losses
from strop.algos.weighting import Weighting, token_weights
from strop.types import Layout, Outputs

NAN = float("nan")


def test_a12_noise_is_no_signal_and_an_outlier_stays_bounded() -> None:
    noise = np.array([[0.3, 0.1 + 0.2, np.float32(0.3), 0.3]])
    assert np.array_equal(advantages.grpo(noise, scale_by_std=True), np.zeros((1, 4)))
    outlier = np.array([[0.35] * 7 + [-0.25]])
    assert advantages.grpo(outlier, scale_by_std=False)[0, -1] == pytest.approx(-0.525)
    assert advantages.grpo(outlier, scale_by_std=True)[0, -1] == pytest.approx(-7 / 8**0.5, rel=1e-4)


def test_a14_missing_is_not_zero() -> None:
    rewards = np.array([[1.0, NAN, 0.0], [NAN, NAN, 1.0], [NAN, NAN, NAN], [2.0, 2.0, NAN]])
    expected = np.array([[0.5, NAN, -0.5], [NAN, NAN, 0.0], [NAN, NAN, NAN], [0.0, 0.0, NAN]])
    np.testing.assert_array_equal(advantages.grpo(rewards, scale_by_std=False), expected)
    np.testing.assert_array_equal(filters.informative(rewards), [True, False, False, False])


def test_every_weighting_on_a04_rows() -> None:
    counts = np.array([4, 2, 0])
    for weighting, expected in {
        Weighting.TOKEN_MEAN: [1 / 6, 1 / 6, 0],
        Weighting.TOKEN_SUM: [1, 1, 0],
        Weighting.SEQUENCE_MEAN_TOKEN_MEAN: [1 / 8, 1 / 4, 0],
        Weighting.SEQUENCE_MEAN_TOKEN_SUM: [1 / 2, 1 / 2, 0],
        Weighting.CONSTANT_HORIZON: [1 / 8, 1 / 8, 0],
    }.items():
        np.testing.assert_allclose(token_weights(weighting, counts, horizon=4), expected)
        assert not token_weights(weighting, np.zeros(2, int), horizon=4).any()


def test_a27_dual_clip_bounds_and_reports() -> None:
    loss = losses.ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    inputs = losses.PolicyInputs(behavior_logprobs_T=torch.zeros(2), advantages_T=torch.tensor([-1.0, 1.0]))
    outputs = Outputs(logprobs_T=torch.full((2,), float(np.log(10.0))))
    loss_T, metrics = loss(outputs, inputs, Layout((2,)), torch.tensor([True, True]))
    torch.testing.assert_close(loss_T, torch.tensor([3.0, -1.2]))
    assert metrics["policy/clip_fraction_dual"].result == 0.5
    assert metrics["policy/clip_fraction_high"].result == 0.5
    assert metrics["policy/gap_max"].result == pytest.approx(np.log(10.0))
