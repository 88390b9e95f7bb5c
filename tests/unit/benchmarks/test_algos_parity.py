"""The comparison with other libraries: it calls nothing equal that is not, and nothing documented that is not so."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.algos_parity import judge
from benchmarks.parity_batch import EMPTY, ROWS, SINGLE, SIZES, Case, draw
from benchmarks.parity_trl import trl_cases
from benchmarks.parity_verl import verl_cases


def verdict(case: Case, value: object, gradient: object = None) -> str:
    return str(judge("f", [case], [{"value": value, "gradient": gradient}])).split()[1].removesuffix(":")


def test_equal_is_value_and_gradient() -> None:
    case = Case(value=1.0, gradient=np.array([2.0, 3.0]))
    assert verdict(case, 1.0, [2.0, 3.0]) == "equal"
    assert verdict(case, 1.1, [2.0, 3.0]) == "DIFFERENT"
    assert verdict(case, 1.0, [2.0, 3.1]) == "DIFFERENT"
    assert verdict(case, 1.0, [[2.0, 3.0]]) == "DIFFERENT"
    assert verdict(case, float("nan"), [2.0, 3.0]) == "DIFFERENT"


def test_a_documented_difference_must_be_there_and_be_all() -> None:
    case = Case(value=1.0, gradient=np.array([2.0])).scaled("theirs is half", 0.5)
    assert verdict(case, 0.5, [1.0]) == "documented"
    assert verdict(case, 1.0, [2.0]) == "DIFFERENT"  # there is none
    assert verdict(case, 0.5, [2.0]) == "DIFFERENT"  # there is another one


def test_what_is_not_counted_is_not_compared() -> None:
    case = Case(value=np.array([1.0, 2.0]), counted=np.array([True, False]))
    assert verdict(case, [1.0, float("nan")]) == "equal"
    assert verdict(case, [0.0, 2.0]) == "DIFFERENT"


def test_every_batch_has_a_say() -> None:
    cases = [Case(value=1.0), Case(value=2.0)]
    assert judge("f", cases, [{"value": 1.0}, {"value": 2.0}]).equal
    assert not judge("f", cases, [{"value": 1.0}, {"value": 2.1}]).equal


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_has_what_the_comparison_is_about(seed: int) -> None:
    batch = draw(seed)
    assert not batch.mask[EMPTY].any() and batch.mask[SINGLE].any()
    assert (batch.mask.any(axis=1).sum(), sum(SIZES)) == (ROWS - 1, ROWS)
    assert (batch.plain_mask & ~batch.mask).any()  # tool tokens inside
    ends = batch.at_end(batch.mask)
    live = batch.mask.any(axis=1)
    assert np.array_equal(np.where(batch.mask, ends, 0.0).sum(axis=1)[live], batch.rewards[live])
    raw = json.loads(json.dumps(batch.as_json()))
    assert np.array_equal(raw["old"], batch.columns["old"])


def test_strop_has_a_finite_number_for_every_function() -> None:
    batch = draw(0)
    for cases in (verl_cases(batch), trl_cases(batch)):
        for name, case in cases.items():
            counted = np.broadcast_to(case.counted, np.shape(case.value))
            missing = np.isnan(np.asarray(case.value)[counted])
            assert missing.sum() == ("missing reward" in case.difference), name
            if case.difference:
                assert np.isfinite(np.asarray(case.explained_value)[counted]).all(), name
