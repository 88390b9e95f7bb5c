"""Advantages, filters and weights against short references that know nothing of packing or vectorising.

Each reference walks over lists of Python floats, one group or one trajectory at a time, as the paper writes it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algos import advantages, filters, token_advantages
from strop.algos.weighting import Weighting, token_weights

NAN = float("nan")
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)

# Rewards as scorers give them: few distinct values (so that groups tie), missing ones, and float noise.
reward = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, -1.0, NAN, 0.1 + 0.2, 0.3]), st.floats(-3, 3, width=32).map(lambda x: round(x, 3))
)


@st.composite
def rewards(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.tuples(st.integers(0, 5), st.integers(1, 6)))
    return np.array(draw(st.lists(reward, min_size=math.prod(shape), max_size=math.prod(shape)))).reshape(shape)


@st.composite
def rewards_and_counts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    rewards_PG = draw(rewards())
    counts = draw(st.lists(st.integers(0, 9), min_size=rewards_PG.size, max_size=rewards_PG.size))
    return rewards_PG, np.array(counts, np.int64).reshape(rewards_PG.shape)


def says_nothing(group: list[float]) -> bool:
    """Fewer than two rewards, or all within a millionth of each other."""
    return len(group) < 2 or max(group) - min(group) <= 1e-6 * max(1.0, *(abs(r) for r in group))


def by_group(rewards_PG: np.ndarray, reference: Callable[[list[float], list[int]], list[float]]) -> np.ndarray:
    """The reference's advantages of each group's present rewards; it also gets the columns they stand in."""
    result = np.full(rewards_PG.shape, NAN)
    for p, row in enumerate(rewards_PG.tolist()):
        columns = [g for g, r in enumerate(row) if not math.isnan(r)]
        group = [row[g] for g in columns]
        result[p, columns] = [0.0] * len(group) if says_nothing(group) else reference(group, columns)
    return result


def close(actual: np.ndarray, expected: np.ndarray | list[float]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@EXAMPLES
@given(rewards())
def test_grpo(rewards_PG: np.ndarray) -> None:
    def plain(group: list[float], _: list[int]) -> list[float]:
        return [r - statistics.fmean(group) for r in group]

    def scaled(group: list[float], _: list[int]) -> list[float]:
        return [(r - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6) for r in group]

    close(advantages.grpo(rewards_PG, scale_by_std=False), by_group(rewards_PG, plain))
    close(advantages.grpo(rewards_PG, scale_by_std=True), by_group(rewards_PG, scaled))


@EXAMPLES
@given(rewards())
def test_rloo_leaves_each_one_out(rewards_PG: np.ndarray) -> None:
    def reference(group: list[float], _: list[int]) -> list[float]:
        return [r - statistics.fmean(group[:i] + group[i + 1 :]) for i, r in enumerate(group)]

    close(advantages.rloo(rewards_PG), by_group(rewards_PG, reference))


@EXAMPLES
@given(rewards_and_counts())
def test_opo(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    rewards_PG, counts_PG = drawn
    for p in range(len(rewards_PG)):  # one task at a time, so that the reference can look up its own counts
        counts = counts_PG[p].tolist()

        def reference(group: list[float], columns: list[int], counts: list[int] = counts) -> list[float]:
            tokens = [counts[g] for g in columns]
            baseline = sum(n * r for n, r in zip(tokens, group, strict=True)) / sum(tokens) if sum(tokens) else 0.0
            return [r - baseline for r in group]

        close(advantages.opo(rewards_PG[p : p + 1], counts_PG[p : p + 1]), by_group(rewards_PG[p : p + 1], reference))


@EXAMPLES
@given(rewards())
def test_gpg_divides_by_what_is_informative(rewards_PG: np.ndarray) -> None:
    groups = [[r for r in row if not math.isnan(r)] for row in rewards_PG.tolist()]
    everyone, useful = sum(map(len, groups)), sum(len(g) for g in groups if not says_nothing(g))
    expected = by_group(rewards_PG, lambda group, _: [(r - statistics.fmean(group)) * everyone / useful for r in group])
    close(advantages.gpg(rewards_PG), expected)


@EXAMPLES
@given(rewards())
def test_leave_one_out_max(rewards_PG: np.ndarray) -> None:
    def reference(group: list[float], _: list[int]) -> list[float]:
        # What the group's best would lose without this attempt.
        return [max(group) - max(group[:i] + group[i + 1 :]) for i in range(len(group))]

    close(advantages.leave_one_out_max(rewards_PG, scale_by_std=False), by_group(rewards_PG, reference))
    scaled = by_group(rewards_PG, lambda g, c: [a / (statistics.stdev(g) + 1e-6) for a in reference(g, c)])
    close(advantages.leave_one_out_max(rewards_PG), scaled)


@EXAMPLES
@given(rewards(), st.integers(1, 4))
def test_pass_at_k_enumerates_subsets(rewards_PG: np.ndarray, k: int) -> None:
    expected = np.full(rewards_PG.shape, NAN)
    for p, row in enumerate(rewards_PG.tolist()):
        columns = [g for g, r in enumerate(row) if not math.isnan(r)]
        subsets = list(itertools.combinations(columns, k)) if len(columns) >= max(k, 2) else []
        passed = [any(row[g] >= 1.0 for g in subset) for subset in subsets]
        for g in columns:
            expected[p, g] = 0.0
            if any(passed) and not all(passed):
                mean, deviation = statistics.fmean(passed), statistics.pstdev(passed)
                mine = [(hit - mean) / deviation for hit, subset in zip(passed, subsets, strict=True) if g in subset]
                expected[p, g] = statistics.fmean(mine)
    close(advantages.pass_at_k(rewards_PG, k), expected)


def reference_whiten(values: list[float], counts: list[float]) -> list[float]:
    """Write each value down as often as it counts, and take the plain statistics of that list."""
    copies = [v for v, n in zip(values, counts, strict=True) if not math.isnan(v) for _ in range(int(n))]
    mean = statistics.fmean(copies) if copies else 0.0
    zero = says_nothing(copies)
    scale = 0.0 if zero else 1.0 / math.sqrt(statistics.variance(copies) + 1e-8)
    return [0.0 if n == 0 else v if math.isnan(v) else (v - mean) * scale for v, n in zip(values, counts, strict=True)]


@EXAMPLES
@given(rewards_and_counts())
def test_whiten(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    values, counts = drawn
    expected = reference_whiten(values.reshape(-1).tolist(), counts.reshape(-1).tolist())
    close(advantages.whiten(values, counts).reshape(-1), expected)


@EXAMPLES
@given(rewards_and_counts())
def test_reinforce_plus_plus_baseline(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    rewards_PG, counts_PG = drawn
    centred = by_group(rewards_PG, lambda group, _: [r - statistics.fmean(group) for r in group])
    expected = reference_whiten(centred.reshape(-1).tolist(), counts_PG.reshape(-1).tolist())
    expected = np.where(np.isnan(rewards_PG), NAN, np.array(expected).reshape(rewards_PG.shape))
    close(advantages.reinforce_plus_plus_baseline(rewards_PG, counts_PG), expected)


@EXAMPLES
@given(rewards(), st.floats(0.1, 3), st.floats(0.1, 3))
def test_gdpo(rewards_PG: np.ndarray, first: float, second: float) -> None:
    parts = [rewards_PG, np.flip(rewards_PG, axis=1).copy()]
    scaled = [
        by_group(part, lambda g, _: [(r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-6) for r in g])
        for part in parts
    ]
    total = first * scaled[0] + second * scaled[1]
    expected = np.array(reference_whiten(total.reshape(-1).tolist(), [1.0] * total.size)).reshape(total.shape)
    close(advantages.gdpo(parts, [first, second]), expected)


def test_gdpo_keeps_apart_what_a_sum_would_drown() -> None:
    loud, quiet = np.array([[0.0, 100.0, 100.0, 0.0]]), np.array([[1.0, 1.0, 0.0, 0.0]])
    summed = advantages.grpo(loud + quiet, scale_by_std=True)[0]
    apart = advantages.gdpo([loud, quiet])[0]
    assert summed[1] - summed[2] < 0.02  # the quiet reward is all but lost
    assert apart[1] - apart[2] == pytest.approx(apart[1] - apart[0], rel=1e-5)  # both count alike


def test_remax_keeps_groups_that_agree() -> None:
    close(advantages.remax(np.array([[1.0, NAN]]), np.array([0.25])), np.array([[0.75, NAN]]))


# Trajectories: lengths from 0 up, empty ones and wholly masked ones among them.
@st.composite
def trajectories(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array(draw(st.lists(st.integers(0, 6), max_size=6)), np.int64)
    total = int(lengths.sum())
    return lengths, np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)), np.bool_)


def split(values: np.ndarray, lengths: np.ndarray) -> list[list[float]]:
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])] if len(lengths) else []


@EXAMPLES
@given(trajectories(), st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_returns_and_gae_walk_back_over_trained_tokens(
    drawn: tuple[np.ndarray, np.ndarray], seed: int, discount: float, trace: float
) -> None:
    lengths_N, mask_T = drawn
    rng = np.random.default_rng(seed)
    rewards_T, values_T = rng.normal(size=(2, len(mask_T)))
    bootstrap_N = rng.normal(size=len(lengths_N))
    expected: list[tuple[float, float, float]] = []
    rows = (split(rewards_T, lengths_N), split(values_T, lengths_N), split(mask_T, lengths_N))
    for r, v, m, after in zip(*rows, bootstrap_N.tolist(), strict=True):
        to_go, gain, ahead = 0.0, 0.0, after
        backwards: list[tuple[float, float, float]] = []
        for t in reversed(range(len(r))):
            if m[t]:
                to_go = r[t] + discount * to_go
                gain = r[t] + discount * ahead - v[t] + discount * trace * gain
                ahead = v[t]
            backwards.append((to_go, gain, gain + v[t]) if m[t] else (0.0, 0.0, 0.0))
        expected += reversed(backwards)
    returns_T, gains_T, targets_T = np.array(expected).reshape(-1, 3).T
    close(token_advantages.returns_to_go(rewards_T, mask_T, lengths_N, discount=discount), returns_T)
    ours = token_advantages.gae(
        rewards_T, values_T, mask_T, lengths_N, discount=discount, trace=trace, bootstrap_N=bootstrap_N
    )
    close(ours[0], gains_T)
    close(ours[1], targets_T)
    bad_rewards_T, bad_values_T = np.where(mask_T, rewards_T, NAN), np.where(mask_T, values_T, np.inf)
    again = token_advantages.gae(
        bad_rewards_T, bad_values_T, mask_T, lengths_N, discount=discount, trace=trace, bootstrap_N=bootstrap_N
    )
    assert np.array_equal(again, ours)


@EXAMPLES
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4))
def test_optimal_token_baseline(seed: int, tasks: int, attempts: int) -> None:
    rng = np.random.default_rng(seed)
    rewards_PG = rng.choice([0.0, 1.0, NAN], size=(tasks, attempts), p=[0.4, 0.4, 0.2])
    lengths_PG = rng.integers(0, 6, size=(tasks, attempts))
    total = int(lengths_PG.sum())
    mask_T = rng.random(total) < 0.8
    probs_T = rng.uniform(0.05, 0.95, size=total)
    squares_T = probs_T**2 + rng.uniform(0, 0.05, size=total)  # sum p^2 holds the sampled token's own square

    energies: list[list[float]] = []  # W of each trained token, trajectory by trajectory
    for p, s, m in zip(*(split(x, lengths_PG.reshape(-1)) for x in (probs_T, squares_T, mask_T)), strict=True):
        steps = [1 - 2 * p[t] + s[t] for t in range(len(p)) if m[t]]
        energies.append(list(itertools.accumulate(steps)))
    expected: list[float] = []
    for n, masks in enumerate(split(mask_T, lengths_PG.reshape(-1))):
        group = range(n // attempts * attempts, (n // attempts + 1) * attempts)
        there = [g for g in group if not math.isnan(rewards_PG.reshape(-1)[g])]
        r = {g: float(rewards_PG.reshape(-1)[g]) for g in there}
        step = 0
        for m in masks:
            if not m:
                expected.append(0.0)
                continue
            reaching = [g for g in there if len(energies[g]) > step]
            weights = {g: energies[g][step] + 1e-8 for g in reaching}
            baseline = 0.0
            if len(reaching) >= 2:
                baseline = sum(r[g] * weights[g] for g in reaching) / sum(weights.values())
            if n not in there:
                expected.append(NAN)
            else:
                expected.append(0.0 if says_nothing(list(r.values())) else r[n] - baseline)
            step += 1
    close(token_advantages.optimal_token_baseline(rewards_PG, np.log(probs_T), squares_T, mask_T, lengths_PG), expected)


@EXAMPLES
@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 20))
def test_weights_are_the_mean_they_name(counts: list[int], horizon: int) -> None:
    """A03, A04, A06, A07: all weights come from one count of live trajectories; nothing divides by zero."""
    counts_N = np.array(counts, np.int64)
    live = [n for n in counts if n]
    tokens, rows = max(sum(counts), 1), max(len(live), 1)
    expected: dict[Weighting, list[float]] = {
        Weighting.TOKEN_MEAN: [1 / tokens for _ in counts],
        Weighting.TOKEN_SUM: [1.0 for _ in counts],
        Weighting.SEQUENCE_MEAN_TOKEN_MEAN: [1 / rows / max(n, 1) for n in counts],
        Weighting.SEQUENCE_MEAN_TOKEN_SUM: [1 / rows for _ in counts],
        Weighting.CONSTANT_HORIZON: [1 / rows / horizon for _ in counts],
    }
    assert set(expected) == set(Weighting)
    for weighting, weights in expected.items():
        ours = token_weights(weighting, counts_N, horizon=horizon)
        close(ours, [w if n else 0.0 for w, n in zip(weights, counts, strict=True)])
        if weighting in (Weighting.TOKEN_MEAN, Weighting.SEQUENCE_MEAN_TOKEN_MEAN):
            assert float((ours * counts_N).sum()) == pytest.approx(1.0 if live else 0.0)


@EXAMPLES
@given(rewards())
def test_informative(rewards_PG: np.ndarray) -> None:
    expected = [not says_nothing([r for r in row if not math.isnan(r)]) for row in rewards_PG.tolist()]
    assert filters.informative(rewards_PG).tolist() == expected


@EXAMPLES
@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=6))
def test_length_reward(attempts: list[tuple[int, bool]]) -> None:
    lengths, solved = ([n for n, _ in attempts], [s for _, s in attempts])
    expected: list[float] = []
    for n, right in attempts:
        spread = max(lengths) - min(lengths)
        gain = 0.5 - (n - min(lengths)) / spread if spread else 0.0
        expected.append(gain if right else min(gain, 0.0))
    close(filters.length_reward(np.array([lengths]), np.array([solved]))[0], expected)
