"""Importance weights, rejection and selection against plain references, and what must not change them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algos import selection
from strop.algos.correction import Divergence, Level, Outside, accepted, importance_weights, off_policy_accepted
from strop.types import Layout, merge_metrics

EXAMPLES = settings(max_examples=30, deadline=None, derandomize=True)
lengths = st.lists(st.integers(0, 6), max_size=5)
seeds = st.integers(0, 2**32 - 1)
POOL: dict[Level, Callable[[list[float]], list[float]]] = {
    Level.TOKEN: list,
    Level.SEQUENCE_SUM: lambda row: [sum(row)] * len(row),
    Level.SEQUENCE_MEAN: lambda row: [sum(row) / len(row)] * len(row),
    Level.SEQUENCE_MAX: lambda row: [max(row)] * len(row),
}
RATIO_LEVELS = [Level.TOKEN, Level.SEQUENCE_SUM, Level.SEQUENCE_MEAN]


def draw(lengths: list[int], seed: int) -> tuple[Layout, Tensor, Tensor, Tensor]:
    """(layout, mask, trainer's logprobs, sampler's logprobs)"""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    behavior = -rng.uniform(0.1, 3, total)
    return (
        Layout(tuple(lengths)),
        torch.from_numpy(rng.random(total) < 0.7),
        torch.from_numpy(behavior + 0.3 * rng.normal(size=total)),
        torch.from_numpy(behavior),
    )


def pooled(layout: Layout, mask_T: Tensor, values_T: Tensor, level: Level) -> list[float | None]:
    """Each token's statistic, one sequence at a time; None where nothing was trained."""
    result: list[float | None] = []
    for start, n in zip(layout.starts_S.tolist(), layout.lengths, strict=True):
        mask = mask_T[start : start + n].tolist()
        row = [v for v, m in zip(values_T[start : start + n].tolist(), mask, strict=True) if m]
        statistics = iter(POOL[level](row) if row else [])
        result += [next(statistics) if m else None for m in mask]
    return result


@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("outside", list(Outside))
@EXAMPLES
@given(lengths=lengths, seed=seeds)
def test_importance_weights(level: Level, outside: Outside, lengths: list[int], seed: int) -> None:
    layout, mask_T, logprobs_T, behavior_T = draw(lengths, seed)
    weights_T, metrics = importance_weights(
        logprobs_T.requires_grad_(), behavior_T, layout, mask_T, level=level, low=0.8, high=1.2, outside=outside
    )
    assert not weights_T.requires_grad
    raw = [None if x is None else math.exp(x) for x in pooled(layout, mask_T, logprobs_T.detach() - behavior_T, level)]
    expected = [
        0.0 if w is None else w if 0.8 <= w <= 1.2 else 0.0 if outside is Outside.ZERO else min(max(w, 0.8), 1.2)
        for w in raw
    ]
    np.testing.assert_allclose(weights_T, expected, rtol=1e-9)
    there = [w for w in raw if w is not None]
    if there:
        assert metrics["correction/fraction_high"].result == pytest.approx(sum(w > 1.2 for w in there) / len(there))
        assert metrics["correction/fraction_low"].result == pytest.approx(sum(w < 0.8 for w in there) / len(there))
        assert metrics["correction/weight_mean"].result == pytest.approx(sum(there) / len(there))


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("divergence", list(Divergence))
@EXAMPLES
@given(lengths=lengths, seed=seeds)
def test_rejection(level: Level, divergence: Divergence, lengths: list[int], seed: int) -> None:
    if divergence is Divergence.RATIO and level is Level.SEQUENCE_MAX:
        return  # refused: see below
    layout, mask_T, logprobs_T, behavior_T = draw(lengths, seed)
    bounds = {"low": 0.9, "high": 1.2} if divergence is Divergence.RATIO else {"high": 0.05}
    kept_T, metrics = accepted(logprobs_T, behavior_T, layout, mask_T, divergence=divergence, level=level, **bounds)
    x_T = logprobs_T - behavior_T
    values_T = {Divergence.RATIO: x_T, Divergence.K2: x_T**2 / 2, Divergence.K3: x_T.exp() - 1 - x_T}[divergence]
    expected = [
        False if k is None else math.log(0.9) <= k <= math.log(1.2) if divergence is Divergence.RATIO else k <= 0.05
        for k in pooled(layout, mask_T, values_T, level)
    ]
    assert kept_T.tolist() == expected
    if mask_T.any():
        assert metrics["correction/rejected_fraction"].result == pytest.approx(1 - sum(expected) / int(mask_T.sum()))


@EXAMPLES
@given(lengths=lengths, seed=seeds)
def test_only_bad_sequences_that_were_left_behind_go(lengths: list[int], seed: int) -> None:
    layout, mask_T, logprobs_T, behavior_T = draw(lengths, seed)
    advantages_T = torch.from_numpy(np.random.default_rng(seed).normal(size=len(mask_T)))
    kept_T, _ = off_policy_accepted(logprobs_T, behavior_T, advantages_T, layout, mask_T, high=0.1)
    far = pooled(layout, mask_T, behavior_T - logprobs_T, Level.SEQUENCE_MEAN)
    expected = [d is not None and not (d > 0.1 and a < 0) for d, a in zip(far, advantages_T.tolist(), strict=True)]
    assert kept_T.tolist() == expected


@pytest.mark.parametrize("level", list(Level))
@EXAMPLES
@given(lengths=lengths, seed=seeds, poison=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_masked_places_may_hold_anything(level: Level, lengths: list[int], seed: int, poison: float) -> None:
    layout, mask_T, logprobs_T, behavior_T = draw(lengths, seed)
    bad_logprobs_T = torch.where(mask_T, logprobs_T, poison)
    bad_behavior_T = torch.where(mask_T, behavior_T, -poison)
    kept_T, _ = accepted(logprobs_T, behavior_T, layout, mask_T, divergence=Divergence.K3, level=level, high=0.05)
    again_T, _ = accepted(
        bad_logprobs_T, bad_behavior_T, layout, mask_T, divergence=Divergence.K3, level=level, high=0.05
    )
    assert torch.equal(kept_T, again_T)
    if level in RATIO_LEVELS:
        weights_T, _ = importance_weights(logprobs_T, behavior_T, layout, mask_T, level=level)
        again_T, _ = importance_weights(bad_logprobs_T, bad_behavior_T, layout, mask_T, level=level)
        assert torch.equal(weights_T, again_T)


def test_a44_fractions_are_of_weights_before_they_are_bounded() -> None:
    """A44: weights (4, 4) and (1, 1), threshold 2: half of them were above it. Merged over batches too."""
    behavior_T = torch.zeros(2, dtype=torch.float64)
    mask_T = torch.tensor([True, True])
    parts = [
        importance_weights(torch.full((2,), math.log(w), dtype=torch.float64), behavior_T, Layout((2,)), mask_T)[1]
        for w in (4.0, 1.0)
    ]
    assert merge_metrics(parts)["correction/fraction_high"].result == 0.5


def test_bounds_that_make_no_sense_are_refused() -> None:
    layout, mask_T, logprobs_T, behavior_T = draw([2], 0)
    with pytest.raises(ValueError, match="low=2"):
        importance_weights(logprobs_T, behavior_T, layout, mask_T, low=2.0, high=2.0)
    with pytest.raises(ValueError, match="no largest ratio"):
        importance_weights(logprobs_T, behavior_T, layout, mask_T, level=Level.SEQUENCE_MAX)
    for divergence, level, bounds, message in (
        (Divergence.RATIO, Level.TOKEN, {"low": 1.1, "high": 2.0}, "must hold 1"),
        (Divergence.RATIO, Level.SEQUENCE_MAX, {"high": 2.0}, "no largest ratio"),
        (Divergence.K2, Level.TOKEN, {"low": 0.1, "high": 2.0}, "upper bound alone"),
    ):
        with pytest.raises(ValueError, match=message):
            accepted(logprobs_T, behavior_T, layout, mask_T, divergence=divergence, level=level, **bounds)


@EXAMPLES
@given(st.integers(0, 40), seeds)
def test_selection_over_a_step(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs_N, advantages_N = rng.normal(size=(2, count))
    covariances_N = selection.covariances(logprobs_N, advantages_N)
    if count:
        means = sum(logprobs_N) / count, sum(advantages_N) / count
        expected = [(a - means[1]) * (x - means[0]) for x, a in zip(logprobs_N, advantages_N, strict=True)]
        np.testing.assert_allclose(covariances_N, expected, atol=1e-12)

    for fraction in (0.2, 1.0):
        wanted = min(max(int(fraction * count), 1), count)
        for chosen_N in (
            selection.kl_cov(covariances_N, fraction=fraction),
            selection.top_entropy(covariances_N, fraction=fraction),
        ):
            assert chosen_N.sum() == wanted
            if 0 < wanted < count:
                assert covariances_N[chosen_N].min() >= covariances_N[~chosen_N].max()

    eligible_N = rng.random(count) < 0.7
    chosen_N = selection.clip_cov(
        covariances_N, np.random.default_rng(3), fraction=0.1, low=0.2, high=1.0, eligible_N=eligible_N
    )
    candidates = [i for i in range(count) if 0.2 < covariances_N[i] < 1.0 and eligible_N[i]]
    assert chosen_N.sum() == min(max(int(0.1 * count), 1), len(candidates))
    assert set(np.flatnonzero(chosen_N)) <= set(candidates)
    again_N = selection.clip_cov(
        covariances_N, np.random.default_rng(3), fraction=0.1, low=0.2, high=1.0, eligible_N=eligible_N
    )
    assert np.array_equal(chosen_N, again_N)


def test_a_fraction_is_a_fraction() -> None:
    for fraction in (0.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="part of all tokens"):
            selection.top_entropy(np.zeros(3), fraction=fraction)
