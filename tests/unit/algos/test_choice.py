"""A recipe's words become the loss that they name, with its knobs and terms."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from strop.algos.choice import OF_SELECTION, policy_loss
from strop.algos.kl import Estimator
from strop.algos.losses import (
    CISPO,
    DRO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    DPPOKullbackLeibler,
    DPPOTotalVariation,
    ImportanceSampling,
    KLCov,
    PolicyGradient,
    PolicyLoss,
)
from strop.algos.sequence_losses import GMPO, GSPO, GSPOToken
from strop.config.policy import GRPOConfig, PolicyLossConfig

NAMED: dict[str, type[PolicyLoss]] = {
    "clip": ClippedSurrogate,
    "importance_sampling": ImportanceSampling,
    "policy_gradient": PolicyGradient,
    "gspo": GSPO,
    "gspo_token": GSPOToken,
    "gmpo": GMPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "dro": DRO,
    "dppo_tv": DPPOTotalVariation,
    "dppo_kl": DPPOKullbackLeibler,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
}
TERMS = {field.name for field in fields(PolicyLoss)}


def test_every_kind_is_here() -> None:
    assert NAMED.keys() == PolicyLossConfig.KNOBS.keys()


@pytest.mark.parametrize("kind", NAMED)
def test_a_kind_is_its_loss_and_every_knob_of_it_is_set(kind: str) -> None:
    knobs = {name: value for name, value in PolicyLossConfig.KNOBS[kind].items() if name not in OF_SELECTION}
    moved = {name: 2.0 if value is None else value * 0.5 + 0.5 for name, value in knobs.items()}
    loss = policy_loss(GRPOConfig.model_validate({"loss": {"kind": kind, **moved}}), 0.0)
    assert type(loss) is NAMED[kind]
    assert {field.name for field in fields(loss)} - TERMS == knobs.keys()
    assert {name: value for name, value in asdict(loss).items() if name in knobs} == moved


@pytest.mark.parametrize(("place", "paid"), [("loss", 0.3), ("reward", 0.0)])
def test_divergence_is_paid_in_one_place(place: str, paid: float) -> None:
    kl = {"place": place, "coefficient": 0.1, "estimator": "k2"}
    loss = policy_loss(GRPOConfig.model_validate({"kl": kl, "entropy_coefficient": 0.4}), 0.3)
    assert (loss.kl_coefficient, loss.kl_estimator, loss.entropy_coefficient) == (paid, Estimator.K2, 0.4)


def test_costs_of_routers_reach_the_loss() -> None:
    router = {"balance_coefficient": 0.2, "z_coefficient": 0.3}
    loss = policy_loss(GRPOConfig.model_validate({"router": router}), 0.0)
    assert (loss.balance_coefficient, loss.z_coefficient) == (0.2, 0.3)
