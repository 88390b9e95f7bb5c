"""A step's attempts: groups with their rewards in, one advantage for each attempt out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from strop.algos import advantages, filters
from strop.algos.filters import Counts, Float64s
from strop.config.policy import AdvantageConfig, LengthConfig
from strop.types import Ending, Group, Metrics


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """What a step plays: P groups of G attempts, those that are learned from."""

    groups: list[Group]
    rewards_PG: Float64s  # docked for length; NaN: the episode failed
    greedy_P: Float64s | None  # the reward of a greedy attempt at each task, where it was asked for
    metrics: Metrics  # of all that was played, the dropped groups too

    @cached_property
    def counts_PG(self) -> Counts:
        """Tokens that each attempt sampled."""
        return np.array([[t.num_sampled for t in group] for group in self.groups], np.int64)

    def parts(self, name: str) -> Float64s:
        """One named part of the rewards [P, G]; NaN where the episode failed or did not name it."""
        return np.array(
            [
                [np.nan if t.ending is Ending.FAILED else t.rewards.get(name, np.nan) for t in group]
                for group in self.groups
            ]
        )


def attempt_advantages(cfg: AdvantageConfig, attempts: Attempts) -> Float64s:
    """One advantage for each attempt, float64 [P, G]; NaN where its episode failed."""
    rewards_PG = attempts.rewards_PG
    match cfg.kind:
        case "grpo" | "optimal_token_baseline":  # the second's own are of single tokens, see `token_level`
            return advantages.grpo(rewards_PG, scale_by_std=bool(cfg.scale_by_std))
        case "rloo":
            return advantages.rloo(rewards_PG)
        case "remax":
            assert attempts.greedy_P is not None
            return advantages.remax(rewards_PG, attempts.greedy_P)
        case "opo":
            return advantages.opo(rewards_PG, attempts.counts_PG)
        case "gpg":
            return advantages.gpg(rewards_PG, scale_by_std=bool(cfg.scale_by_std))
        case "gdpo":
            weights = cfg.weights or {}
            return advantages.gdpo([attempts.parts(name) for name in weights], list(weights.values()))
        case "leave_one_out_max":
            return advantages.leave_one_out_max(rewards_PG, scale_by_std=bool(cfg.scale_by_std))
        case "pass_at_k":
            assert cfg.k is not None and cfg.solved_at is not None
            return advantages.pass_at_k(rewards_PG, cfg.k, solved_at=cfg.solved_at)
        case "reinforce_plus_plus":
            return advantages.whiten(rewards_PG, attempts.counts_PG)
        case "reinforce_plus_plus_baseline":
            return advantages.reinforce_plus_plus_baseline(rewards_PG, attempts.counts_PG)


def rewards_of(groups: list[Group]) -> Float64s:
    return np.array([[t.reward for t in group] for group in groups], np.float64)


def docked(groups: list[Group], length: LengthConfig, max_tokens: int) -> Float64s:
    """Rewards, less what long replies cost."""
    rewards_PG = rewards_of(groups)
    if not (length.overlong_buffer or length.prefer_short) or not groups:
        return rewards_PG
    counts_PG = np.array([[t.num_sampled for t in group] for group in groups], np.int64)
    if length.overlong_buffer:
        rewards_PG = rewards_PG + filters.overlong_penalty(
            counts_PG, max_length=max_tokens, buffer=length.overlong_buffer, factor=length.overlong_penalty
        )
    if length.prefer_short:
        solved_PG = rewards_of(groups) >= length.solved_at
        rewards_PG = rewards_PG + length.prefer_short * filters.length_reward(counts_PG, solved_PG)
    return rewards_PG
