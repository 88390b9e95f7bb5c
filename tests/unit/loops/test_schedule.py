"""Learning rates over optimizer steps."""

from __future__ import annotations

import math

import pytest

from strop.config.loops import ScheduleConfig
from strop.engines.base import Overrides
from strop.loops.schedule import learning_rate, optim_params


def rates(total: int, **fields: object) -> list[float]:
    cfg = ScheduleConfig.model_validate({"lr": 2.0, **fields})
    return [learning_rate(cfg, update, total) for update in range(total)]


def test_warm_up_rises_to_the_peak_and_never_starts_at_zero() -> None:
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_to_the_final_fraction_at_the_last_step() -> None:
    assert rates(5, kind="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])
    assert rates(7, kind="linear", warmup_steps=2, final_fraction=0.5)[2:] == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])


def test_cosine_is_half_a_period() -> None:
    assert rates(5, kind="cosine") == pytest.approx([1 + math.cos(math.pi * i / 4) for i in range(5)])
    assert rates(3, kind="cosine", final_fraction=0.1)[-1] == pytest.approx(0.2)


def test_wsd_stays_and_falls_at_the_end() -> None:
    """arXiv 2404.06395: warm-up, stable, decay."""
    fields = {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.4}
    assert rates(10, **fields) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])
    assert rates(10, **fields, final_fraction=0.5)[5:] == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])
    assert rates(6, **{**fields, "decay_fraction": 1.0}) == pytest.approx(rates(6, kind="linear", warmup_steps=2)), (
        "the fall never begins within the warm-up"
    )


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_short_schedules_and_overruns_stay_in_bounds(kind: str) -> None:
    cfg = ScheduleConfig.model_validate({"lr": 2.0, "kind": kind, "warmup_steps": 3})
    assert all(0.0 <= learning_rate(cfg, update, 2) <= 2.0 for update in range(9))
    assert learning_rate(ScheduleConfig.model_validate({"lr": 2.0, "kind": kind}), 0, 1) == 2.0


def test_every_hyper_parameter_reaches_the_step() -> None:
    """C10: a schedule's fields all arrive; D07: the rate is a function of the update's number alone, so a resume keeps
    it."""
    cfg = ScheduleConfig(lr=1.0, warmup_steps=10, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.2, max_grad_norm=None)
    params = optim_params(cfg, 4, 100)
    assert (params.lr, params.weight_decay, params.max_grad_norm, params.keep) == (0.5, 0.2, math.inf, False)
    assert params.scoped == {"adamw": Overrides(betas=(0.8, 0.7), eps=1e-3)}, "Muon has neither"
    assert optim_params(cfg, 4, 100) == params


def test_groups_differ_by_scale_and_decay() -> None:
    groups = {"muon": {"lr_scale": 10.0}, "adamw": {"lr_scale": 0.5}, "adamw/router": {"weight_decay": 0.3}}
    params = optim_params(ScheduleConfig.model_validate({"lr": 2.0, "warmup_steps": 2, "groups": groups}), 0, 9)
    assert params.lr == 1.0
    assert params.scoped["muon"] == Overrides(lr=10.0)
    assert params.scoped["adamw"] == Overrides(lr=0.5, betas=(0.9, 0.95), eps=1e-8)
    assert params.scoped["adamw/router"] == Overrides(lr=1.0, weight_decay=0.3)
