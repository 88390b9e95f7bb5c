"""Where an algorithm is easily wrong and nobody sees it: narrow dtypes, empty axes, ties, untrained places."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algos import advantages, balance, filters, selection, token_advantages
from strop.algos.correction import (
    Divergence,
    Level,
    Outside,
    accepted,
    importance_weights,
    off_policy_accepted,
)
from strop.algos.distill_losses import Distillation, DistillInputs, Tail
from strop.algos.kl import Estimator, estimate, penalised_rewards
from strop.algos.losses import (
    SAPO,
    ClippedSurrogate,
    DPPOKullbackLeibler,
    DPPOTotalVariation,
    ImportanceSampling,
    KLCov,
    PolicyGradient,
    PolicyInputs,
    PolicyLoss,
)
from strop.algos.preference_losses import KTO, SimPO, kto_baseline
from strop.algos.value_losses import ClippedValue, ValueInputs
from strop.algos.weighting import Weighting, token_weights
from strop.types import Layout, Metrics, Outputs

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
NAN = float("nan")


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gdpo_counts_every_reward_once_by_default() -> None:
    parts = [np.array([[1.0, 0.0, 0.5]]), np.array([[0.0, 2.0, 2.5]])]
    assert np.array_equal(advantages.gdpo(parts), advantages.gdpo(parts, [1.0, 1.0]))


def test_gdpo_adds_eps_to_every_deviation() -> None:
    """Deviations 0.7 and 7: a large eps drowns the first reward and leaves the second."""
    parts = [np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[10.0, 0.0], [10.0, 0.0]])]
    first_PG, second_PG = (part / (np.sqrt(0.5) * np.ptp(part) + 50.0) for part in parts)
    scaled_PG = first_PG + second_PG
    centred_PG = scaled_PG - scaled_PG.mean(axis=1, keepdims=True)
    ours_PG = advantages.gdpo(parts, eps=50.0)
    np.testing.assert_allclose(ours_PG, advantages.whiten(centred_PG, np.ones((2, 2))), rtol=1e-9)


def test_gdpo_of_an_attempt_without_tokens_is_missing_if_a_part_is() -> None:
    parts = [np.array([[1.0, 0.0, 1.0]]), np.array([[1.0, 0.0, NAN]])]
    ours_PG = advantages.gdpo(parts, counts_PG=np.array([[2, 3, 0]]))
    assert np.isnan(ours_PG).tolist() == [[False, False, True]]


def test_gdpo_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"^gdpo needs at least one reward$"):
        advantages.gdpo([])


def test_a_lead_over_nobody_is_no_invalid_operation() -> None:
    rewards_PG = np.array([[1.0, NAN, NAN], [NAN, NAN, NAN], [1.0, 0.5, NAN]])
    with np.errstate(all="raise"):
        ours_PG = advantages.leave_one_out_max(rewards_PG, scale_by_std=False)
    np.testing.assert_array_equal(ours_PG, [[0.0, NAN, NAN], [NAN, NAN, NAN], [0.5, 0.0, NAN]])


def test_reinforce_plus_plus_discounts() -> None:
    rewards_T, mask_T = np.array([0.0, 0.0, 1.0, 2.0]), np.ones(4, np.bool_)
    ours_T = token_advantages.reinforce_plus_plus(rewards_T, mask_T, np.array([3, 1]), discount=0.5)
    np.testing.assert_allclose(ours_T, advantages.whiten(np.array([0.25, 0.5, 1.0, 2.0]), mask_T))


def test_float32_inputs_are_computed_in_float64() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 9)).astype(np.float32)
    mask_T, lengths_N = rng.random(9) < 0.8, np.array([4, 5])
    wide_rewards, wide_values = rewards.astype(np.float64), values.astype(np.float64)
    for ours, expected in (
        (
            token_advantages.gae(rewards, values, mask_T, lengths_N, discount=0.9),
            token_advantages.gae(wide_rewards, wide_values, mask_T, lengths_N, discount=0.9),
        ),
        (
            token_advantages.returns_to_go(rewards, mask_T, lengths_N, discount=0.9),
            token_advantages.returns_to_go(wide_rewards, mask_T, lengths_N, discount=0.9),
        ),
        (
            penalised_rewards(rewards, values, mask_T, 0.1),
            penalised_rewards(wide_rewards, wide_values, mask_T, 0.1),
        ),
    ):
        assert np.asarray(ours).dtype == np.float64
        assert np.array_equal(ours, expected)
    rewards_PG, lengths_PG = np.array([[1.0, 0.0]]), np.array([[4, 5]])
    logprobs, squares = rng.random((2, 9)).astype(np.float32)
    assert np.array_equal(
        token_advantages.optimal_token_baseline(rewards_PG, -logprobs, squares, mask_T, lengths_PG),
        token_advantages.optimal_token_baseline(
            rewards_PG, -logprobs.astype(np.float64), squares.astype(np.float64), mask_T, lengths_PG
        ),
    )


def test_narrow_counts_do_not_wrap() -> None:
    """Lengths as bytes: 16 - 20 is -4, and 2 * 200 is 400."""
    short = np.array([0, 16, 18, 20], np.uint8)
    assert filters.overlong_penalty(short, max_length=20, buffer=4).tolist() == [0.0, 0.0, -0.5, -1.0]
    lengths_PG, solved_PG = np.array([[200, 100], [7, 7]], np.uint8), np.array([[True, False], [True, True]])
    assert filters.length_reward(lengths_PG, solved_PG).tolist() == [[-0.5, 0.0], [0.0, 0.0]]
    counts_N = np.array([200, 200], np.uint8)
    assert token_weights(Weighting.TOKEN_MEAN, counts_N, horizon=None).tolist() == [1 / 400, 1 / 400]
    assert token_weights(Weighting.SEQUENCE_MEAN_TOKEN_MEAN, counts_N, horizon=None).tolist() == [1 / 400, 1 / 400]


def test_the_penalty_may_begin_at_the_last_token() -> None:
    assert filters.overlong_penalty(np.array([19, 20]), max_length=20, buffer=1).tolist() == [0.0, -1.0]


@EXAMPLES
@given(st.integers(0, 4), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_length_reward_of_many_groups(tasks: int, attempts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths_PG, solved_PG = rng.integers(0, 4, (tasks, attempts)), rng.random((tasks, attempts)) < 0.5
    expected: list[list[float]] = []
    for lengths, solved in zip(lengths_PG.tolist(), solved_PG.tolist(), strict=True):
        spread = max(lengths) - min(lengths) if lengths else 0
        gains = [0.5 - (n - min(lengths)) / spread if spread else 0.0 for n in lengths]
        expected.append([gain if right else min(gain, 0.0) for gain, right in zip(gains, solved, strict=True)])
    ours_PG = filters.length_reward(lengths_PG, solved_PG)
    assert ours_PG.shape == (tasks, attempts)
    np.testing.assert_allclose(ours_PG, np.array(expected).reshape(tasks, attempts), rtol=1e-12)


def test_a_reward_at_an_untrained_token_stays_what_it_was() -> None:
    mask_T = np.array([True, False])
    assert penalised_rewards(np.array([1.0, 3.0]), np.array([2.0, NAN]), mask_T, 0.5).tolist() == [0.0, 3.0]


def test_nothing_at_all_has_no_baseline() -> None:
    for shape in ((0, 2), (2, 0), (0, 0)):
        nothing = token_advantages.optimal_token_baseline(
            np.zeros(shape), np.zeros(0), np.zeros(0), np.zeros(0, np.bool_), np.zeros(shape, np.int64)
        )
        assert nothing.shape == (0,)


def test_the_ratio_of_a_sequence_is_bounded_too() -> None:
    """Three log ratios of 15 make 45, bounded by 20; and so on the other side."""
    layout, mask_T = Layout((3,)), torch.ones(3, dtype=torch.bool)
    for sign in (1.0, -1.0):
        _, metrics = importance_weights(
            doubles(15, 15, 15) * sign, doubles(0, 0, 0), layout, mask_T, level=Level.SEQUENCE_SUM
        )
        assert metrics["correction/weight_mean"].result == pytest.approx(math.exp(20 * sign), rel=1e-12)
    weights_T, _ = importance_weights(
        doubles(-15, -15, -15),
        doubles(0, 0, 0),
        layout,
        mask_T,
        level=Level.SEQUENCE_SUM,
        outside=Outside.ZERO,
    )
    assert weights_T.tolist() == pytest.approx([math.exp(-20)] * 3)


def test_what_was_left_behind_is_told() -> None:
    """Sequences of three tokens and one, both far behind; the second is bad: one of four tokens goes."""
    kept_T, metrics = off_policy_accepted(
        doubles(-3, -3, -3, -3),
        doubles(-1, -1, -1, -1),
        doubles(1, 1, 1, -1),
        Layout((3, 1)),
        torch.ones(4, dtype=torch.bool),
        high=0.5,
    )
    assert kept_T.tolist() == [True, True, True, False]
    assert metrics["correction/rejected_fraction"].result == 0.25


def test_a_certain_token_has_a_finite_divergence() -> None:
    """A probability of 1 leaves no room for another token; 1e-8 of it is kept."""
    loss = DPPOKullbackLeibler(low=0.1, high=0.1)
    certain_T, unsure_T = doubles(0.0, -1.0), doubles(-1.0, 0.0)
    far_T = loss.distance(certain_T, unsure_T)
    rest = 1 - math.exp(-1.0)
    expected = [-math.exp(-1.0) + rest * math.log((rest + 1e-8) / 1e-8), 1.0]
    np.testing.assert_allclose(far_T, expected, rtol=1e-6)
    assert loss.distance(certain_T, certain_T).tolist()[0] == pytest.approx(0.0, abs=1e-7)


def test_of_equal_tokens_the_first_are_selected() -> None:
    for select in (selection.kl_cov, selection.top_entropy):
        chosen_N = select(np.tile([0.0, 1.0], 500), fraction=0.02)
        assert np.flatnonzero(chosen_N).tolist() == list(range(1, 41, 2))


def one_token(loss: PolicyLoss, logprob: float, old: float, advantage: float) -> tuple[float, Metrics]:
    inputs = PolicyInputs(behavior_logprobs_T=doubles(old), advantages_T=doubles(advantage))
    loss_T, metrics = loss(Outputs(logprobs_T=doubles(logprob)), inputs, Layout((1,)), torch.tensor([True]))
    return float(loss_T[0]), metrics


def test_log_ratios_are_bounded_on_both_sides() -> None:
    for gap, bounded in ((500.0, 20.0), (-500.0, -20.0), (19.0, 19.0), (-19.0, -19.0)):
        loss, metrics = one_token(ImportanceSampling(), gap - 1.0, -1.0, -1.0)
        assert loss == pytest.approx(math.exp(bounded), rel=1e-12)
        assert metrics["policy/kl_k3"].result == pytest.approx(math.exp(bounded) - 1 - bounded, rel=1e-12)
        for level in (Level.TOKEN, Level.SEQUENCE_MAX):
            for high, kept in ((bounded**2 / 2, True), (bounded**2 / 2 - 1e-6, False)):
                close_T, _ = accepted(
                    doubles(gap),
                    doubles(0.0),
                    Layout((1,)),
                    torch.tensor([True]),
                    divergence=Divergence.K2,
                    level=level,
                    high=high,
                )
                assert close_T.tolist() == [kept]


def test_the_ratio_of_a_rejected_sequence_is_bounded_too() -> None:
    """Three log ratios of 15 count as 20, so bounds of exp(-21) and exp(21) keep them, and exp(19) does not."""
    everywhere_T = torch.ones(3, dtype=torch.bool)
    for sign in (1.0, -1.0):
        for bound, kept in ((21.0, True), (19.0, False)):
            close_T, _ = accepted(
                doubles(15, 15, 15) * sign,
                doubles(0, 0, 0),
                Layout((3,)),
                everywhere_T,
                divergence=Divergence.RATIO,
                level=Level.SEQUENCE_SUM,
                low=math.exp(-bound),
                high=math.exp(bound),
            )
            assert close_T.tolist() == [kept] * 3


def test_a_probability_on_the_edge_of_the_trust_region_is_inside() -> None:
    """From 1/2 to 1 and back, in a region of 1/2."""
    loss = DPPOTotalVariation(low=0.5, high=0.5)
    for logprob, old, advantage in ((0.0, math.log(0.5), 1.0), (math.log(0.5), 0.0, -1.0)):
        _, metrics = one_token(loss, logprob, old, advantage)
        assert float(loss.distance(doubles(logprob), doubles(old))[0]) == 0.5
        assert metrics["policy/clip_fraction_low"].result == metrics["policy/clip_fraction_high"].result == 0.0


def test_k3_is_bounded_where_it_hardly_shows() -> None:
    kl_T = estimate(Estimator.K3, doubles(-1.0), doubles(-26.0), torch.tensor([True]))
    assert float(kl_T[0]) == pytest.approx(25.0 + math.expm1(-20.0), rel=0, abs=1e-13)


def test_a_ratio_on_the_dual_bound_is_not_counted() -> None:
    ratio = math.exp(math.log(2.0))
    loss = ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=ratio)
    assert one_token(loss, math.log(2.0), 0.0, -1.0)[1]["policy/clip_fraction_dual"].result == 0.0


def test_temperatures_of_a_gate() -> None:
    assert SAPO(temperature_good=0.5, temperature_bad=0.5)
    for good, bad in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="must be positive"):
            SAPO(temperature_good=good, temperature_bad=bad)


def test_a_column_of_the_wrong_shape_is_called_by_its_name() -> None:
    right, wrong = doubles(-1.0, -1.0), doubles(-1.0)
    names = [field.name for field in dataclasses.fields(PolicyInputs) if field.name.endswith("_T")]
    assert len(names) == 6
    for name in names:
        inputs = replace(PolicyInputs(behavior_logprobs_T=right, advantages_T=right), **{name: wrong})
        with pytest.raises(ValueError, match=rf"^{name} has shape \(1,\), the logprobs \(2,\)$"):
            PolicyGradient()(Outputs(logprobs_T=right), inputs, Layout((2,)), torch.ones(2, dtype=torch.bool))


def test_errors_say_it_all() -> None:
    at = PolicyInputs(behavior_logprobs_T=doubles(-1.0), advantages_T=doubles(1.0))
    for call, message in (
        (
            lambda: KLCov()(Outputs(logprobs_T=doubles(-1.0)), at, Layout((1,)), torch.tensor([True])),
            "this loss needs selected_T in its inputs: choose tokens over the whole step first",
        ),
        (
            lambda: ClippedValue()(
                Outputs(logprobs_T=doubles(-1.0)),
                ValueInputs(old_values_T=doubles(0.0), returns_T=doubles(0.0)),
                Layout((1,)),
                torch.tensor([True]),
            ),
            "a value loss needs values_T: the engine's model must have a value head",
        ),
        (
            lambda: importance_weights(
                doubles(0.0), doubles(0.0), Layout((1,)), torch.tensor([True]), level=Level.SEQUENCE_MAX
            ),
            "a sequence has no largest ratio: one far below 1 is as far as one above; take the largest k2",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            call()


def test_distillation_measures_the_sampler_and_takes_the_engines_ids() -> None:
    teacher_TK, student_TK = doubles(-0.5, -1.5).repeat(2, 1), doubles(-1.0, -1.0).repeat(2, 1)
    inputs = DistillInputs(
        behavior_logprobs_T=doubles(-1.0, NAN),
        teacher_logprobs_TK=teacher_TK,
        teacher_weights_TM=doubles(1, 1)[:, None],
    )
    mask_T = torch.tensor([True, False])
    outputs = Outputs(logprobs_T=doubles(-1.75, -9.0), ids_logprobs_TK=student_TK)
    loss = Distillation(tail=Tail.DROPPED)
    loss_T, metrics = loss(outputs, inputs, Layout((2,)), mask_T)
    assert torch.equal(loss_T, loss.of(student_TK, inputs, mask_T)[0])
    assert float(loss_T[0]) == pytest.approx(math.exp(-0.5) * 0.5 - math.exp(-1.5) * 0.5)
    assert metrics["policy/gap_max"].result == 0.75
    assert metrics["distill/divergence"].result == pytest.approx(float(loss_T[0]))
    missing = "the engine gave no ids_logprobs_TK: the batch must name the teachers' tokens in ids_TK"
    with pytest.raises(ValueError, match=f"^{missing}$"):
        loss(Outputs(logprobs_T=doubles(-1.0, -1.0)), inputs, Layout((2,)), mask_T)


def test_one_choice_is_a_fraction_and_token_0_is_a_target() -> None:
    assert balance.fractions_of(np.array([[1, 0], [0, 0]])).tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert balance.sampled_rows(np.array([True, True, False]), np.array([5, 0, -1])).tolist() == [False, True, False]


def test_smallest_settings_of_preferences() -> None:
    assert SimPO(beta=2.0, target_margin=0.0).target_margin == 0.0
    assert SimPO(beta=2.0, target_margin=0.5).target_margin == 0.5
    assert kto_baseline(0.25, 1) == 0.25
    with pytest.raises(ValueError, match="beta must be positive"):
        KTO(beta=0.0, baseline=0.0)
    with pytest.raises(ValueError, match=r"^KTO's baseline is a mean over texts, and there are none$"):
        kto_baseline(0.0, 0)


def poisoned(values_T: np.ndarray, mask_T: np.ndarray, poison: float | None, seed: int) -> np.ndarray:
    """The values with something else wherever the mask is off; None is noise."""
    bad = np.random.default_rng(seed).normal(size=len(values_T)) if poison is None else poison
    return np.where(mask_T, values_T, bad)


@EXAMPLES
@given(
    lengths=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    poison=st.sampled_from([NAN, math.inf, -math.inf, None]),
)
def test_what_a_tool_said_moves_no_token(lengths: list[int], seed: int, poison: float | None) -> None:
    """Bit for bit, for every method of single tokens."""
    rng = np.random.default_rng(seed)
    lengths_N = np.array(lengths, np.int64)
    total = int(lengths_N.sum())
    mask_T = rng.random(total) < 0.6
    rewards_T, values_T, logprobs_T, squares_T = rng.random((4, total))
    bad_rewards_T, bad_values_T, bad_logprobs_T, bad_squares_T = (
        poisoned(column, mask_T, poison, seed + n)
        for n, column in enumerate((rewards_T, values_T, logprobs_T, squares_T))
    )
    rewards_PG, lengths_PG = rng.choice([0.0, 1.0], size=(2, 2)), lengths_N.reshape(2, 2)
    pairs = (
        (
            token_advantages.returns_to_go(rewards_T, mask_T, lengths_N, discount=0.9),
            token_advantages.returns_to_go(bad_rewards_T, mask_T, lengths_N, discount=0.9),
        ),
        (
            token_advantages.reinforce_plus_plus(rewards_T, mask_T, lengths_N),
            token_advantages.reinforce_plus_plus(bad_rewards_T, mask_T, lengths_N),
        ),
        (
            np.stack(token_advantages.gae(rewards_T, values_T, mask_T, lengths_N)),
            np.stack(token_advantages.gae(bad_rewards_T, bad_values_T, mask_T, lengths_N)),
        ),
        (
            token_advantages.optimal_token_baseline(rewards_PG, -logprobs_T, squares_T, mask_T, lengths_PG),
            token_advantages.optimal_token_baseline(rewards_PG, -bad_logprobs_T, bad_squares_T, mask_T, lengths_PG),
        ),
        (advantages.whiten(rewards_T, mask_T), advantages.whiten(bad_rewards_T, mask_T)),
    )
    for clean, spoiled in pairs:
        assert np.array_equal(clean, spoiled)
        assert not clean[..., ~mask_T].any()


@EXAMPLES
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_order_of_tasks_and_attempts_changes_nothing(tasks: int, attempts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards_PG = rng.choice([0.0, 1.0, 0.5, NAN], size=(tasks, attempts))
    counts_PG = rng.integers(0, 5, size=(tasks, attempts))
    rows, columns = rng.permutation(tasks), rng.permutation(attempts)

    def moved(values_PG: np.ndarray) -> np.ndarray:
        return values_PG[rows][:, columns]

    for method in (
        lambda r, n: advantages.grpo(r, scale_by_std=True),
        lambda r, n: advantages.grpo(r, scale_by_std=False),
        lambda r, n: advantages.rloo(r),
        lambda r, n: advantages.opo(r, n),
        lambda r, n: advantages.gpg(r),
        lambda r, n: advantages.gdpo([r, n / 4.0]),
        lambda r, n: advantages.leave_one_out_max(r),
        lambda r, n: advantages.pass_at_k(r, 2),
        lambda r, n: advantages.reinforce_plus_plus_baseline(r, n),
    ):
        np.testing.assert_allclose(
            method(moved(rewards_PG), moved(counts_PG)), moved(method(rewards_PG, counts_PG)), rtol=1e-9, atol=1e-12
        )
