"""The constants of an update: batches and what unmoved models say of them in, the batches as they are learned from out.

    scored batches -> advantages of single tokens -> corrections, rejected and selected tokens -> batches

Whatever looks at more than one sequence is computed here, over the whole update, before its first gradient: so halves
of a batch still add up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from strop.algos import correction, selection, token_advantages
from strop.algos.filters import Bools, Float64s
from strop.algos.kl import Estimator, estimate
from strop.algos.losses import PolicyInputs
from strop.config.policy import GRPOConfig, PolicyLoopConfig
from strop.data.attempts import Attempts, attempt_advantages
from strop.data.packing import Int64s, Packed, train_only, with_inputs
from strop.data.trained import TrainedTokens
from strop.types import Metric, Metrics, Outputs, merge_metrics

Update = Packed[PolicyInputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An update's batches, and what models say of them that do not move during the step."""

    packed: Update
    outputs: list[Outputs] | None  # of the trainer, before the step's updates; None: nothing needs it
    metrics: Metrics = field(default_factory=dict[str, Metric])  # what else was seen

    @property
    def trained(self) -> TrainedTokens:
        return self.packed.trained

    def old_logprobs_M(self) -> Float64s:
        """Logprobs of the policy that ratios are taken to."""
        inputs = [batch.inputs for batch in self.packed.batches]
        return self.trained.gather(
            [i.behavior_logprobs_T if i.proximal_logprobs_T is None else i.proximal_logprobs_T for i in inputs]
        )

    def divergence_M(self, estimator: Estimator) -> Float64s:
        """Each token's divergence from the reference, which must have scored the batches."""
        reference = [batch.inputs.reference_logprobs_T for batch in self.packed.batches]
        reference_M = self.trained.gather([column for column in reference if column is not None])
        old, ref = torch.from_numpy(self.old_logprobs_M()), torch.from_numpy(reference_M)
        return estimate(estimator, old, ref, torch.ones(len(old), dtype=torch.bool)).numpy()


def rewards_at_ends(trained: TrainedTokens, rewards_N: Float64s) -> Float64s:
    """Each attempt's reward at its last trained token, 0 at the others: [M]."""
    rewards_M = np.zeros(len(trained))
    live_N = trained.counts_N > 0
    rewards_M[(np.cumsum(trained.counts_N) - 1)[live_N]] = rewards_N[live_N]
    return rewards_M


def token_level(
    cfg: GRPOConfig,
    attempts: Attempts,
    parts: Sequence[Int64s],
    scored: Sequence[Scored],
    kl_coefficient: float,
) -> list[Scored]:
    """The step with advantages that need single tokens: a divergence in the reward, discounts, token baselines.

    `parts` says which groups each update holds. Where nothing of that is asked for, the updates come back as they are.
    """
    in_reward = cfg.kl.place == "reward" and kl_coefficient > 0
    discount = cfg.advantage.discount if cfg.advantage.discount is not None else 1.0
    if not (in_reward or discount < 1 or cfg.advantage.kind == "optimal_token_baseline"):
        return list(scored)
    estimator = Estimator(cfg.kl.estimator)
    costs = [kl_coefficient * s.divergence_M(estimator) if in_reward else np.zeros(len(s.trained)) for s in scored]
    rewards = [attempts.rewards_PG[part] for part in parts]
    if cfg.advantage.kind == "optimal_token_baseline":
        found = [_token_baseline(r, s) for r, s in zip(rewards, scored, strict=True)]
    elif cfg.advantage.kind == "reinforce_plus_plus":
        ends = [rewards_at_ends(s.trained, r[~np.isnan(r)]) for s, r in zip(scored, rewards, strict=True)]
        whole_M = np.concatenate([end - cost for end, cost in zip(ends, costs, strict=True)])
        counts_N = np.concatenate([s.trained.counts_N for s in scored])
        every_M = np.ones(len(whole_M), np.bool_)
        advantages_M = token_advantages.reinforce_plus_plus(whole_M, every_M, counts_N, discount=discount)
        found = np.split(advantages_M, np.cumsum([len(s.trained) for s in scored])[:-1])
    else:
        rewards_PG = attempts.rewards_PG.copy()
        for part, s, cost in zip(parts, scored, costs, strict=True):
            own_PG = rewards_PG[part]
            own_PG[~np.isnan(own_PG)] -= np.bincount(s.trained.attempt_M, cost, minlength=len(s.trained.counts_N))
            rewards_PG[part] = own_PG
        advantages_PG = attempt_advantages(cfg.advantage, replace(attempts, rewards_PG=rewards_PG))
        every = [advantages_PG[part] for part in parts]
        found = [a[~np.isnan(a)][s.trained.attempt_M] for a, s in zip(every, scored, strict=True)]
    return [with_advantages(s, a_M) for s, a_M in zip(scored, found, strict=True)]


def with_advantages(scored: Scored, advantages_M: Float64s) -> Scored:
    """The update with these advantages of single tokens."""
    batches = with_inputs(scored.packed.batches, advantages=scored.trained.scatter(advantages_M))
    return replace(scored, packed=replace(scored.packed, batches=batches))


def _token_baseline(rewards_PG: Float64s, scored: Scored) -> Float64s:
    assert scored.outputs is not None
    lengths_PG = np.zeros(rewards_PG.shape, np.int64)
    lengths_PG[~np.isnan(rewards_PG)] = scored.trained.counts_N
    squares = [output.square_sums_T for output in scored.outputs]
    return token_advantages.optimal_token_baseline(
        rewards_PG,
        scored.trained.gather([output.logprobs_T for output in scored.outputs]),
        scored.trained.gather([column for column in squares if column is not None]),
        np.ones(len(scored.trained), np.bool_),
        lengths_PG,
    )


def settle(cfg: PolicyLoopConfig, scored: Scored, *, horizon: int, rng: np.random.Generator) -> tuple[Update, Metrics]:
    """The update as it is learned from: corrected for what drew it, rejected tokens out, the loss's selection made."""
    packed, outputs = scored.packed, scored.outputs
    if outputs is None:
        return packed, scored.metrics
    logprobs = [output.logprobs_T for output in outputs]
    packed, metrics = _corrected(cfg, packed, logprobs)
    packed, measured = _accepted(cfg, packed, logprobs, horizon)
    if cfg.top_entropy < 1:
        entropy_M = packed.trained.gather([o.entropy_T for o in outputs if o.entropy_T is not None])
        uncertain_M = selection.top_entropy(entropy_M, fraction=cfg.top_entropy)
        packed = train_only(packed, uncertain_M, weighting=cfg.weighting, horizon=horizon)
    if cfg.loss.selects:
        trained = packed.trained
        advantages_M = trained.gather([batch.inputs.advantages_T for batch in packed.batches])
        selected_M = _selected(cfg, trained.gather(logprobs), advantages_M, rng)
        packed = replace(packed, batches=with_inputs(packed.batches, selected=trained.scatter(selected_M)))
    return packed, merge_metrics([scored.metrics, metrics, measured])


def _corrected(cfg: PolicyLoopConfig, packed: Update, logprobs: list[torch.Tensor]) -> tuple[Update, Metrics]:
    if cfg.correction.level == "none":
        return packed, {}
    weights: list[torch.Tensor] = []
    metrics: Metrics = {}
    for batch, logprobs_T in zip(packed.batches, logprobs, strict=True):
        weights_T, measured = correction.importance_weights(
            logprobs_T,
            batch.inputs.behavior_logprobs_T,
            batch.layout,
            batch.mask_T,
            level=correction.Level(cfg.correction.level),
            low=cfg.correction.low,
            high=cfg.correction.high,
            outside=correction.Outside(cfg.correction.outside),
        )
        weights.append(weights_T)
        metrics = merge_metrics([metrics, measured])
    return replace(packed, batches=with_inputs(packed.batches, correction=weights)), metrics


def _accepted(
    cfg: PolicyLoopConfig, packed: Update, logprobs: list[torch.Tensor], horizon: int
) -> tuple[Update, Metrics]:
    if cfg.reject.divergence == "none":
        return packed, {}
    kept: list[torch.Tensor] = []
    metrics: Metrics = {}
    for batch, logprobs_T in zip(packed.batches, logprobs, strict=True):
        kept_T, measured = correction.accepted(
            logprobs_T,
            batch.inputs.behavior_logprobs_T,
            batch.layout,
            batch.mask_T,
            divergence=correction.Divergence(cfg.reject.divergence),
            level=correction.Level(cfg.reject.level),
            low=cfg.reject.low,
            high=cfg.reject.high,
        )
        kept.append(kept_T)
        metrics = merge_metrics([metrics, measured])
    if not cfg.reject.stay_counted:
        kept_M = packed.trained.gather(kept) > 0
        return train_only(packed, kept_M, weighting=cfg.weighting, horizon=horizon), metrics
    weights = [
        kept_T.float() if batch.inputs.correction_T is None else batch.inputs.correction_T * kept_T
        for batch, kept_T in zip(packed.batches, kept, strict=True)
    ]
    return replace(packed, batches=with_inputs(packed.batches, correction=weights)), metrics


def _selected(cfg: PolicyLoopConfig, logprobs_M: Float64s, advantages_M: Float64s, rng: np.random.Generator) -> Bools:
    covariances_M = selection.covariances(logprobs_M, advantages_M)
    assert cfg.loss.fraction is not None
    if cfg.loss.kind == "kl_cov":
        return selection.kl_cov(covariances_M, fraction=cfg.loss.fraction)
    assert cfg.loss.covariance_low is not None and cfg.loss.covariance_high is not None
    return selection.clip_cov(
        covariances_M,
        rng,
        fraction=cfg.loss.fraction,
        low=cfg.loss.covariance_low,
        high=cfg.loss.covariance_high,
    )
