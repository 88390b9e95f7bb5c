"""Drawing from logits, against the same rules written out in plain float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.rollout.builtin.draw import Drawn, Settings, draw, uniforms


def settings(n: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Settings:
    return Settings(
        temperature_N=np.full(n, float(temperature)),
        top_k_N=np.full(n, top_k),
        top_p_N=np.full(n, float(top_p)),
        min_p_N=np.full(n, float(min_p)),
    )


def draw_at(logits, numbers, **how) -> Drawn:
    """One row of logits, drawn once for each number."""
    numbers = np.asarray(numbers, np.float64)
    rows = torch.as_tensor(logits).expand(len(numbers), -1)
    return draw(rows, settings(len(numbers), **how), numbers)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


def by_the_book(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, each on what the one before left, renormalised."""
    p = np.exp(log_softmax(logits.astype(np.float64) / temperature))
    if top_k:
        p = np.where(p >= np.sort(p)[::-1][min(top_k, len(p)) - 1], p, 0.0)
        p /= p.sum()
    if top_p < 1:
        order = np.sort(p)[::-1]
        p = np.where(p >= order[min(np.searchsorted(np.cumsum(order), top_p), len(p) - 1)], p, 0.0)
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def test_temperature_divides_logits_before_the_logprob():
    """A41: logits [2, 0], token 0, temperature 0.5."""
    drawn = draw_at([2.0, 0.0], [0.0], temperature=0.5)
    assert drawn.tokens_N.tolist() == [0]
    np.testing.assert_allclose(drawn.logprobs_N, [-0.01815], atol=1e-5)
    np.testing.assert_allclose(drawn.sampling_logprobs_N, [-0.01815], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_token_is_where_the_cumulative_distribution_passes_the_number(dtype):
    logits = torch.log(torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)).to(dtype)
    drawn = draw_at(logits, [0.0, 0.2, 0.3, 0.45, 0.55, 0.999999, np.nextafter(1, 0)])
    assert drawn.tokens_N.tolist() == [0, 0, 1, 1, 2, 2, 2]
    np.testing.assert_allclose(drawn.logprobs_N, np.log([0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5]), atol=5e-3)


def test_float64_logits_are_drawn_in_float64():
    logits = torch.randn(1, 50, dtype=torch.float64)
    drawn = draw(logits, settings(1), np.array([0.5]))
    expected = log_softmax(logits.numpy()[0])[drawn.tokens_N[0]]
    assert drawn.logprobs_N.dtype == np.float64
    np.testing.assert_allclose(drawn.logprobs_N[0], expected, rtol=1e-13)


def test_impossible_tokens_are_never_drawn():
    """Neither a number of 0 nor one that rounds to 1 may pick a token without probability, first or last."""
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf])
    drawn = draw_at(logits, [0.0, np.nextafter(1, 0), 1 - 1e-9, 0.5])
    assert drawn.tokens_N.tolist() == [1, 3, 3, 3]
    assert np.isfinite(drawn.logprobs_N).all()


def test_greedy_takes_the_likeliest_and_reports_the_model_at_temperature_one():
    logits = torch.tensor([1.0, 3.0, 2.0])
    drawn = draw_at(logits, [0.0, 0.99], temperature=0.0, top_k=1)
    assert drawn.tokens_N.tolist() == [1, 1]
    np.testing.assert_allclose(drawn.logprobs_N, log_softmax(logits.numpy())[[1, 1]], rtol=1e-6)
    assert drawn.sampling_logprobs_N.tolist() == [0.0, 0.0]


@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=40),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 100]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_truncations_apply_in_their_documented_order(logits, temperature, top_k, top_p, min_p):
    """Logits are sixteenths, so ties occur; every token's sampling logprob is that of the truncated distribution."""
    z = np.array(logits) / 16
    expected = by_the_book(z, temperature, top_k, top_p, min_p)
    edges = np.cumsum(expected)
    middles = edges - expected / 2
    possible = np.flatnonzero(expected > 0)
    drawn = draw_at(z, middles[possible], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert drawn.tokens_N.tolist() == possible.tolist()
    np.testing.assert_allclose(drawn.sampling_logprobs_N, np.log(expected[possible]), atol=1e-9)
    np.testing.assert_allclose(drawn.logprobs_N, log_softmax(z / temperature)[possible], atol=1e-9)


def test_order_matters():
    """top-k before top-p: of [.4, .3, .2, .1], top_k 2 leaves [4/7, 3/7], of which top_p .5 keeps the first alone."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(draw_at(logits, np.linspace(0, 0.99, 20), top_k=2, top_p=0.5).tokens_N.tolist()) == {0}
    assert set(draw_at(logits, np.linspace(0, 0.99, 20), top_p=0.5).tokens_N.tolist()) == {0, 1}


def test_rows_keep_to_their_own_settings():
    """Every row beside others gives what it gives alone, whatever mixture of settings surrounds it."""
    how = [(1.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.0), (0.7, 4, 1.0, 0.0), (1.3, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.2)]
    how.append((2.0, 7, 0.9, 0.1))
    logits, numbers = torch.randn(len(how), 33, dtype=torch.float64), np.random.default_rng(0).random(len(how))
    t, k, p, m = (np.array(column) for column in zip(*how, strict=True))
    together = draw(logits, Settings(temperature_N=t, top_k_N=k, top_p_N=p, min_p_N=m), numbers)
    for n, (temperature, top_k, top_p, min_p) in enumerate(how):
        alone = draw(logits[n : n + 1], settings(1, temperature, top_k, top_p, min_p), numbers[n : n + 1])
        assert alone.tokens_N[0] == together.tokens_N[n]
        np.testing.assert_allclose(alone.logprobs_N[0], together.logprobs_N[n], rtol=1e-12)
        np.testing.assert_allclose(alone.sampling_logprobs_N[0], together.sampling_logprobs_N[n], rtol=1e-12)


def test_top_p_of_a_flat_distribution_keeps_its_share_of_a_large_vocabulary():
    logits = torch.linspace(0, 0.1, 5000, dtype=torch.float64)
    expected = by_the_book(logits.numpy(), 1.0, 0, 0.9, 0.0)
    lowest = int(np.flatnonzero(expected > 0)[0])
    assert 400 < lowest < 600
    drawn = draw_at(logits, [0.0, 0.5], top_p=0.9)
    assert drawn.tokens_N[0] == lowest
    np.testing.assert_allclose(drawn.sampling_logprobs_N, np.log(expected[drawn.tokens_N]), atol=1e-9)


def test_a_row_of_broken_logits_is_reported_and_the_others_are_not_touched():
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 1.0, 2.0], [torch.inf, 0.0, 0.0]])
    drawn = draw(logits, settings(3), np.array([0.5, 0.5, 0.5]))
    assert np.isnan(drawn.logprobs_N).tolist() == [True, False, True]


def test_frequencies_follow_the_distribution():
    """chi-square of 20,000 draws over 8 tokens, 7 degrees of freedom: 24.3 is passed once in a thousand seeds."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.3])
    count = 20_000
    tokens = draw_at(logits, uniforms(7, count), temperature=1.3).tokens_N
    expected = by_the_book(logits.numpy(), 1.3, 0, 1.0, 0.0) * count
    observed = np.bincount(tokens, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


def test_numbers_are_a_function_of_seed_and_index_alone():
    """J07: distinct for every seed; a longer request begins with the numbers of a shorter one."""
    assert uniforms(3, 50)[:20].tolist() == uniforms(3, 20).tolist()
    columns = np.stack([uniforms(seed, 100) for seed in (0, 1, 2, 2**64 - 1, 2**64, -5)])
    assert len(np.unique(columns)) == columns.size
    assert columns.min() >= 0 and columns.max() < 1
