"""The learning rate over optimizer steps, as plain functions: engines own no scheduler."""

from __future__ import annotations

import math
from dataclasses import replace

from strop.config.loops import ScheduleConfig
from strop.engines.base import OptimParams, Overrides


def learning_rate(cfg: ScheduleConfig, update: int, total: int) -> float:
    """The rate of optimizer step `update` (from 0) of `total`: a linear rise, then constant, linear or half a cosine
    down.

    The fall begins after the warm-up and reaches `final_fraction` of the peak at the last step. That of `wsd`
    (arXiv 2404.06395; the line down: arXiv 2405.18392) begins `decay_fraction` of all steps before the last, and never
    within the warm-up.
    """
    if update < cfg.warmup_steps:
        return cfg.lr * (update + 1) / cfg.warmup_steps
    stable = total - 1 - round(cfg.decay_fraction * total) if cfg.kind == "wsd" else 0
    begin = max(cfg.warmup_steps, stable)
    progress = min(max(update - begin, 0) / max(total - 1 - begin, 1), 1.0)
    match cfg.kind:
        case "constant":
            return cfg.lr
        case "linear" | "wsd":
            fall = 1.0 - progress
        case "cosine":
            fall = 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.lr * (cfg.final_fraction + (1.0 - cfg.final_fraction) * fall)


def optim_params(cfg: ScheduleConfig, update: int, total: int) -> OptimParams:
    """Everything that optimizer step `update` of `total` needs, by value."""
    lr = learning_rate(cfg, update, total)
    scoped = {
        scope: Overrides(lr=lr * group.lr_scale, weight_decay=group.weight_decay) for scope, group in cfg.groups.items()
    }
    # The moments' rates are AdamW's alone: Muon has none.
    scoped["adamw"] = replace(scoped.get("adamw", Overrides()), betas=cfg.betas, eps=cfg.eps)
    return OptimParams(
        lr=lr,
        weight_decay=cfg.weight_decay,
        max_grad_norm=math.inf if cfg.max_grad_norm is None else cfg.max_grad_norm,
        scoped=scoped,
    )
