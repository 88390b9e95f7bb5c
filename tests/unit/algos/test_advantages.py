"""What advantages, filters and weights refuse, and the shapes at the edge."""

from __future__ import annotations

import numpy as np
import pytest

from strop.algos import advantages, filters, token_advantages
from strop.algos.weighting import Weighting, token_weights

NAN = float("nan")
EVERY_GROUP_METHOD = {
    "grpo": lambda r: advantages.grpo(r, scale_by_std=True),
    "grpo_plain": lambda r: advantages.grpo(r, scale_by_std=False),
    "rloo": advantages.rloo,
    "remax": lambda r: advantages.remax(r, np.zeros(len(r))),
    "opo": lambda r: advantages.opo(r, np.ones(r.shape, int)),
    "gpg": advantages.gpg,
    "gdpo": lambda r: advantages.gdpo([r]),
    "leave_one_out_max": advantages.leave_one_out_max,
    "pass_at_k": lambda r: advantages.pass_at_k(r, 2),
    "reinforce_plus_plus_baseline": lambda r: advantages.reinforce_plus_plus_baseline(r, np.ones(r.shape, int)),
}
every_method = pytest.mark.parametrize("name", EVERY_GROUP_METHOD)


@every_method
def test_rewards_are_two_axes_of_finite_numbers(name: str) -> None:
    method = EVERY_GROUP_METHOD[name]
    with pytest.raises(ValueError, match=r"shape is \(3,\)"):
        method(np.zeros(3))
    for infinite in (np.inf, -np.inf):
        with pytest.raises(ValueError, match="attempt 1 at task 0"):
            method(np.array([[0.0, infinite], [NAN, 1.0]]))


@every_method
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 1)])
def test_nothing_to_compare_is_no_error(name: str, shape: tuple[int, int]) -> None:
    ours = EVERY_GROUP_METHOD[name](np.zeros(shape))
    assert ours.shape == shape and ours.dtype == np.float64
    assert not ours.any()


@every_method
def test_a_missing_reward_stays_missing_and_moves_nobody(name: str) -> None:
    without = EVERY_GROUP_METHOD[name](np.array([[1.0, 0.0, 0.5, 1.0]]))
    with_one = EVERY_GROUP_METHOD[name](np.array([[1.0, NAN, 0.0, 0.5, 1.0]]))
    assert np.isnan(with_one[0]).tolist() == [False, True, False, False, False]
    np.testing.assert_allclose(np.delete(with_one, 1, axis=1), without, rtol=1e-12)


@every_method
def test_rewards_are_not_written_to(name: str) -> None:
    rewards_PG = np.array([[1.0, NAN, 0.0], [2.0, 2.0, 2.0]])
    before = rewards_PG.copy()
    EVERY_GROUP_METHOD[name](rewards_PG)
    np.testing.assert_array_equal(rewards_PG, before)


def test_the_deviation_has_n_minus_one_and_eps_is_added_to_it() -> None:
    ours_PG = advantages.grpo(np.array([[0.0, 1.0, 2.0]]), scale_by_std=True, eps=1.0)
    np.testing.assert_allclose(ours_PG, [[-0.5, 0.0, 0.5]])


def test_gdpo_refuses_parts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="at least one"):
        advantages.gdpo([])
    with pytest.raises(ValueError, match="unequal shape"):
        advantages.gdpo([np.zeros((1, 2)), np.zeros((1, 3))])
    with pytest.raises(ValueError, match="2 rewards but 1 weights"):
        advantages.gdpo([np.zeros((1, 2))] * 2, [1.0])


def test_gdpo_counts_tokens_when_told_to() -> None:
    rewards_PG, counts_PG = np.array([[1.0, 0.0, 0.5]]), np.array([[5, 1, 1]])
    by_token = advantages.gdpo([rewards_PG], counts_PG=counts_PG)
    assert float((by_token * counts_PG).sum()) == pytest.approx(0.0, abs=1e-12)
    assert float(advantages.gdpo([rewards_PG]).sum()) == pytest.approx(0.0, abs=1e-12)
    assert not np.allclose(by_token, advantages.gdpo([rewards_PG]))


def test_pass_at_k_needs_a_k_and_a_mark() -> None:
    with pytest.raises(ValueError, match="it is 0"):
        advantages.pass_at_k(np.zeros((1, 2)), 0)
    rewards_PG = np.array([[0.6, 0.0, 0.0]])
    assert not advantages.pass_at_k(rewards_PG, 2).any()
    assert advantages.pass_at_k(rewards_PG, 2, solved_at=0.5).any()


def test_lengths_must_cover_the_tokens() -> None:
    with pytest.raises(ValueError, match="sum to 2, but there are 3"):
        token_advantages.returns_to_go(np.zeros(3), np.ones(3, bool), np.array([2]))


def test_a_cut_episode_is_worth_what_was_left() -> None:
    rewards_T, values_T, mask_T = np.zeros(2), np.array([0.5, 0.25]), np.ones(2, bool)
    ended, _ = token_advantages.gae(rewards_T, values_T, mask_T, np.array([2]), trace=1.0)
    cut, _ = token_advantages.gae(rewards_T, values_T, mask_T, np.array([2]), trace=1.0, bootstrap_N=np.array([2.0]))
    assert ended.tolist() == [-0.5, -0.25]
    assert cut.tolist() == [1.5, 1.75]


def test_gae_defaults_are_the_usual_ones() -> None:
    ours_T, _ = token_advantages.gae(np.array([0.0, 1.0]), np.zeros(2), np.ones(2, bool), np.array([2]))
    assert ours_T.tolist() == [0.95, 1.0]


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="trajectory 1 has -2"):
        token_weights(Weighting.TOKEN_MEAN, np.array([3, -2]), horizon=None)


def test_token_counts_do_not_overflow() -> None:
    """A48: sums of 32-bit counts are taken in 64 bits."""
    counts_N = np.full(3, 2**30, np.int32)
    assert token_weights(Weighting.TOKEN_MEAN, counts_N, horizon=None)[0] == pytest.approx(1 / (3 * 2**30))
    assert token_weights(Weighting.SEQUENCE_MEAN_TOKEN_MEAN, counts_N, horizon=None)[0] == pytest.approx(
        1 / (3 * 2**30)
    )


def test_noise_scales_with_large_rewards_but_not_with_small_ones() -> None:
    assert filters.informative(np.array([[1e6, 1e6 + 2], [1e6, 1e6 + 0.5], [0.0, 2e-6], [0.0, 0.5e-6]])).tolist() == [
        True,
        False,
        True,
        False,
    ]


def test_bounds_belong_to_their_side() -> None:
    assert filters.informative(np.array([[0.0, 1e-6], [0.0, 1.01e-6]])).tolist() == [False, True]
    assert not filters.overlong_penalty(np.array([20]), max_length=20, buffer=20, factor=0.0).any()
    gains_PG = filters.length_reward(np.array([[3, 4]]), np.array([[True, True]]))
    assert gains_PG.tolist() == [[0.5, -0.5]]
