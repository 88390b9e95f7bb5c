"""From batches to attempts and back: nothing is lost, moved or counted twice, however a step is packed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algos.weighting import Weighting, token_weights
from strop.data.packing import Packed, pack_policy, train_only
from strop.types import Float32s, Group, Trajectory
from tests.unit.data.random_groups import random_groups


def pack(groups: list[Group], rng: np.random.Generator, advantages_PG: np.ndarray) -> Packed:
    return pack_policy(
        groups,
        advantages_PG,
        max_tokens=int(rng.integers(20, 80)),
        weighting="token_mean",
        horizon=None,
        temperature=1.0,
        share_prefixes=bool(rng.integers(2)),
        data_parallel=int(rng.integers(1, 4)),
    )


def trained_logprobs(trajectory: Trajectory) -> list[Float32s]:
    return [s.logprobs[1:][s.sampled[1:]] for s in trajectory.segments]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_gather_is_the_attempts_own_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = random_groups(rng)
    advantages_PG = np.where(rng.random((len(groups), 3)) < 0.2, np.nan, rng.normal(size=(len(groups), 3)))
    packed = pack(groups, rng, advantages_PG)
    kept = [
        t for group, row in zip(groups, advantages_PG, strict=True) for t, a in zip(group, row, strict=True) if a == a
    ]
    expected = [np.concatenate([*trained_logprobs(t), np.zeros(0, np.float32)]) for t in kept]
    trained = packed.trained
    assert trained.counts_N.tolist() == [len(part) for part in expected]
    found_M = trained.gather([batch.inputs.behavior_logprobs_T for batch in packed.batches])
    np.testing.assert_array_equal(found_M, np.concatenate([*expected, np.zeros(0)]))
    assert trained.gather([batch.mask_T for batch in packed.batches]).all()
    assert len(trained) == sum(int(batch.mask_T.sum()) for batch in packed.batches)

    value_M = rng.normal(size=len(trained))
    columns = trained.scatter(value_M)
    assert [len(column) for column in columns] == [len(batch) for batch in packed.batches]
    np.testing.assert_allclose(trained.gather(columns), value_M, rtol=1e-6)
    assert all(not column[~batch.mask_T].any() for column, batch in zip(columns, packed.batches, strict=True))

    ends_N = trained.ends([batch.tokens_T for batch in packed.batches])
    for trajectory, end in zip(kept, ends_N, strict=True):
        live = [s for s, part in zip(trajectory.segments, trained_logprobs(trajectory), strict=True) if len(part)]
        assert np.isnan(end) if not live else end == live[-1].tokens[-1]


@pytest.mark.parametrize("weighting", [w for w in Weighting if w is not Weighting.CONSTANT_HORIZON])
def test_train_only_weighs_as_if_there_had_been_no_others(weighting: Weighting) -> None:
    rng = np.random.default_rng(3)
    groups = random_groups(rng)
    packed = pack(groups, rng, rng.normal(size=(len(groups), 3)))
    tokens = packed.trained
    keep_M = rng.random(len(tokens)) < 0.5
    kept = train_only(packed, keep_M, weighting=weighting, horizon=None)
    counts_N = np.bincount(tokens.attempt_M[keep_M], minlength=len(tokens.counts_N))
    weight_M = token_weights(weighting, counts_N, horizon=None)[tokens.attempt_M]
    np.testing.assert_array_equal(tokens.gather([batch.mask_T for batch in kept.batches]), keep_M)
    np.testing.assert_allclose(
        tokens.gather([batch.weights_T for batch in kept.batches]), np.where(keep_M, weight_M, 0.0), rtol=1e-6
    )
    assert kept.trained.counts_N.tolist() == counts_N.tolist()
    columns = tokens.scatter(np.arange(len(tokens), dtype=np.float64))
    assert kept.trained.gather(columns).tolist() == np.flatnonzero(keep_M).tolist()


def test_a_step_without_trained_tokens() -> None:
    packed = pack([Group("t", [Trajectory()] * 3)], np.random.default_rng(0), np.zeros((1, 3)))
    assert packed.batches == []
    assert packed.trained.counts_N.tolist() == [0, 0, 0]
    assert packed.trained.scatter(np.zeros(0)) == []
    assert packed.trained.gather([]).tolist() == []
    assert np.isnan(packed.trained.ends([])).tolist() == [True] * 3
