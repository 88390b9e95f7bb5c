"""Faults that other systems had, each as the smallest numbers that show it, with the value that is right.

The rows are called after the casebook: A01 and so on are wrong mathematics that nobody noticed, C and G are wrong
settings and degenerate batches, J a server's losses.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algos import advantages, filters, token_advantages
from strop.algos.losses import CISPO, ClippedSurrogate, CrossEntropy, ImportanceSampling, PolicyGradient, PolicyInputs
from strop.algos.sequence_losses import GSPO
from strop.algos.value_losses import ClippedValue, ValueInputs
from strop.algos.weighting import Weighting, token_weights
from strop.types import Layout, Metric, Outputs, Reduction, merge_metrics, results

NAN = float("nan")


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def policy_inputs(behavior: Tensor, advantages: Tensor) -> PolicyInputs:
    return PolicyInputs(behavior_logprobs_T=behavior, advantages_T=advantages)


def test_a01_a_split_into_micro_batches_is_the_whole() -> None:
    """Token losses (4) and (1, 1, 1), token mean: 1.75, value and gradient, for every split."""
    for cut in range(5):
        logprobs_T = floats(-4, -1, -1, -1).requires_grad_()
        weight = float(token_weights(Weighting.TOKEN_MEAN, np.array([1, 3]), horizon=None)[0])
        total = 0.0
        for part in (logprobs_T[:cut], logprobs_T[cut:]):
            loss_T, _ = CrossEntropy()(Outputs(logprobs_T=part), None, Layout((len(part),)), ones(len(part)))
            (loss_T * weight).sum().backward()
            total += float((loss_T.detach() * weight).sum())
        assert total == pytest.approx(1.75)
        assert logprobs_T.grad is not None
        torch.testing.assert_close(logprobs_T.grad, torch.full((4,), -0.25, dtype=torch.float64))


def test_a03_a07_what_is_dropped_is_in_no_denominator() -> None:
    assert float(8 * token_weights(Weighting.TOKEN_MEAN, np.array([4]), horizon=None)[0]) == 2.0
    for weighting in Weighting:
        assert token_weights(weighting, np.array([0, 0]), horizon=4).tolist() == [0.0, 0.0]
        assert token_weights(weighting, np.array([], np.int64), horizon=4).tolist() == []
    # A07: lengths 4 (cut short, dropped) and 2, all losses 1.
    assert float((token_weights(Weighting.TOKEN_MEAN, np.array([0, 2]), horizon=None) * [4, 2]).sum()) == 1.0


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (Weighting.SEQUENCE_MEAN_TOKEN_SUM, 4.0),
        (Weighting.SEQUENCE_MEAN_TOKEN_MEAN, 1.5),
        (Weighting.TOKEN_MEAN, 8 / 6),
        (Weighting.TOKEN_SUM, 8.0),
        (Weighting.CONSTANT_HORIZON, 1.0),  # A05: the same on one rank and on two, since nobody divides again
    ],
)
def test_a04_a05_a_name_is_its_formula(weighting: Weighting, expected: float) -> None:
    """Rows (1, 1, 1, 1) and (2, 2), horizon 4."""
    weights_N = token_weights(weighting, np.array([4, 2]), horizon=4)
    assert float(weights_N @ [4.0, 4.0]) == pytest.approx(expected)


def test_a06_a_fully_masked_row_is_not_there() -> None:
    """Loss ((2, 2, 9), (5, 5, 5)), mask ((1, 1, 0), (0, 0, 0))."""
    sums, counts = np.array([4.0, 0.0]), np.array([2, 0])
    assert float(token_weights(Weighting.TOKEN_MEAN, counts, horizon=None) @ sums) == 2.0
    assert float(token_weights(Weighting.SEQUENCE_MEAN_TOKEN_SUM, counts, horizon=None) @ sums) == 4.0


@pytest.mark.parametrize("horizon", [None, 0, -3])
def test_a05_a_missing_horizon_is_an_error(horizon: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        token_weights(Weighting.CONSTANT_HORIZON, np.array([4]), horizon=horizon)


def test_a09_a10_metrics_are_means_over_tokens_not_over_batches() -> None:
    """A sum of 2 over 1 token and a sum of 3 over 3: 1.25, however often the batch was cut."""
    parts = [
        CrossEntropy()(Outputs(logprobs_T=row), None, Layout((len(row),)), ones(len(row)))[1]
        for row in (floats(-2), floats(-1, -1, -1))
    ]
    assert results(merge_metrics(parts))["loss/nll"] == 1.25


def test_a12_a_residue_is_not_a_deviation() -> None:
    """Rewards 0.35 seven times and -0.25: bounded. Seven equal ones, or equal up to float noise: nothing."""
    outlier_PG = np.array([[0.35] * 7 + [-0.25]])
    assert advantages.rloo(outlier_PG)[0, -1] == pytest.approx(-0.6)
    assert advantages.grpo(outlier_PG, scale_by_std=False)[0, -1] == pytest.approx(-0.525)
    assert advantages.grpo(outlier_PG, scale_by_std=True)[0, -1] == pytest.approx(-7 / math.sqrt(8), rel=1e-4)
    for noise in ([0.1 + 0.2, 0.3, 0.3], [np.float64(np.float32(0.35)), 0.35, 0.35], [1e9, 1e9 + 64, 1e9]):
        noise_PG = np.array([noise])
        assert not filters.informative(noise_PG).any()
        for ours_PG in (
            advantages.grpo(noise_PG, scale_by_std=True, eps=0.0 + 1e-12),
            advantages.grpo(noise_PG, scale_by_std=False),
            advantages.rloo(noise_PG),
            advantages.opo(noise_PG, np.array([[3, 5, 2]])),
            advantages.gpg(noise_PG),
            advantages.gdpo([noise_PG]),
            advantages.leave_one_out_max(noise_PG),
            advantages.pass_at_k(noise_PG - noise_PG.max(), 2),
            advantages.whiten(noise_PG, np.ones((1, 3))),
            advantages.reinforce_plus_plus_baseline(noise_PG, np.array([[3, 5, 2]])),
        ):
            assert ours_PG.tolist() == [[0.0, 0.0, 0.0]]


def test_a12_a_small_difference_is_still_a_difference() -> None:
    assert filters.informative(np.array([[0.3, 0.30001]])).all()
    assert advantages.grpo(np.array([[0.3, 0.30001]]), scale_by_std=True)[0, 1] == pytest.approx(0.7071, rel=0.2)


def test_a13_each_group_has_its_own_deviation() -> None:
    ours_PG = advantages.grpo(np.array([[0.0, 1.0], [0.0, 10.0]]), scale_by_std=True)
    np.testing.assert_allclose(ours_PG, [[-0.7071, 0.7071]] * 2, atol=1e-4)


def test_a14_missing_is_not_zero() -> None:
    """Of three attempts one has no reward: it takes no part and gets no advantage; a group of such gets none at all."""
    rewards_PG = np.array([[1.0, NAN, 0.0], [NAN, NAN, 1.0], [NAN, NAN, NAN], [2.0, 2.0, NAN]])
    expected = [[0.5, NAN, -0.5], [NAN, NAN, 0.0], [NAN, NAN, NAN], [0.0, 0.0, NAN]]
    np.testing.assert_array_equal(advantages.grpo(rewards_PG, scale_by_std=False), expected)
    assert filters.informative(rewards_PG).tolist() == [True, False, False, False]
    # For GDPO an attempt without one of its rewards has none.
    gdpo_PG = advantages.gdpo([np.array([[1.0, 0.0, 1.0]]), np.array([[1.0, 0.0, NAN]])])
    assert np.isnan(gdpo_PG[0, 2]) and gdpo_PG[0, 0] > 0 > gdpo_PG[0, 1]


def test_a15_an_advantage_is_never_broadcast() -> None:
    for wrong in (floats(1.0), floats(1.0, -1.0, 0.0), floats(1.0, -1.0)[:, None]):
        with pytest.raises(ValueError, match="advantages_T has shape"):
            PolicyGradient()(
                Outputs(logprobs_T=floats(-1, -2)), policy_inputs(floats(-1, -2), wrong), Layout((2,)), ones(2)
            )


def test_a20_an_observation_does_not_end_an_episode() -> None:
    """Rewards (0, 0, 0, 0, 1), mask (1, 0, 0, 1, 1), discount 0.5: before whitening (.25, 0, 0, .5, 1)."""
    mask_T = np.array([1, 0, 0, 1, 1]) > 0
    for tool_reward in (0.0, 7.0, NAN):
        rewards_T = np.array([0.0, tool_reward, 0.0, 0.0, 1.0])
        returns_T = token_advantages.returns_to_go(rewards_T, mask_T, np.array([5]), discount=0.5)
        assert returns_T.tolist() == [0.25, 0.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize(("trace", "expected"), [(1.0, [0.5, 0, 0, 0.8, 0.9]), (0.5, [-0.125, 0, 0, 0.35, 0.9])])
def test_a21_nothing_is_bootstrapped_from_a_tool(trace: float, expected: list[float]) -> None:
    rewards_T, mask_T = np.array([0.0, 0, 0, 0, 1]), np.array([1, 0, 0, 1, 1]) > 0
    for tool_value in (9.0, NAN):
        values_T = np.array([0.5, tool_value, tool_value, 0.2, 0.1])
        ours_T, returns_T = token_advantages.gae(rewards_T, values_T, mask_T, np.array([5]), trace=trace)
        np.testing.assert_allclose(ours_T, expected)
        np.testing.assert_allclose(returns_T[mask_T], np.array(expected)[mask_T] + [0.5, 0.2, 0.1])


@pytest.mark.parametrize(("value", "loss", "fraction"), [(2.0, 0.5, 0.0), (0.9, 0.045, 1.0)])
def test_a25_the_half_of_the_value_loss(value: float, loss: float, fraction: float) -> None:
    inputs = ValueInputs(old_values_T=floats(0.5), returns_T=floats(1.0))
    outputs = Outputs(logprobs_T=floats(0.0), values_T=floats(value))
    loss_T, metrics = ClippedValue(clip=0.2)(outputs, inputs, Layout((1,)), ones(1))
    assert float(loss_T[0]) == pytest.approx(loss)
    assert metrics["value/clip_fraction"].result == fraction


def test_a27_the_dual_clip_reaches_the_loss_and_its_metric() -> None:
    """Ratio 10, eps 0.2: advantage -1 gives 3 with c = 3 and 10 without; advantage +1 gives -1.2 either way."""
    outputs = Outputs(logprobs_T=floats(0, 0))
    inputs = policy_inputs(floats(-math.log(10), -math.log(10)), floats(-1, 1))
    loss_T, metrics = ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0)(
        outputs, inputs, Layout((2,)), ones(2)
    )
    torch.testing.assert_close(loss_T, floats(3.0, -1.2))
    assert metrics["policy/clip_fraction_dual"].result == 0.5
    assert metrics["policy/clip_fraction_high"].result == 0.5
    assert metrics["policy/clip_fraction_low"].result == 0.0
    loss_T, metrics = ClippedSurrogate(clip_low=0.2, clip_high=0.2)(outputs, inputs, Layout((2,)), ones(2))
    torch.testing.assert_close(loss_T, floats(10.0, -1.2))
    assert "policy/clip_fraction_dual" not in metrics


def test_a28_cispo_bounds_are_ratios() -> None:
    """Logprob -0.5, old -2.5, advantage 1, bounds 0 and 5: the ratio 7.389 becomes 5, loss 2.5, gradient -5."""
    logprobs_T = floats(-0.5).requires_grad_()
    loss_T, _ = CISPO(ratio_min=0.0, ratio_max=5.0)(
        Outputs(logprobs_T=logprobs_T), policy_inputs(floats(-2.5), floats(1.0)), Layout((1,)), ones(1)
    )
    loss_T.sum().backward()
    assert float(loss_T.detach()[0]) == pytest.approx(2.5)
    assert logprobs_T.grad is not None and float(logprobs_T.grad[0]) == pytest.approx(-5.0)


def test_a29_a_sequence_ratio_has_a_gradient() -> None:
    """Logprobs (-1, -2, -3), old (-1.2, -2, -3.3), A 2, mean over tokens: 1.18136, -2.36272, -0.78757 each."""
    logprobs_T = floats(-1, -2, -3).requires_grad_()
    loss_T, _ = GSPO(clip_low=0.5, clip_high=0.5)(
        Outputs(logprobs_T=logprobs_T), policy_inputs(floats(-1.2, -2, -3.3), floats(2, 2, 2)), Layout((3,)), ones(3)
    )
    loss_T.mean().backward()
    assert float(loss_T.detach().mean()) == pytest.approx(-2.36272, abs=1e-5)
    assert logprobs_T.grad is not None
    np.testing.assert_allclose(logprobs_T.grad, [-0.78757] * 3, atol=1e-5)


def test_a32_whitening_is_over_the_whole_step() -> None:
    whole = advantages.whiten(np.array([1.0, 3.0, 5.0, 7.0]), np.ones(4))
    np.testing.assert_allclose(whole, [-1.1619, -0.3873, 0.3873, 1.1619], atol=1e-4)


def test_a49_entropy_is_a_mean_over_what_is_trained() -> None:
    """A uniform choice of 4 at two of four places: log 4."""
    entropy_T = floats(math.log(4), NAN, math.log(4), 99.0)
    _, metrics = PolicyGradient()(
        Outputs(logprobs_T=floats(-1, -1, -1, -1), entropy_T=entropy_T),
        policy_inputs(floats(-1, -1, -1, -1), floats(0, 0, 0, 0)),
        Layout((4,)),
        torch.tensor([True, False, True, False]),
    )
    assert metrics["policy/entropy"].result == pytest.approx(1.38629, abs=1e-5)


def test_c09_overlong_penalty() -> None:
    """Limit 20, buffer 4, factor 1: lengths 16, 17, 18, 20 cost 0, .25, .5, 1; a buffer of 0 is refused."""
    lengths = np.array([0, 16, 17, 18, 20, 25])
    ours = filters.overlong_penalty(lengths, max_length=20, buffer=4)
    assert ours.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert filters.overlong_penalty(lengths, max_length=20, buffer=4, factor=0.5)[3] == -0.25
    for buffer in (0, -1, 21):
        with pytest.raises(ValueError, match="buffer"):
            filters.overlong_penalty(lengths, max_length=20, buffer=buffer)
    with pytest.raises(ValueError, match="factor"):
        filters.overlong_penalty(lengths, max_length=20, buffer=4, factor=-1.0)


def test_g12_all_groups_constant_are_all_dropped() -> None:
    assert not filters.informative(np.array([[1.0, 1.0], [0.0, 0.0]])).any()
    assert filters.informative(np.zeros((0, 4))).tolist() == []
    assert filters.informative(np.zeros((2, 0))).tolist() == [False, False]


def test_g18_one_value_has_no_deviation() -> None:
    assert advantages.whiten(np.array([5.0]), np.array([True])).tolist() == [0.0]
    assert advantages.whiten(np.array([5.0, NAN]), np.array([True, False])).tolist() == [0.0, 0.0]
    assert advantages.whiten(np.array([]), np.array([])).tolist() == []
    assert advantages.whiten(np.array([5.0, 5.0]), np.array([3, 2])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.5, 1.0, -1.2), (0.5, -1.0, 0.8)])
def test_j03_thresholds_as_ratios(ratio: float, advantage: float, expected: float) -> None:
    """The wire's absolute thresholds 0.8 and 1.2 are offsets of 0.2."""
    loss_T, _ = ClippedSurrogate(clip_low=1 - 0.8, clip_high=1.2 - 1)(
        Outputs(logprobs_T=floats(math.log(ratio))),
        policy_inputs(floats(0.0), floats(advantage)),
        Layout((1,)),
        ones(1),
    )
    assert float(loss_T[0]) == pytest.approx(expected)


def test_j05_sums_and_no_padding() -> None:
    loss_T, _ = CrossEntropy()(
        Outputs(logprobs_T=floats(-1, -2, NAN)), None, Layout((3,)), torch.tensor([True, True, False])
    )
    assert float((loss_T * floats(1, 0.5, 0)).sum()) == 2.0
    loss_T, _ = ImportanceSampling()(
        Outputs(logprobs_T=floats(-1.0)), policy_inputs(floats(-1.5), floats(2.0)), Layout((1,)), ones(1)
    )
    assert float(loss_T[0]) == pytest.approx(-3.29744, abs=1e-5)


@pytest.mark.parametrize("reduction", [Reduction.MAX, Reduction.MIN])
def test_a_broken_gap_is_not_lost_when_batches_are_merged(reduction: Reduction) -> None:
    for values in ((NAN, 0.1), (0.1, NAN)):
        merged = Metric(reduction, values[0]).merge(Metric(reduction, values[1]))
        assert math.isnan(merged.result)


def test_a_broken_logprob_reaches_the_gap() -> None:
    _, metrics = PolicyGradient()(
        Outputs(logprobs_T=floats(-1, NAN)), policy_inputs(floats(-1, -1), floats(1, 1)), Layout((2,)), ones(2)
    )
    assert math.isnan(metrics["policy/gap_max"].result)
