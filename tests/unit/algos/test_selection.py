"""The published fractions and bounds of selections are their defaults; one token is selected at the least."""

from __future__ import annotations

import numpy as np
import torch

from strop.algos import selection
from strop.algos.correction import importance_weights
from strop.types import Layout


def test_published_values_are_the_defaults() -> None:
    ramp_N = np.linspace(0.0, 10.0, 20_001)
    assert selection.top_entropy(ramp_N).sum() == 4000
    assert selection.kl_cov(ramp_N).sum() == 4
    chosen_N = selection.clip_cov(ramp_N, np.random.default_rng(0))
    assert chosen_N.sum() == 4
    everyone_N = selection.clip_cov(ramp_N, np.random.default_rng(0), fraction=1.0)
    assert (ramp_N[everyone_N].min() > 1.0) and (ramp_N[everyone_N].max() < 5.0)
    assert everyone_N.sum() == ((ramp_N > 1.0) & (ramp_N < 5.0)).sum()


def test_one_token_at_the_least() -> None:
    assert selection.top_entropy(np.array([0.1, 0.3, 0.2]), fraction=0.01).tolist() == [False, True, False]
    assert selection.kl_cov(np.array([0.1, 0.3, 0.2])).tolist() == [False, True, False]
    assert selection.clip_cov(np.array([0.1, 3.0]), np.random.default_rng(0)).tolist() == [False, True]
    assert selection.top_entropy(np.zeros(0)).tolist() == []
    assert selection.kl_cov(selection.covariances(np.zeros(0), np.zeros(0))).tolist() == []


def test_weights_are_capped_at_two_unless_told_otherwise() -> None:
    logprobs_T = torch.log(torch.tensor([0.5, 3.0]))
    weights_T, _ = importance_weights(logprobs_T, torch.zeros(2), Layout((2,)), torch.ones(2, dtype=torch.bool))
    torch.testing.assert_close(weights_T, torch.tensor([0.5, 2.0]))
