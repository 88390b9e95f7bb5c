"""What strop gives on a batch, beside verl's functions, by their names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.parity_batch import (
    CANDIDATES,
    COLUMNS,
    ROWS,
    SINGLE,
    Case,
    Drawn,
    Floats,
    Step,
    differentiated,
    distillation,
    grouped,
    pair,
    ungrouped,
)
from strop.algos import advantages, token_advantages
from strop.algos.correction import Divergence, Level, Outside, accepted, importance_weights
from strop.algos.distill_losses import Distillation, Tail
from strop.algos.kl import Coefficient, Estimator, estimate, penalised_rewards
from strop.algos.losses import (
    CISPO,
    DRO,
    SAPO,
    ClipCov,
    ClippedSurrogate,
    DPPOKullbackLeibler,
    DPPOTotalVariation,
    KLCov,
    PolicyGradient,
    PolicyInputs,
)
from strop.algos.selection import clip_cov, covariances, kl_cov
from strop.algos.sequence_losses import GMPO, GSPOToken
from strop.algos.value_losses import ClippedValue, ValueInputs
from strop.algos.weighting import Weighting, token_weights
from strop.types import Layout, Outputs

ALONE = "a group of one: verl gives its raw reward, strop 0"


def verl_cases(b: Drawn) -> dict[str, Case]:
    gains = {f"advantages {name}": case for name, case in {**_advantages(b), **_token_advantages(b)}.items()}
    losses = {f"policy loss {name}": case for name, case in _losses(b).items()}
    return {**gains, **losses, **_rest(b), **_corrections(b)}


def _advantages(b: Drawn) -> dict[str, Case]:
    r_PG, r = grouped(b.rewards), b.rewards
    counts_PG = grouped(b.counts, 0).astype(np.int64)

    def rows(per_reply: Floats, counted: NDArray[np.bool_] = b.mask) -> Case:
        return Case(value=np.repeat(per_reply[:, None], COLUMNS, axis=1), counted=counted)

    def alone(per_reply: Floats, raw: float, difference: str = ALONE, factor: float = 1.0) -> Case:
        """verl's number for the reply that is alone in its group put in, and every other one times `factor`."""
        explained = per_reply * factor
        explained[SINGLE] = raw
        return rows(per_reply).explained(difference, np.repeat(explained[:, None], COLUMNS, axis=1))

    plain, scaled = (ungrouped(advantages.grpo(r_PG, scale_by_std=std)) for std in (False, True))
    vectorised = "a group of one: verl gives its raw reward, divided by 1 + eps; strop 0"
    parts = [grouped(part) for part in b.reward_parts]
    raw = [np.append(ungrouped(advantages.grpo(part, scale_by_std=True))[:SINGLE], part[3, 0]) for part in parts]
    raw_sum = sum((w * part for w, part in zip(b.reward_weights, raw, strict=True)), start=np.zeros(ROWS))
    gdpo = rows(ungrouped(advantages.gdpo(parts, b.reward_weights, counts_PG=counts_PG)))
    baseline = rows(ungrouped(advantages.reinforce_plus_plus_baseline(r_PG, counts_PG)))
    several = b.mask[:SINGLE]
    best = ungrouped(advantages.leave_one_out_max(r_PG))[:SINGLE]
    live = np.count_nonzero(r)  # verl's alpha: replies / rewards that are not 0; strop's: replies / informative ones
    return {
        "grpo": alone(scaled, r[SINGLE] / (1 + 1e-6), vectorised),
        "grpo without std": alone(plain, r[SINGLE]),
        "grpo_vectorized": alone(scaled, r[SINGLE] / (1 + 1e-6), vectorised),
        "gdpo": gdpo.explained(
            ALONE + ", in the whitening too", np.repeat(advantages.whiten(raw_sum, b.counts)[:, None], COLUMNS, axis=1)
        ),
        "grpo_passk": Case(value=np.repeat(best[:, None], COLUMNS, axis=1), counted=several).noted(
            "strop: leave_one_out_max"
        ),
        "rloo": alone(ungrouped(advantages.rloo(r_PG)), r[SINGLE]),
        "rloo_vectorized": rows(ungrouped(advantages.rloo(r_PG))),
        "opo": alone(ungrouped(advantages.opo(r_PG, counts_PG)), r[SINGLE]),
        "reinforce_plus_plus_baseline": baseline.explained(
            ALONE + ", in the whitening too",
            np.repeat(advantages.whiten(np.append(plain[:SINGLE], r[SINGLE]), b.counts)[:, None], COLUMNS, axis=1),
        ),
        "remax": Case(
            value=np.repeat(advantages.remax(r[:, None], b.columns["baselines"]), COLUMNS, axis=1), counted=b.mask
        ),
        "gpg": alone(
            ungrouped(advantages.gpg(r_PG)),
            r[SINGLE] * ROWS / live,
            "alpha: verl counts rewards that are not 0, strop replies in informative groups; " + ALONE,
            (ROWS / live) / (ROWS / SINGLE),
        ),
    }


def _token_advantages(b: Drawn) -> dict[str, Case]:
    lengths, mask_T = np.full(ROWS, COLUMNS), b.mask.reshape(-1)
    rewards_T = b.at_end(b.mask).reshape(-1)

    def tokens(values_T: Floats, counted: NDArray[np.bool_] = b.mask) -> Case:
        return Case(value=values_T.reshape(ROWS, COLUMNS), counted=counted)

    returns_T = token_advantages.reinforce_plus_plus(rewards_T, mask_T, lengths, discount=b.discount)
    gains_T, targets_T = token_advantages.gae(
        rewards_T, b.columns["values"].reshape(-1), mask_T, lengths, discount=b.discount, trace=b.trace
    )
    cases = {
        "reinforce_plus_plus": tokens(returns_T),
        "gae": tokens(advantages.whiten(gains_T, mask_T)),
        "gae returns": tokens(targets_T),
    }
    for name, mask in (("optimal_token_baseline", b.plain_mask), ("tir_optimal_token_baseline", b.mask)):
        ours = _token_baseline(b, mask)
        with_raw = ours.copy()
        with_raw[SINGLE] = np.where(mask[SINGLE], b.rewards[SINGLE], 0.0)
        cases[name] = tokens(ours, mask).explained(
            ALONE + ("; without tool tokens, since verl's counts positions" if mask is b.plain_mask else ""), with_raw
        )
    return cases


def _token_baseline(b: Drawn, mask: NDArray[np.bool_]) -> Floats:
    """[replies, tokens]; groups filled up with replies of no tokens whose reward is missing."""
    lengths_PG = grouped(np.full(ROWS, COLUMNS), 0).astype(np.int64)
    ours_T = token_advantages.optimal_token_baseline(
        grouped(b.rewards),
        b.columns["old"].reshape(-1),
        b.columns["square_sums"].reshape(-1),
        mask.reshape(-1),
        lengths_PG,
    )
    return ours_T.reshape(ROWS, COLUMNS)


def _selected(b: Drawn, choose: Callable[[Floats], NDArray[np.bool_]]) -> Tensor:
    """A choice among the trained tokens, from their covariances, as a column."""
    chosen_T = np.zeros(ROWS * COLUMNS, np.bool_)
    chosen_T[b.mask.reshape(-1)] = choose(covariances(b.columns["logprobs"][b.mask], b.columns["advantages"][b.mask]))
    return torch.from_numpy(chosen_T)


def _losses(b: Drawn) -> dict[str, Case]:
    step = Step.of(b, b.columns["advantages"])
    live = (ROWS - 1) / ROWS  # replies with a trained token
    ratio, a = np.exp(b.columns["logprobs"] - b.columns["old"])[b.mask], b.columns["advantages"][b.mask]
    clipped = ((a < 0) & (ratio < 0.8)) | ((a > 0) & (ratio > 1.28))

    def not_clipped(covariances_N: Floats) -> NDArray[np.bool_]:
        return clip_cov(covariances_N, np.random.default_rng(0), fraction=1.0, low=0.1, high=2.0, eligible_N=~clipped)

    clip = _selected(b, not_clipped)
    largest = _selected(b, lambda covariances_N: kl_cov(covariances_N, fraction=0.2))
    dual = ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    gspo = GSPOToken(clip_low=0.2, clip_high=0.28)
    truncated, _ = importance_weights(*pair(b, "old", "rollout"), step.layout, step.mask_T, high=1.2)
    own, _ = importance_weights(*pair(b, "logprobs", "old"), step.layout, step.mask_T, high=1.3)
    mean = Weighting.SEQUENCE_MEAN_TOKEN_MEAN
    return {
        "vanilla": step.run(dual).noted("with dual_clip=3, verl's default"),
        "vanilla seq-mean-token-mean": step.run(dual, mean),
        "vanilla decoupled": Step.of(b, b.columns["advantages"], correction=truncated).run(dual),
        "dppo_tv": step.run(DPPOTotalVariation(low=0.2, high=0.28, ratio_max=3.0)).noted("with ratio_max=3"),
        "dppo_kl": step.run(DPPOKullbackLeibler(low=0.2, high=0.28, ratio_max=3.0)).noted("with ratio_max=3"),
        "gspo": step.run(gspo).noted("strop: GSPOToken"),
        "gspo seq-mean-token-mean": step.run(gspo, mean).noted("strop: GSPOToken"),
        "sapo": step.run(SAPO(), mean).noted("verl always takes seq-mean-token-mean"),
        "gpg": step.run(PolicyGradient()),
        "clip_cov": Step.of(b, b.columns["advantages"], selected=clip).run(ClipCov(clip_low=0.2, clip_high=0.28)),
        "kl_cov": Step.of(b, b.columns["advantages"], selected=largest).run(KLCov(coefficient=0.7)),
        "geo_mean": step.run(GMPO(clip_low=0.2, clip_high=0.28), mean).scaled(
            "verl's mean counts replies of which nothing is trained", live
        ),
        "dro": step.run(DRO(beta=0.1)),
        "cispo": step.run(CISPO(ratio_min=0.8, ratio_max=1.28)).noted("bounds 0.2, 0.28 as ratio_min, ratio_max"),
        "bypass_mode ppo_clip": step.run(dual),
        "bypass_mode reinforce": Step.of(b, b.columns["advantages"], correction=own).run(PolicyGradient()),
    }


def _kl(b: Drawn) -> dict[str, Case]:
    estimators = {
        "k1": Estimator.K1,
        "abs": Estimator.ABS,
        "k2": Estimator.K2,
        "k3": Estimator.K3,
        "k1+": Estimator.K1_STRAIGHT_THROUGH,
        "k3+": Estimator.K3_STRAIGHT_THROUGH,
        "abs+": Estimator.ABS_STRAIGHT_THROUGH,
    }
    mask_T = torch.from_numpy(b.mask.reshape(-1))
    cases: dict[str, Case] = {}
    for name, estimator in estimators.items():
        for suffix, reference in (("", b.columns["reference"]), (" far", b.columns["logprobs"] + 5.0)):
            reference_T = torch.from_numpy(reference.reshape(-1))

            def kl(logprobs_T: Tensor, estimator: Estimator = estimator, reference_T: Tensor = reference_T) -> Tensor:
                return estimate(estimator, logprobs_T, reference_T, mask_T)

            case = differentiated(b.columns["logprobs"], kl, mask_T, np.ones(ROWS))
            if suffix and estimator in (Estimator.K3, Estimator.K3_STRAIGHT_THROUGH):
                assert case.gradient is not None
                straight = estimator is Estimator.K3_STRAIGHT_THROUGH
                gradient = case.gradient if straight else np.zeros((ROWS, COLUMNS))
                case = case.explained("verl's k3 never exceeds 10", 10.0 * b.mask.sum(), gradient)
            cases[f"kl_penalty {name}{suffix}"] = case
    return cases


def _rest(b: Drawn) -> dict[str, Case]:
    mask_T = torch.from_numpy(b.mask.reshape(-1))
    weightings = {
        "token-mean": Weighting.TOKEN_MEAN,
        "token-sum": Weighting.TOKEN_SUM,
        "seq-mean-token-sum": Weighting.SEQUENCE_MEAN_TOKEN_SUM,
        "seq-mean-token-sum-norm": Weighting.CONSTANT_HORIZON,
        "seq-mean-token-mean": Weighting.SEQUENCE_MEAN_TOKEN_MEAN,
    }
    cases = _kl(b)
    for name, weighting in weightings.items():
        weights_N = token_weights(weighting, b.counts, horizon=COLUMNS)
        cases[f"agg_loss {name}"] = differentiated(b.columns["logprobs"], lambda x: x, mask_T, weights_N)
    old_T, returns_T = pair(b, "values", "returns")
    inputs = ValueInputs(old_values_T=old_T, returns_T=returns_T)

    def value_loss(values_T: Tensor) -> Tensor:
        outputs = Outputs(logprobs_T=torch.zeros_like(values_T), values_T=values_T)
        return ClippedValue(clip=0.2)(outputs, inputs, Layout((COLUMNS,) * ROWS), mask_T)[0]

    weights_N = token_weights(Weighting.TOKEN_MEAN, b.counts, horizon=None)
    cases["compute_value_loss"] = differentiated(b.columns["new_values"], value_loss, mask_T, weights_N)
    kl, rewards = b.columns["logprobs"] - b.columns["reference"], b.at_end(b.mask)
    cases["compute_rewards"] = Case(value=penalised_rewards(rewards, kl, b.mask, 0.3)).explained(
        "verl charges what a tool said too", penalised_rewards(rewards, kl, np.ones_like(b.mask), 0.3)
    )
    led = Coefficient(value=0.1, target=6.0, horizon=10_000)
    values: list[float] = []
    for measured in (3.0, 6.5, 40.0):
        led = led.after(measured, 128)
        values.append(led.value)
    cases["AdaptiveKLController"] = Case(value=np.array(values))
    taught = distillation(b, Distillation(tail=Tail.DROPPED), CANDIDATES)
    cases["distillation forward_kl_topk"] = taught.noted("tail=DROPPED; verl's log_prob_min_clamp is left out")
    return cases


def _corrections(b: Drawn) -> dict[str, Case]:
    layout, mask_T = Layout((COLUMNS,) * ROWS), torch.from_numpy(b.mask.reshape(-1))
    logprobs_T, behavior_T = pair(b, "old", "rollout")
    cases: dict[str, Case] = {}
    for name, level, bounds in (
        ("token 1.1", Level.TOKEN, (0.0, 1.1, Outside.CLAMP)),
        ("sequence 1.5", Level.SEQUENCE_SUM, (0.0, 1.5, Outside.CLAMP)),
        ("token 0.9_1.1", Level.TOKEN, (0.9, 1.1, Outside.ZERO)),
        ("sequence 0.6_1.5", Level.SEQUENCE_SUM, (0.6, 1.5, Outside.ZERO)),
    ):
        low, high, outside = bounds
        weights_T, _ = importance_weights(
            logprobs_T, behavior_T, layout, mask_T, level=level, low=low, high=high, outside=outside
        )
        cases[f"importance weights {name}"] = Case(value=weights_T.numpy().reshape(ROWS, COLUMNS))
    ratio, k2, k3 = Divergence.RATIO, Divergence.K2, Divergence.K3
    for name, divergence, level, bounds in (
        ("token_k1 0.9_1.1", ratio, Level.TOKEN, (0.9, 1.1)),
        ("token_k2 0.01", k2, Level.TOKEN, (0.0, 0.01)),
        ("token_k3 0.01", k3, Level.TOKEN, (0.0, 0.01)),
        ("seq_sum_k1 0.8_1.25", ratio, Level.SEQUENCE_SUM, (0.8, 1.25)),
        ("seq_sum_k2 0.05", k2, Level.SEQUENCE_SUM, (0.0, 0.05)),
        ("seq_sum_k3 0.05", k3, Level.SEQUENCE_SUM, (0.0, 0.05)),
        ("seq_mean_k1 0.95_1.05", ratio, Level.SEQUENCE_MEAN, (0.95, 1.05)),
        ("seq_mean_k2 0.005", k2, Level.SEQUENCE_MEAN, (0.0, 0.005)),
        ("seq_mean_k3 0.005", k3, Level.SEQUENCE_MEAN, (0.0, 0.005)),
        ("seq_max_k2 0.02", k2, Level.SEQUENCE_MAX, (0.0, 0.02)),
        ("seq_max_k3 0.02", k3, Level.SEQUENCE_MAX, (0.0, 0.02)),
    ):
        low, high = (1 / bounds[1], 1 / bounds[0]) if divergence is ratio else bounds
        kept_T, _ = accepted(
            logprobs_T, behavior_T, layout, mask_T, divergence=divergence, level=level, low=low, high=high
        )
        case = Case(value=kept_T.numpy().astype(float).reshape(ROWS, COLUMNS))
        note = "verl's k1 is -log ratio: bounds a_b are low=1/b, high=1/a" if divergence is ratio else ""
        cases[f"rejection {name}"] = case.noted(note)
    inputs = PolicyInputs(behavior_logprobs_T=behavior_T, advantages_T=torch.zeros_like(behavior_T))
    _, metrics = PolicyGradient()(Outputs(logprobs_T=logprobs_T), inputs, layout, mask_T)
    cases["compute_offpolicy_metrics k3_kl"] = Case(value=metrics["policy/kl_k3"].result).noted("policy/kl_k3")
    return cases
