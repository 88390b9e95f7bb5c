"""The learning rate over optimizer steps, as plain functions: engines own no scheduler."""

from __future__ import annotations

import math

from strop.config.recipe import ScheduleConfig
from strop.engines.base import OptimParams


def learning_rate(cfg: ScheduleConfig, update: int, total: int) -> float:
    """The rate of optimizer step `update` (from 0) of `total`: a linear rise, then constant, linear or half a cosine
    down.

    The fall begins after the warm-up and reaches `final_fraction` of the peak at the last step.
    """
    if update < cfg.warmup_steps:
        return cfg.lr * (update + 1) / cfg.warmup_steps
    span = max(total - 1 - cfg.warmup_steps, 1)
    progress = min((update - cfg.warmup_steps) / span, 1.0)
    match cfg.kind:
        case "constant":
            return cfg.lr
        case "linear":
            fall = 1.0 - progress
        case "cosine":
            fall = 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.lr * (cfg.final_fraction + (1.0 - cfg.final_fraction) * fall)


def optim_params(cfg: ScheduleConfig, update: int, total: int) -> OptimParams:
    """Everything that optimizer step `update` of `total` needs, by value."""
    return OptimParams(
        lr=learning_rate(cfg, update, total),
        betas=cfg.betas,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        max_grad_norm=cfg.max_grad_norm,
    )
