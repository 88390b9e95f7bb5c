"""A critic's view of a step: its values of the packed tokens in, advantages for the policy and returns for itself out.

scored batches + values [T] -> generalised advantages and returns [M] -> Batch[PolicyInputs], Batch[ValueInputs]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from strop.algos.advantages import whiten
from strop.algos.filters import Bools, Float64s
from strop.algos.kl import Estimator
from strop.algos.token_advantages import gae
from strop.algos.value_losses import ValueInputs
from strop.config.ppo import PPOConfig
from strop.data.attempts import Attempts
from strop.data.packing import Batch, Int64s
from strop.data.scored import Scored, rewards_at_ends, with_advantages
from strop.types import Ending, Metric, Metrics, Outputs, Reduction

CUT_SHORT = (Ending.LENGTH, Ending.MAX_TURNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Valued:
    """An update's batches, and what the critic made of them before the step's updates. M counts trained tokens."""

    scored: Scored  # with the advantages
    values: list[Tensor]  # one [T] for each batch
    advantages_M: Float64s
    returns_M: Float64s

    @property
    def values_M(self) -> Float64s:
        return self.scored.trained.gather(self.values)

    def critic_batches(self) -> list[Batch[ValueInputs]]:
        """The batches as the critic learns from them."""
        returns = self.scored.trained.scatter(self.returns_M)
        return [
            Batch(
                tokens_T=batch.tokens_T,
                targets_T=batch.targets_T,
                mask_T=batch.mask_T,
                weights_T=batch.weights_T,
                layout=batch.layout,
                inputs=ValueInputs(old_values_T=values_T, returns_T=returns_T),
                routes=None,
            )
            for batch, values_T, returns_T in zip(self.scored.packed.batches, self.values, returns, strict=True)
        ]


def value_tokens(
    cfg: PPOConfig,
    attempts: Attempts,
    parts: Sequence[Int64s],
    scored: Sequence[Scored],
    expected: Sequence[Sequence[Outputs]],
    *,
    kl_coefficient: float,
) -> list[Valued]:
    """Advantages and returns of a step's tokens, update by update. `parts` says which groups each holds, `expected` are
    the critic's outputs for its batches.

    The reward stands at an attempt's last trained token; a divergence in the reward is taken off at each. Raises
    ValueError when the outputs have no values.
    """
    return [
        _valued(cfg, attempts, part, update, outputs, kl_coefficient)
        for part, update, outputs in zip(parts, scored, expected, strict=True)
    ]


def _valued(
    cfg: PPOConfig,
    attempts: Attempts,
    part: Int64s,
    scored: Scored,
    outputs: Sequence[Outputs],
    kl_coefficient: float,
) -> Valued:
    trained = scored.trained
    values = [output.values_T for output in outputs if output.values_T is not None]
    if len(values) != len(scored.packed.batches):
        raise ValueError(f"{len(values)} batches have values, of {len(scored.packed.batches)}")
    rewards_PG = attempts.rewards_PG[part]
    rewards_M = rewards_at_ends(trained, rewards_PG[~np.isnan(rewards_PG)])
    if cfg.kl.place == "reward" and kl_coefficient > 0:
        rewards_M = rewards_M - kl_coefficient * scored.divergence_M(Estimator(cfg.kl.estimator))
    bootstrap_N = None
    if cfg.bootstrap_truncated:
        bootstrap_N = np.where(_cut_short(attempts, part) & (trained.counts_N > 0), trained.ends(values), 0.0)
    advantages_M, returns_M = gae(
        rewards_M,
        trained.gather(values),
        np.ones(len(trained), np.bool_),
        trained.counts_N,
        discount=cfg.discount,
        trace=cfg.trace,
        bootstrap_N=bootstrap_N,
    )
    valued = Valued(scored=scored, values=values, advantages_M=advantages_M, returns_M=returns_M)
    return _advised(valued, advantages_M)


def whitened(valued: Sequence[Valued]) -> list[Valued]:
    """The same updates with advantages of mean 0 and variance 1 over all of them."""
    every_M = np.concatenate([v.advantages_M for v in valued])
    whole_M = whiten(every_M, np.ones(len(every_M), np.bool_))
    ends = np.cumsum([len(v.advantages_M) for v in valued])[:-1]
    return [_advised(v, advantages_M) for v, advantages_M in zip(valued, np.split(whole_M, ends), strict=True)]


def describe_values(valued: Sequence[Valued]) -> Metrics:
    """How good the critic was before the step: the part of the returns' variance that its values explain, and more.

    `value/explained_variance` is 1 - variance(return - value) / variance(return); it is left out where every return is
    the same.
    """
    returns_M = np.concatenate([v.returns_M for v in valued])
    if len(returns_M) == 0:
        return {}
    advantages_M = np.concatenate([v.advantages_M for v in valued])
    rest_M = returns_M - np.concatenate([v.values_M for v in valued])
    metrics: Metrics = {
        "value/return": Metric(Reduction.MEAN, float(returns_M.sum()), len(returns_M)),
        "advantage/mean": Metric(Reduction.MEAN, float(advantages_M.sum()), len(advantages_M)),
        "advantage/std": Metric(Reduction.MEAN, float(advantages_M.std())),
    }
    if np.ptp(returns_M) > 0:
        metrics["value/explained_variance"] = Metric(Reduction.MEAN, float(1.0 - rest_M.var() / returns_M.var()))
    return metrics


def _advised(valued: Valued, advantages_M: Float64s) -> Valued:
    return replace(valued, advantages_M=advantages_M, scored=with_advantages(valued.scored, advantages_M))


def _cut_short(attempts: Attempts, part: Int64s) -> Bools:
    """Which of the packed attempts did not come to their end by themselves: [N]."""
    ended = [
        trajectory.ending in CUT_SHORT
        for p in part
        for trajectory, reward in zip(attempts.groups[p], attempts.rewards_PG[p], strict=True)
        if not np.isnan(reward)
    ]
    return np.array(ended, np.bool_)
