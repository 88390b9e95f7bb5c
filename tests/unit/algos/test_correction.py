"""Numbers that lie on a bound."""

from __future__ import annotations

import pytest
import torch

from strop.algos.correction import Divergence, Level, Outside, accepted, importance_weights, off_policy_accepted
from strop.algos.kl import Coefficient
from strop.types import Layout

SAME = torch.tensor([-1.0, -2.0])
BOTH = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("divergence", list(Divergence))
def test_the_same_policy_is_accepted_by_the_tightest_bounds(level: Level, divergence: Divergence) -> None:
    if divergence is Divergence.RATIO and level is Level.SEQUENCE_MAX:
        return  # refused
    bounds = {"low": 1.0, "high": 1.0} if divergence is Divergence.RATIO else {"high": 0.0}
    kept_T, metrics = accepted(SAME, SAME, Layout((2,)), BOTH, divergence=divergence, level=level, **bounds)
    assert kept_T.all()
    assert metrics["correction/rejected_fraction"].result == 0.0


def test_a_weight_on_its_bound_is_neither_dropped_nor_counted() -> None:
    for low, high in ((0.5, 1.0), (1.0, 2.0)):
        weights_T, metrics = importance_weights(
            SAME, SAME, Layout((2,)), BOTH, low=low, high=high, outside=Outside.ZERO
        )
        assert weights_T.tolist() == [1.0, 1.0]
        assert metrics["correction/fraction_low"].result == metrics["correction/fraction_high"].result == 0.0


def test_a_sequence_on_its_bound_is_kept_and_so_is_one_without_a_side() -> None:
    kept_T, _ = off_policy_accepted(SAME, SAME, torch.tensor([-1.0, -1.0]), Layout((2,)), BOTH, high=0.0)
    assert kept_T.all()
    kept_T, _ = off_policy_accepted(SAME - 1, SAME, torch.tensor([0.0, -1.0]), Layout((2,)), BOTH, high=0.5)
    assert kept_T.tolist() == [True, False]


def test_a_coefficient_may_be_zero_and_its_target_small() -> None:
    assert Coefficient(value=0.0).value == 0.0
    assert Coefficient(value=1.0, target=0.5, horizon=0.5).after(kl=0.5, tokens=10).value == 1.0
