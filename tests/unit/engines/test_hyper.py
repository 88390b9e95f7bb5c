"""What a step's hyper-parameters become: every rule of OptimParams, on the values alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from strop.engines.base import OptimParams, Overrides
from strop.engines.hyper import Resolved, Standing
from strop.errors import ConfigError, EngineError

ADAMW = ["adamw/decay", "adamw/no_decay"]
MUON = [*ADAMW, "adamw/router", "muon/hidden"]
FREE = frozenset({"adamw/no_decay", "adamw/router"})


def standing(names: list[str] = ADAMW) -> Standing:
    return Standing.of(names, FREE & set(names))


def values(resolved: Resolved, key: str) -> dict[str, Any]:
    return {name: group[key] for name, group in resolved.groups.items() if key in group}


def problems(held: Standing, params: OptimParams) -> tuple[str, ...]:
    before = held.state()
    with pytest.raises(ConfigError) as caught:
        held.resolve(params)
    assert held.state() == before, "something changed although the step was refused"
    return caught.value.problems


def test_what_nobody_gives_is_as_declared() -> None:
    resolved = standing(MUON).resolve(OptimParams(lr=0.5))
    adamw = {"lr": 0.5, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
    assert resolved.groups["adamw/decay"] == resolved.groups["adamw/no_decay"] == adamw
    assert resolved.groups["muon/hidden"] == {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.95}
    assert resolved.max_grad_norm == 1.0


def test_there_is_no_learning_rate_until_somebody_gives_one() -> None:
    held = standing()
    assert "adamw/decay has no learning rate: give lr" in problems(held, OptimParams())[0]
    assert problems(held, OptimParams(scoped={"adamw/decay": Overrides(lr=1.0)}))[0].startswith("adamw/no_decay has no")
    held.resolve(OptimParams(lr=0.1, keep=True))
    assert values(held.resolve(OptimParams()), "lr") == {"adamw/decay": 0.1, "adamw/no_decay": 0.1}


def test_the_nearest_scope_wins() -> None:
    scoped = {"adamw": Overrides(lr=2.0), "adamw/router": Overrides(lr=3.0), "muon": Overrides(lr=4.0)}
    resolved = standing(MUON).resolve(OptimParams(lr=1.0, scoped=scoped))
    assert values(resolved, "lr") == {
        "adamw/decay": 2.0, "adamw/no_decay": 2.0, "adamw/router": 3.0, "muon/hidden": 4.0,
    }  # fmt: skip
    one = standing(MUON).resolve(OptimParams(lr=1.0, scoped={"adamw/no_decay": Overrides(betas=[0.1, 0.2])}))
    assert values(one, "betas")["adamw/decay"] == (0.9, 0.95)
    assert values(one, "betas")["adamw/no_decay"] == (0.1, 0.2)


def test_an_override_lasts_one_step_unless_it_is_kept() -> None:
    held = standing()
    held.resolve(OptimParams(lr=0.1, eps=1e-3, max_grad_norm=5, keep=True))
    once = held.resolve(OptimParams(lr=0.2, weight_decay=0.3, max_grad_norm=math.inf))
    assert once.max_grad_norm == math.inf and once.groups["adamw/decay"]["weight_decay"] == 0.3
    after = held.resolve(OptimParams())
    assert after.groups["adamw/decay"] == {"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-3}
    assert after.max_grad_norm == 5.0
    after.groups["adamw/decay"]["lr"] = 7.0  # what a step was given is not what stands
    assert held.resolve(OptimParams()).groups["adamw/decay"]["lr"] == 0.1


def test_decay_never_reaches_groups_free_of_it_unless_named() -> None:
    held = standing(MUON)
    globally = held.resolve(OptimParams(lr=1.0, weight_decay=0.5))
    assert values(globally, "weight_decay") == {
        "adamw/decay": 0.5, "adamw/no_decay": 0.0, "adamw/router": 0.0, "muon/hidden": 0.5,
    }  # fmt: skip
    by_optimizer = held.resolve(OptimParams(lr=1.0, scoped={"adamw": Overrides(weight_decay=0.5)}))
    assert values(by_optimizer, "weight_decay")["adamw/decay"] == 0.5
    assert values(by_optimizer, "weight_decay")["adamw/no_decay"] == 0.0
    named = held.resolve(OptimParams(lr=1.0, scoped={"adamw/no_decay": Overrides(weight_decay=0.5)}))
    assert values(named, "weight_decay")["adamw/no_decay"] == 0.5
    assert values(named, "weight_decay")["adamw/decay"] == 0.0


@pytest.mark.parametrize(
    ("key", "value"), [("lr", 1), ("eps", 0), ("weight_decay", np.float32(0.5)), ("lr", np.int64(2))]
)
def test_whole_numbers_and_numpy_numbers_are_taken_as_floats(key: str, value: Any) -> None:
    given: dict[str, Any] = {"lr": 1.0, key: value}
    taken = standing().resolve(OptimParams(**given)).groups["adamw/decay"][key]
    assert taken == float(value) and type(taken) is float


def test_a_list_is_taken_as_a_pair() -> None:
    betas = standing().resolve(OptimParams(lr=1.0, betas=[0, 0.5])).groups["adamw/decay"]["betas"]
    assert betas == (0.0, 0.5) and type(betas) is tuple and type(betas[0]) is float


NUMBER = "it must be a finite number of at least 0"
PAIR = "it must be two numbers of at least 0 and below 1"
NORM = "it must be a number above 0; math.inf turns clipping off"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("lr", "1e-3", f"lr is '1e-3': {NUMBER}"),
        ("lr", True, f"lr is True: {NUMBER}"),
        ("lr", math.nan, f"lr is nan: {NUMBER}"),
        ("lr", math.inf, f"lr is inf: {NUMBER}"),
        ("lr", -1, f"lr is -1: {NUMBER}"),
        ("lr", [0.1], f"lr is [0.1]: {NUMBER}"),
        ("eps", torch.tensor(1.0), f"eps is tensor(1.): {NUMBER}"),
        ("weight_decay", "0", f"weight_decay is '0': {NUMBER}"),
        ("betas", 0.9, f"betas is 0.9: {PAIR}"),
        ("betas", (0.9,), f"betas is (0.9,): {PAIR}"),
        ("betas", [0.9, 0.9, 0.9], f"betas is [0.9, 0.9, 0.9]: {PAIR}"),
        ("betas", (0.9, 1.0), f"betas is (0.9, 1.0): {PAIR}"),
        ("betas", (0.9, math.nan), f"betas is (0.9, nan): {PAIR}"),
        ("betas", (False, 0.9), f"betas is (False, 0.9): {PAIR}"),
        ("betas", "99", f"betas is '99': {PAIR}"),
        ("max_grad_norm", 0, f"max_grad_norm is 0: {NORM}"),
        ("max_grad_norm", math.nan, f"max_grad_norm is nan: {NORM}"),
        ("max_grad_norm", "inf", f"max_grad_norm is 'inf': {NORM}"),
        ("max_grad_norm", True, f"max_grad_norm is True: {NORM}"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_expected(key: str, value: Any, expected: str) -> None:
    given: dict[str, Any] = {"lr": 1.0, "keep": True, key: value}
    (sentence,) = problems(standing(), OptimParams(**given))
    assert sentence.startswith(expected)


@pytest.mark.parametrize(
    "tensor", [torch.tensor([0.1, 0.2]), torch.tensor(-1.0), torch.tensor(math.nan), torch.tensor(1)]
)
def test_a_tensor_that_is_no_rate_is_refused(tensor: torch.Tensor) -> None:
    assert "or a tensor of one such number" in problems(standing(), OptimParams(lr=tensor))[0]


def test_every_mistake_is_named_at_once() -> None:
    scoped = {"adam": Overrides(lr=1.0), "adamw": Overrides(eps=-1), "muon/hidden": Overrides(lr="x")}  # pyright: ignore
    found = problems(standing(MUON), OptimParams(lr=1.0, betas=(0.5, 0.5), scoped=scoped, max_grad_norm=-2))
    assert len(found) == 5
    assert found[0] == (
        "scoped['adam'] is neither an optimizer nor a group: there are adamw, muon, adamw/decay, adamw/no_decay, "
        "adamw/router, muon/hidden"
    )
    assert found[2].startswith("scoped['adamw'].eps is -1") and found[3].startswith("scoped['muon/hidden'].lr is 'x'")


def test_a_key_that_only_one_of_two_optimizers_has_must_be_scoped() -> None:
    """Never half applied: AdamW's groups do not get what Muon's cannot."""
    cases: list[tuple[str, Any, str, str]] = [
        ("betas", (0.5, 0.5), "adamw", "muon"),
        ("momentum", 0.5, "muon", "adamw"),
    ]
    for key, value, owner, other in cases:
        given: dict[str, Any] = {"lr": 1.0, key: value}
        (sentence,) = problems(standing(MUON), OptimParams(**given))
        assert sentence.startswith(f"{key}: {owner} has it and {other} has not") and f"{owner!r}: Overrides" in sentence
        scoped = standing(MUON).resolve(OptimParams(lr=1.0, scoped={owner: Overrides(**{key: value})}))
        assert set(values(scoped, key).values()) == {value}
    assert values(standing().resolve(OptimParams(lr=1.0, betas=(0.5, 0.5))), "betas")["adamw/decay"] == (0.5, 0.5)


@pytest.mark.parametrize("scope", ["muon", "muon/hidden"])
def test_a_key_that_the_addressed_optimizer_lacks_is_refused_with_those_it_has(scope: str) -> None:
    (sentence,) = problems(standing(MUON), OptimParams(lr=1.0, scoped={scope: Overrides(betas=(0.5, 0.5))}))
    assert sentence == f"scoped['{scope}'].betas: no group here has it; muon has lr, weight_decay, momentum"
    (sentence,) = problems(standing(), OptimParams(lr=1.0, momentum=0.5))
    assert sentence == "momentum: no group here has it; adamw has lr, weight_decay, betas, eps"


def test_adamw_may_be_addressed_when_muon_takes_everything() -> None:
    """What the loops' schedules do: the moments' rates are AdamW's, whether or not a parameter is left to it."""
    alone = standing(["muon/hidden"])
    resolved = alone.resolve(OptimParams(lr=1.0, scoped={"adamw": Overrides(betas=(0.5, 0.5))}))
    assert resolved.groups == {"muon/hidden": {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.95}}
    for scope, eps, words in (("adamw", -1, "scoped['adamw'].eps is -1"), ("adamw/decay", 1, "is neither")):
        assert words in problems(alone, OptimParams(lr=1.0, scoped={scope: Overrides(eps=eps)}))[0]


def test_a_scope_has_no_norm_of_its_own() -> None:
    inner = OptimParams(max_grad_norm=2.0)
    assert problems(standing(), OptimParams(lr=1.0, scoped={"adamw": inner}))[0].startswith(
        "scoped holds an OptimParams"
    )


def test_a_tensor_is_handed_on_and_a_number_takes_its_place() -> None:
    held, rate = standing(), torch.tensor(0.25)
    kept = held.resolve(OptimParams(lr=rate, keep=True))
    assert kept.groups["adamw/decay"]["lr"] is rate and kept.applied()["adamw/decay"].lr == 0.25
    assert held.resolve(OptimParams(lr=1)).groups["adamw/decay"]["lr"] == 1.0
    assert held.resolve(OptimParams()).groups["adamw/decay"]["lr"] is rate


def test_what_stands_survives_a_checkpoint() -> None:
    held, other = standing(MUON), standing(MUON)
    held.resolve(OptimParams(lr=torch.tensor(0.5), max_grad_norm=math.inf, keep=True, scoped={"muon": Overrides(lr=2)}))
    other.load_state(held.state())
    assert other.resolve(OptimParams()) == held.resolve(OptimParams())
    assert type(other.groups["adamw/decay"]["betas"]) is tuple
    with pytest.raises(EngineError, match=r"muon/hidden.*adamw/decay, adamw/no_decay: engine.optimizer"):
        standing().load_state(held.state())
