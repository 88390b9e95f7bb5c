"""What strop's algorithms give on the numbers that verl's own functions were run on, where the definitions agree.

`data/verl-0.9.1.json` holds values and gradients computed with verl 0.9.1's own functions, in float32, for eight
sequences of up to six tokens (one observation token inside), in groups of four, three and one. Where strop's definition
differs on purpose, the test says in what and compares the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from strop.algos import advantages, token_advantages
from strop.algos.correction import Divergence, Level, Outside, accepted, importance_weights
from strop.algos.kl import Estimator, estimate
from strop.algos.losses import (
    CISPO,
    DRO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    DPPOKullbackLeibler,
    DPPOTotalVariation,
    KLCov,
    PolicyGradient,
    PolicyInputs,
    PolicyLoss,
)
from strop.algos.selection import covariances, kl_cov
from strop.algos.sequence_losses import GMPO, GSPO, GSPOToken
from strop.algos.value_losses import ClippedValue, ValueInputs
from strop.algos.weighting import Weighting, token_weights
from strop.types import Layout, Metrics, Outputs

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "verl-0.9.1.json").read_text())
NAN = float("nan")
MASK_BT = np.array(GOLDEN["inputs"]["mask"]) > 0
COUNTS_B = MASK_BT.sum(axis=1)
MASK_T = MASK_BT.reshape(-1)
LAYOUT = Layout((6,) * 8)


def close(actual: ArrayLike, expected: ArrayLike, rtol: float = 2e-6, atol: float = 1e-6) -> None:
    """The golden numbers are float32's, printed to 7 digits."""
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=rtol, atol=atol)


def flat(name: str) -> np.ndarray:
    return np.array(GOLDEN["inputs"][name], np.float64).reshape(-1)


def tensor(name: str) -> Tensor:
    return torch.from_numpy(flat(name))


REWARDS_B = flat("token_rewards").reshape(8, 6).sum(axis=1)


def grouped(values_B: np.ndarray, fill: float = NAN) -> np.ndarray:
    """[8] -> [3, 4]: groups of four, three and one."""
    return np.array([values_B[:4], [*values_B[4:7], fill], [values_B[7], fill, fill, fill]])


def ungrouped(values_PG: np.ndarray) -> np.ndarray:
    return np.concatenate([values_PG[0], values_PG[1, :3], values_PG[2, :1]])


def golden_attempts(name: str) -> np.ndarray:
    """verl's advantage of each attempt: all its trained tokens hold the same one."""
    rows = GOLDEN["adv"][name]
    return np.array(rows["advantages"] if isinstance(rows, dict) else rows)[:, 0]


REWARDS_PG = grouped(REWARDS_B)
COUNTS_PG = grouped(COUNTS_B, 0).astype(np.int64)
SINGLE = 7  # verl gives the attempt that is alone in its group its raw reward; strop gives it 0


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("grpo", lambda: advantages.grpo(REWARDS_PG, scale_by_std=True)),
        ("grpo_vectorized", lambda: advantages.grpo(REWARDS_PG, scale_by_std=True)),
        ("dr_grpo(no std)", lambda: advantages.grpo(REWARDS_PG, scale_by_std=False)),
        ("rloo", lambda: advantages.rloo(REWARDS_PG)),
        ("opo", lambda: advantages.opo(REWARDS_PG, COUNTS_PG)),
    ],
)
def test_group_advantages(name: str, ours: Callable[[], np.ndarray]) -> None:
    ours_B = ungrouped(ours())
    close(ours_B[:SINGLE], golden_attempts(name)[:SINGLE])
    assert ours_B[SINGLE] == 0.0


def test_rloo_vectorized_gives_a_single_attempt_zero_too() -> None:
    close(ungrouped(advantages.rloo(REWARDS_PG)), golden_attempts("rloo_vectorized"))


def test_gpg_counts_informative_attempts_where_verl_counts_nonzero_rewards() -> None:
    # verl: alpha = 8 attempts / 5 rewards that are not 0. The paper, and strop: 8 attempts / 7 in informative groups.
    ours_B = ungrouped(advantages.gpg(REWARDS_PG)) * (8 / 5) / (8 / 7)
    close(ours_B[:SINGLE], golden_attempts("gpg")[:SINGLE])


def test_leave_one_out_max_of_tied_groups_is_zero() -> None:
    tied_PG = REWARDS_B.reshape(2, 4)
    assert not np.array(GOLDEN["adv"]["grpo_passk"]["advantages"]).any()
    assert not advantages.leave_one_out_max(tied_PG).any()


def test_remax() -> None:
    ours_PG = advantages.remax(REWARDS_B[:, None], flat("reward_baselines"))
    close(ours_PG[:, 0], golden_attempts("remax"))


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("reinforce_plus_plus_baseline", lambda: ungrouped(advantages.grpo(REWARDS_PG, scale_by_std=False))),
        ("gdpo", lambda: ungrouped(advantages.grpo(REWARDS_PG, scale_by_std=True))),
    ],
)
def test_whitening_over_tokens_of_group_advantages(name: str, before: Callable[[], np.ndarray]) -> None:
    # Given verl's value for the attempt that is alone, the rest of these two methods is one whitening.
    before_B = np.where(np.arange(8) == SINGLE, REWARDS_B, before())
    close(advantages.whiten(before_B, COUNTS_B), golden_attempts(name))


def test_reinforce_plus_plus() -> None:
    ours_T = token_advantages.reinforce_plus_plus(flat("token_rewards"), MASK_T, LAYOUT.lengths_S)
    expected = GOLDEN["adv"]["reinforce_plus_plus"]
    close(ours_T.reshape(8, 6), np.where(MASK_BT, expected["advantages"], 0.0))
    returns_T = token_advantages.returns_to_go(flat("token_rewards"), MASK_T, LAYOUT.lengths_S)
    close(returns_T.reshape(8, 6), np.where(MASK_BT, expected["returns"], 0.0))


def test_gae_and_whitening() -> None:
    advantages_T, returns_T = token_advantages.gae(
        flat("token_rewards"), flat("values"), MASK_T, LAYOUT.lengths_S, discount=1.0, trace=0.95
    )
    expected = GOLDEN["adv"]["gae"]
    close(returns_T.reshape(8, 6), np.where(MASK_BT, expected["returns"], 0.0))
    whitened_BT = advantages.whiten(advantages_T, MASK_T).reshape(8, 6)
    close(whitened_BT, np.where(MASK_BT, expected["advantages"], 0.0))


def test_optimal_token_baseline_counts_trained_tokens_as_verl_does_for_tool_turns() -> None:
    def without_last(values: np.ndarray) -> np.ndarray:  # the group of one: strop gives it 0
        return values.reshape(8, 6)[:SINGLE].reshape(-1)

    old_T, squares_T = (np.concatenate([without_last(flat(n)), np.zeros(6)]) for n in ("old", "sum_pi_sq"))
    mask_T = np.concatenate([without_last(MASK_T), np.zeros(6, bool)])
    ours_T = token_advantages.optimal_token_baseline(
        grouped(REWARDS_B)[:2], old_T, squares_T, mask_T, np.full((2, 4), 6)
    )
    expected_BT = np.where(MASK_BT, GOLDEN["adv"]["tir_optimal_token_baseline"]["advantages"], 0.0)
    close(without_last(ours_T), without_last(expected_BT), rtol=2e-5, atol=2e-6)


TOKEN_MEAN = torch.full((48,), 1 / 30, dtype=torch.float64)
SEQUENCE_MEAN = torch.from_numpy(
    np.repeat(token_weights(Weighting.SEQUENCE_MEAN_TOKEN_MEAN, COUNTS_B, horizon=None), 6)
)
POLICY_CASES: list[tuple[str, PolicyLoss, Tensor]] = [
    ("vanilla|token-mean", ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=3.0), TOKEN_MEAN),
    ("vanilla|seq-mean-token-mean", ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=3.0), SEQUENCE_MEAN),
    ("bypass_mode|token-mean", ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=3.0), TOKEN_MEAN),
    ("dppo_tv|token-mean", DPPOTotalVariation(low=0.2, high=0.28, ratio_max=3.0), TOKEN_MEAN),
    ("dppo_kl|token-mean", DPPOKullbackLeibler(low=0.2, high=0.28, ratio_max=3.0), TOKEN_MEAN),
    ("gspo|token-mean", GSPO(clip_low=0.2, clip_high=0.28), TOKEN_MEAN),
    ("gspo|token-mean", GSPOToken(clip_low=0.2, clip_high=0.28), TOKEN_MEAN),
    ("sapo|token-mean", SAPO(), SEQUENCE_MEAN),  # verl forces this weighting
    ("gpg|token-mean", PolicyGradient(), TOKEN_MEAN),
    ("clip_cov|token-mean", ClipCov(clip_low=0.2, clip_high=0.28), TOKEN_MEAN),
    ("kl_cov|token-mean", KLCov(coefficient=0.1), TOKEN_MEAN),
    ("geo_mean|token-mean", GMPO(clip_low=0.2, clip_high=0.28), SEQUENCE_MEAN),
    ("dro|token-mean", DRO(beta=0.1), TOKEN_MEAN),
    ("cispo|token-mean", CISPO(ratio_min=0.8, ratio_max=1.28), TOKEN_MEAN),
]


def selected(loss: PolicyLoss) -> Tensor | None:
    """verl's own choice on these numbers: no covariance between 1 and 5, and the one largest covariance."""
    if isinstance(loss, ClipCov):
        return torch.zeros(48, dtype=torch.bool)
    if isinstance(loss, KLCov):
        chosen_T = np.zeros(48, bool)
        chosen_T[MASK_T] = kl_cov(covariances(flat("logp")[MASK_T], flat("adv")[MASK_T]))
        assert chosen_T.sum() == 1
        return torch.from_numpy(chosen_T)
    return None


def run_policy(loss: PolicyLoss, weights_T: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    logprobs_T = tensor("logp").requires_grad_()
    inputs = PolicyInputs(behavior_logprobs_T=tensor("old"), advantages_T=tensor("adv"), selected_T=selected(loss))
    mask_T = torch.from_numpy(MASK_T)
    loss_T, metrics = loss(Outputs(logprobs_T=logprobs_T), inputs, LAYOUT, mask_T)
    total = (torch.where(mask_T, weights_T, 0.0) * loss_T).sum()
    total.backward()
    assert logprobs_T.grad is not None
    return total.detach(), logprobs_T.grad, metrics


@pytest.mark.parametrize(("name", "loss", "weights_T"), POLICY_CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_policy_loss_value_and_gradient(name: str, loss: PolicyLoss, weights_T: Tensor) -> None:
    value, gradient_T, _ = run_policy(loss, weights_T)
    close(value, GOLDEN["policy"][name]["loss"])
    close(gradient_T.reshape(8, 6), GOLDEN["policy"][name]["grad"])


@pytest.mark.parametrize(
    ("name", "loss", "ours"),
    [
        ("vanilla|token-mean", ClippedSurrogate(clip_low=0.2, clip_high=0.28), ["policy/clip_fraction"]),
        (
            "dppo_tv|token-mean",
            DPPOTotalVariation(low=0.2, high=0.28),
            ["policy/clip_fraction_low", "policy/clip_fraction_high"],
        ),
        (
            "dppo_kl|token-mean",
            DPPOKullbackLeibler(low=0.2, high=0.28),
            ["policy/clip_fraction_low", "policy/clip_fraction_high"],
        ),
        ("gspo|token-mean", GSPO(clip_low=0.2, clip_high=0.28), ["policy/clip_fraction"]),
        (
            "cispo|token-mean",
            CISPO(ratio_min=0.8, ratio_max=1.28),
            ["policy/clip_fraction_low", "policy/clip_fraction_high"],
        ),
    ],
)
def test_clip_fractions(name: str, loss: PolicyLoss, ours: list[str]) -> None:
    _, _, metrics = run_policy(loss, TOKEN_MEAN)
    measured = sum(metrics[key].result for key in ours)
    assert measured == pytest.approx(GOLDEN["policy"][name]["metrics"]["actor/pg_clipfrac"], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("k1", Estimator.K1),
        ("abs", Estimator.ABS),
        ("k2", Estimator.K2),
        ("k3", Estimator.K3),
        ("k1+", Estimator.K1_STRAIGHT_THROUGH),
        ("k3+", Estimator.K3_STRAIGHT_THROUGH),
        ("abs+", Estimator.ABS_STRAIGHT_THROUGH),
    ],
)
def test_kl_estimators(name: str, estimator: Estimator) -> None:
    logprobs_T = tensor("logp").requires_grad_()
    kl_T = estimate(estimator, logprobs_T, tensor("ref"), torch.from_numpy(MASK_T))
    kl_T.sum().backward()
    assert logprobs_T.grad is not None
    expected_BT = np.where(MASK_BT, GOLDEN["kl"][name]["value"], 0.0)
    close(kl_T.detach().reshape(8, 6), expected_BT)
    close(logprobs_T.grad.reshape(8, 6), GOLDEN["kl"][name]["grad"])


@pytest.mark.parametrize(
    ("name", "weighting"),
    [
        ("token-mean", Weighting.TOKEN_MEAN),
        ("token-sum", Weighting.TOKEN_SUM),
        ("seq-mean-token-sum", Weighting.SEQUENCE_MEAN_TOKEN_SUM),
        ("seq-mean-token-sum-norm", Weighting.CONSTANT_HORIZON),
        ("seq-mean-token-mean", Weighting.SEQUENCE_MEAN_TOKEN_MEAN),
    ],
)
def test_weightings(name: str, weighting: Weighting) -> None:
    weights_B = token_weights(weighting, COUNTS_B, horizon=6)  # verl's horizon: the padded width
    total = (np.where(MASK_BT, flat("logp").reshape(8, 6), 0.0) * weights_B[:, None]).sum()
    assert total == pytest.approx(GOLDEN["agg"][name], rel=1e-6)


def test_value_loss() -> None:
    inputs = ValueInputs(old_values_T=tensor("values"), returns_T=torch.full((48,), 0.5, dtype=torch.float64))
    mask_T = torch.from_numpy(MASK_T)
    outputs = Outputs(logprobs_T=torch.zeros(48), values_T=tensor("values") + 0.3)
    loss_T, metrics = ClippedValue(clip=0.2)(outputs, inputs, LAYOUT, mask_T)
    assert float(loss_T.sum()) / 30 == pytest.approx(GOLDEN["value_loss"]["loss"], rel=1e-6)
    assert metrics["value/clip_fraction"].result == pytest.approx(GOLDEN["value_loss"]["clipfrac"], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("is|token|1.1", {"level": Level.TOKEN, "high": 1.1}),
        ("is|sequence|1.5", {"level": Level.SEQUENCE_SUM, "high": 1.5}),
        ("is|token|0.9_1.1", {"level": Level.TOKEN, "low": 0.9, "high": 1.1, "outside": Outside.ZERO}),
    ],
)
def test_importance_weights(name: str, bounds: dict[str, Any]) -> None:
    weights_T, _ = importance_weights(tensor("old"), tensor("rollout"), LAYOUT, torch.from_numpy(MASK_T), **bounds)
    close(weights_T.reshape(8, 6), GOLDEN["rollout_corr"][name])


@pytest.mark.parametrize(
    ("name", "divergence", "level", "bounds"),
    [
        # verl's k1 is -log(ratio), held between logarithms: the bounds on the ratio are its bounds turned over.
        ("rs|token_k1|0.9_1.1", Divergence.RATIO, Level.TOKEN, {"low": 1 / 1.1, "high": 1 / 0.9}),
        ("rs|seq_mean_k1|0.97_1.03", Divergence.RATIO, Level.SEQUENCE_MEAN, {"low": 1 / 1.03, "high": 1 / 0.97}),
        ("rs|seq_sum_k3|0.02", Divergence.K3, Level.SEQUENCE_SUM, {"high": 0.02}),
        ("rs|seq_max_k2|0.01", Divergence.K2, Level.SEQUENCE_MAX, {"high": 0.01}),
    ],
)
def test_rejection(name: str, divergence: Divergence, level: Level, bounds: dict[str, float]) -> None:
    kept_T, _ = accepted(
        tensor("old"), tensor("rollout"), LAYOUT, torch.from_numpy(MASK_T), divergence=divergence, level=level, **bounds
    )
    np.testing.assert_array_equal(kept_T.reshape(8, 6), np.array(GOLDEN["rollout_corr"][name]) > 0)


@pytest.mark.parametrize(("ours", "theirs"), [("policy/kl_k3", "k3_kl")])
def test_divergence_from_the_sampler(ours: str, theirs: str) -> None:
    inputs = PolicyInputs(behavior_logprobs_T=tensor("rollout"), advantages_T=tensor("adv"))
    _, metrics = PolicyGradient()(Outputs(logprobs_T=tensor("old")), inputs, LAYOUT, torch.from_numpy(MASK_T))
    assert metrics[ours].result == pytest.approx(GOLDEN["offpolicy_metrics"][theirs], abs=1e-6)
