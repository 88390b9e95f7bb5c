"""What strop gives on a batch, beside the methods of TRL's trainers, by the settings that choose them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.parity_batch import (
    COLUMNS,
    EMPTY,
    GROUP,
    PAIRS,
    ROWS,
    WORDS,
    Case,
    Drawn,
    Floats,
    Step,
    differentiated,
    distillation,
    pair,
)
from strop.algos import advantages
from strop.algos.correction import Level, Outside, importance_weights, off_policy_accepted
from strop.algos.distill_losses import Distillation, Divergence, Tail
from strop.algos.filters import overlong_penalty
from strop.algos.losses import CISPO, SAPO, ClippedSurrogate, PolicyGradient, PolicyLoss
from strop.algos.preference_losses import (
    DPO,
    IPO,
    KTO,
    ORPO,
    BradleyTerry,
    Hinge,
    PairInputs,
    PreferenceLoss,
    RobustDPO,
    SimPO,
    kto_baseline,
)
from strop.algos.selection import top_entropy
from strop.algos.sequence_losses import GMPO, GSPO
from strop.algos.weighting import Weighting
from strop.types import Layout, Outputs


def trl_cases(b: Drawn) -> dict[str, Case]:
    return {**_losses(b), **_advantages(b), **_ratios(b), **_preferences(b), **_rest(b)}


def _losses(b: Drawn) -> dict[str, Case]:
    rows = np.repeat(b.columns["row_advantages"][:, None], COLUMNS, axis=1)
    reference = torch.from_numpy(b.columns["reference"].reshape(-1))
    step, beside = Step.of(b, rows), Step.of(b, rows, reference=reference)
    ppo, gspo = ClippedSurrogate(clip_low=0.2, clip_high=0.28), GSPO(clip_low=0.2, clip_high=0.28)
    mean, total = Weighting.SEQUENCE_MEAN_TOKEN_MEAN, Weighting.SEQUENCE_MEAN_TOKEN_SUM
    live = (ROWS - 1) / ROWS
    empty = "TRL's mean counts replies of which nothing is trained"
    kept_T, _ = off_policy_accepted(
        *pair(b, "logprobs", "rollout"), step.inputs.advantages_T, step.layout, step.mask_T, high=0.05
    )
    certain_T = np.zeros(ROWS * COLUMNS)
    certain_T[b.mask.reshape(-1)] = top_entropy(b.columns["entropy"][b.mask], fraction=0.25)

    def times(kept: Tensor) -> Step:
        return Step.of(b, rows, correction=kept.double())

    return {
        "loss_type grpo": step.run(ppo, mean).scaled(empty, live),
        "loss_type bnpo": step.run(ppo).noted("one micro-batch; TRL's mean is of each micro-batch"),
        "loss_type dr_grpo": step.run(ppo, Weighting.CONSTANT_HORIZON, COLUMNS).scaled(empty, live),
        "loss_type dapo": step.run(ppo),
        "loss_type sapo": step.run(SAPO(), mean).scaled(empty, live),
        "loss_type cispo": step.run(CISPO(ratio_max=1.3)).noted("epsilon_high is ratio_max"),
        "importance_sampling_level sequence": step.run(gspo, mean).scaled(empty, live),
        "loss_type luspo": step.run(gspo, total).scaled(empty, live),
        "delta": step.run(ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=1.5)).noted("delta is dual_clip"),
        "beta": beside.run(ClippedSurrogate(clip_low=0.2, clip_high=0.28, kl_coefficient=0.3)),
        "entropy_coef": step.run(ClippedSurrogate(clip_low=0.2, clip_high=0.28, entropy_coefficient=0.2)),
        "off_policy_mask_threshold": times(kept_T).run(ppo),
        "top_entropy_quantile": _with_top_entropy(b, times(torch.from_numpy(certain_T)).run(ppo), rows, ppo),
        "RLOO loss": _rloo(b, rows),
        "GMPO (experimental)": _gmpo(step.run(GMPO(clip_low=0.2, clip_high=0.28), mean), b),
    }


def _with_top_entropy(b: Drawn, ours: Case, rows: Floats, loss: PolicyLoss) -> Case:
    """TRL's selection put in: tokens at or above an interpolated quantile, up to one more than the stated part."""
    chosen = b.mask & (b.columns["entropy"] >= np.quantile(b.columns["entropy"][b.mask], 0.75))
    theirs = Step.of(b, rows, correction=torch.from_numpy(chosen.reshape(-1).astype(float))).run(loss)
    return ours.explained(
        "TRL takes all above a quantile, one token more than strop's whole number", theirs.value, theirs.gradient
    )


def _rloo(b: Drawn, rows: Floats) -> Case:
    """At the policy that sampled, where every ratio is 1."""
    ours = Step.of(b, rows).run(PolicyGradient(), Weighting.SEQUENCE_MEAN_TOKEN_SUM)
    assert ours.gradient is not None
    live = (ROWS - 1) / ROWS
    return ours.explained(
        "TRL clips the whole reply's ratio and counts empty replies: at a ratio of 1 the gradient is REINFORCE's",
        -float(b.columns["row_advantages"].mean()),
        live * ours.gradient,
    )


def _gmpo(ours: Case, b: Drawn) -> Case:
    assert ours.gradient is not None
    live = (ROWS - 1) / ROWS
    return ours.explained(
        "TRL's mean counts replies of which nothing is trained, each as a ratio of 1",
        live * float(ours.value) - float(b.columns["row_advantages"][EMPTY]) / ROWS,
        live * ours.gradient,
    )


def _advantages(b: Drawn) -> dict[str, Case]:
    r_PG = b.group_rewards.reshape(-1, GROUP)
    parts = [part.reshape(-1, GROUP) for part in b.group_parts]

    def missing(ours_PG: Floats, difference: str, explained_PG: Floats) -> Case:
        return Case(value=ours_PG.reshape(-1)).explained(difference, np.nan_to_num(explained_PG).reshape(-1))

    unnamed = "a missing reward: TRL's advantage is 0, strop's NaN"
    by_std = [advantages.grpo(part, scale_by_std=True, eps=1e-4) for part in parts]
    total = sum((w * part for w, part in zip(b.reward_weights, by_std, strict=True)), start=np.zeros(r_PG.shape))
    plain = advantages.grpo(r_PG, scale_by_std=False)
    return {
        "advantages": missing(
            advantages.grpo(r_PG, scale_by_std=True),
            "eps: TRL 1e-4, strop 1e-6; " + unnamed,
            advantages.grpo(r_PG, scale_by_std=True, eps=1e-4),
        ),
        "scale_rewards none": missing(plain, unnamed, plain),
        "normalize_then_sum": missing(
            advantages.gdpo(parts, b.reward_weights),
            "eps: TRL adds 1e-4 to each deviation, strop 1e-6 and 1e-8 to the variance of the whitening",
            (total - total.mean()) / (total.std(ddof=1) + 1e-4),
        ),
        "RLOO": missing(advantages.rloo(r_PG), unnamed, advantages.rloo(r_PG)),
    }


def _ratios(b: Drawn) -> dict[str, Case]:
    layout, mask_T = Layout((COLUMNS,) * ROWS), torch.from_numpy(b.mask.reshape(-1))
    cases: dict[str, Case] = {}
    for name, level, outside in (
        ("token_truncate", Level.TOKEN, Outside.CLAMP),
        ("token_mask", Level.TOKEN, Outside.ZERO),
        ("sequence_truncate", Level.SEQUENCE_SUM, Outside.CLAMP),
        ("sequence_mask", Level.SEQUENCE_SUM, Outside.ZERO),
    ):
        weights_T, _ = importance_weights(
            *pair(b, "old", "rollout"), layout, mask_T, level=level, low=0.8, high=1.2, outside=outside
        )
        cases[name] = Case(value=weights_T.numpy().reshape(ROWS, COLUMNS), counted=b.mask)
    return cases


def _pair_inputs(b: Drawn, pair_T: Tensor) -> PairInputs:
    return PairInputs(
        pair_T=pair_T,
        chosen_T=(torch.arange(ROWS) < PAIRS).repeat_interleave(COLUMNS),
        reference_logprobs_T=torch.from_numpy(b.columns["reference"].reshape(-1)),
    )


def _preferences(b: Drawn) -> dict[str, Case]:
    mask_T = torch.from_numpy(b.pair_mask.reshape(-1))
    pairs = _pair_inputs(b, torch.arange(PAIRS).repeat(2).repeat_interleave(COLUMNS))
    texts = _pair_inputs(b, torch.arange(ROWS).repeat_interleave(COLUMNS))
    tokens = b.pair_mask.sum(axis=1)
    of_pair = 1.0 / (PAIRS * np.tile(tokens[:PAIRS] + tokens[PAIRS:], 2))  # a pair's tokens share one part of the mean

    def run(loss: PreferenceLoss | KTO, inputs: PairInputs = pairs, weights_N: Floats = of_pair) -> Case:
        def of(logprobs_T: Tensor) -> Tensor:
            return loss(Outputs(logprobs_T=logprobs_T), inputs, Layout((COLUMNS,) * ROWS), mask_T)[0]

        return differentiated(b.columns["logprobs"], of, mask_T, weights_N)

    baseline = kto_baseline(float((b.columns["other_logprobs"] - b.columns["other_reference"]).sum()), ROWS)
    kto = KTO(beta=0.3, baseline=baseline, desirable=1.5, undesirable=0.7)
    more, less = run(ORPO(beta=0.6)), run(ORPO(beta=0.3))
    assert more.gradient is not None and less.gradient is not None
    term = Case(value=float(more.value) - float(less.value), gradient=more.gradient - less.gradient)
    return {
        "DPO sigmoid": run(DPO(beta=0.3)),
        "DPO hinge": run(Hinge(beta=0.3)),
        "DPO ipo": run(IPO(beta=0.3, per_token=True)).noted("per_token=True"),
        "DPO robust": run(RobustDPO(beta=0.3, label_smoothing=0.1)),
        "DPO sigmoid_norm": run(DPO(beta=0.3, per_token=True)).noted("per_token=True"),
        "KTO": run(kto, texts, 1.0 / (ROWS * tokens)),
        "SimPO (experimental)": run(SimPO(beta=2.0, target_margin=0.5)).noted("simpo_gamma is target_margin"),
        "ORPO (experimental)": term.noted("the odds-ratio term; TRL's likelihood term is a mean over tokens"),
        "reward model": _reward_model(b, pairs),
    }


def _reward_model(b: Drawn, pairs: PairInputs) -> Case:
    """A score for each text, at its first token."""
    last_T = (torch.arange(COLUMNS) == 0).repeat(ROWS)
    margin_T = torch.from_numpy(np.tile(b.columns["margins"], 2)).repeat_interleave(COLUMNS)
    inputs = replace(pairs, margin_T=margin_T)

    def of(scores_N: Tensor) -> Tensor:
        outputs = Outputs(logprobs_T=torch.zeros_like(margin_T), values_T=scores_N.repeat_interleave(COLUMNS))
        return BradleyTerry(center=0.1)(outputs, inputs, Layout((COLUMNS,) * ROWS), last_T)[0]

    scores_N = torch.from_numpy(b.columns["scores"]).clone().requires_grad_()
    total = torch.where(last_T, of(scores_N), 0.0).sum() / ROWS
    total.backward()
    assert scores_N.grad is not None
    return Case(value=float(total.detach()), gradient=scores_N.grad.numpy())


def _rest(b: Drawn) -> dict[str, Case]:
    penalty = overlong_penalty(b.counts, max_length=COLUMNS, buffer=4)
    cases = {"soft overlong punishment": Case(value=penalty)}
    for name, divergence, beta in (
        ("beta 0", Divergence.FORWARD_KL, 0.5),
        ("beta 1", Divergence.REVERSE_KL, 0.5),
        ("beta 0.3", Divergence.JENSEN_SHANNON, 0.3),
    ):
        whole = Distillation(divergence=divergence, tail=Tail.DROPPED, beta=beta)
        cases[f"distillation {name}"] = distillation(b, whole, WORDS)
    return cases
