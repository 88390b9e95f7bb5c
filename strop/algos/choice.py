"""The knobs of a policy's loss in, the loss out."""

from __future__ import annotations

from dataclasses import replace

from strop.algos import losses, sequence_losses
from strop.algos.kl import Estimator
from strop.config.policy import PolicyLoopConfig

OF_SELECTION = {"fraction", "covariance_low", "covariance_high"}  # knobs of the choice that is made before the loss


def policy_loss(cfg: PolicyLoopConfig, kl_coefficient: float) -> losses.PolicyLoss:
    """The loss that `cfg` describes. `kl_coefficient` is what a nat costs at present; in the reward it is not here."""
    chosen = cfg.loss.model_dump(include=set(cfg.loss.KNOBS[cfg.loss.kind]), exclude=OF_SELECTION)
    loss = _kind(cfg.loss.kind)(**chosen)
    return replace(
        loss,
        kl_coefficient=kl_coefficient if cfg.kl.place == "loss" else 0.0,
        kl_estimator=Estimator(cfg.kl.estimator),
        entropy_coefficient=cfg.entropy_coefficient,
        balance_coefficient=cfg.router.balance_coefficient,
        z_coefficient=cfg.router.z_coefficient,
    )


def _kind(kind: str) -> type[losses.PolicyLoss]:
    match kind:
        case "clip":
            return losses.ClippedSurrogate
        case "importance_sampling":
            return losses.ImportanceSampling
        case "policy_gradient":
            return losses.PolicyGradient
        case "gspo":
            return sequence_losses.GSPO
        case "gspo_token":
            return sequence_losses.GSPOToken
        case "gmpo":
            return sequence_losses.GMPO
        case "cispo":
            return losses.CISPO
        case "sapo":
            return losses.SAPO
        case "dro":
            return losses.DRO
        case "dppo_tv":
            return losses.DPPOTotalVariation
        case "dppo_kl":
            return losses.DPPOKullbackLeibler
        case "clip_cov":
            return losses.ClipCov
        case "kl_cov":
            return losses.KLCov
        case _:
            raise ValueError(f"no loss is called {kind}")
