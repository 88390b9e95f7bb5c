"""The constants of an update, against numbers computed attempt by attempt with plain NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from strop.algos.kl import Estimator
from strop.algos.losses import PolicyInputs
from strop.config.policy import GRPOConfig
from strop.data.attempts import Attempts, attempt_advantages
from strop.data.packing import Packed, pack_policy, with_inputs
from strop.data.scored import Scored, rewards_at_ends, settle, token_level
from strop.types import Group, Outputs
from tests.unit.data.random_groups import random_groups

G = 3


def config(**fields: Any) -> GRPOConfig:
    return GRPOConfig.model_validate({"group_size": G} | fields)


class Step:
    """A random step of two updates, what models say of its tokens, and the same numbers attempt by attempt."""

    def __init__(self, seed: int = 0, missing: bool = True) -> None:
        self.rng = np.random.default_rng(seed)
        self.groups: list[Group] = []
        while len(self.groups) < 6:
            self.groups += random_groups(self.rng)
        self.rewards_PG = self.rng.normal(size=(len(self.groups), G))
        if missing:
            self.rewards_PG[1, 2] = np.nan
        self.attempts = Attempts(groups=self.groups, rewards_PG=self.rewards_PG, greedy_P=None, metrics={})
        self.parts = np.array_split(np.arange(len(self.groups)), 2)
        self.scored = [self.score(part) for part in self.parts]

    def score(self, part: np.ndarray) -> Scored:
        placeholder_PG = np.where(np.isnan(self.rewards_PG[part]), np.nan, 0.0)
        packed: Packed[PolicyInputs] = pack_policy(
            [self.groups[p] for p in part],
            placeholder_PG,
            max_tokens=60,
            weighting="token_mean",
            horizon=None,
            temperature=1.0,
            share_prefixes=True,
            data_parallel=1,
        )
        outputs: list[Outputs] = []
        references: list[torch.Tensor] = []
        for batch in packed.batches:
            near_T = batch.inputs.behavior_logprobs_T + torch.from_numpy(self.rng.normal(size=len(batch)) * 0.5).float()
            outputs.append(
                Outputs(
                    logprobs_T=near_T,
                    entropy_T=torch.from_numpy(self.rng.random(len(batch))).float(),
                    square_sums_T=torch.from_numpy(self.rng.random(len(batch))).float(),
                )
            )
            references.append(near_T + 0.3)
        batches = with_inputs(packed.batches, reference_logprobs=references)
        return Scored(packed=replace(packed, batches=batches), outputs=outputs)

    def gather(self, which: str, scored: Scored) -> np.ndarray:
        """One field of the loss's inputs at the trained tokens."""
        return scored.trained.gather([getattr(batch.inputs, which) for batch in scored.packed.batches])

    def attempts_of(self, part: np.ndarray) -> np.ndarray:
        rewards_N = self.rewards_PG[part].reshape(-1)
        return rewards_N[~np.isnan(rewards_N)]


@pytest.mark.parametrize("estimator", [Estimator.K1, Estimator.K2, Estimator.K3, Estimator.ABS])
def test_a_divergence_in_the_reward_costs_the_whole_attempt(estimator: Estimator) -> None:
    """reward - coefficient * the sum of its tokens' divergence, before the group's mean is taken."""
    step = Step()
    cfg = config(kl={"coefficient": 0.2, "place": "reward", "estimator": estimator.value})
    after = token_level(cfg, step.attempts, step.parts, step.scored, 0.2)
    for part, before, found in zip(step.parts, step.scored, after, strict=True):
        d_M = step.gather("behavior_logprobs_T", before) - step.gather("reference_logprobs_T", before)
        k_M = {"k1": d_M, "k2": d_M**2 / 2, "k3": np.exp(-d_M) - 1 + d_M, "abs": np.abs(d_M)}[estimator.value]
        n = 0
        start = 0
        for p in part:
            docked: list[float] = []
            spans: list[slice] = []
            for g in range(G):
                if np.isnan(step.rewards_PG[p, g]):
                    continue
                count = int(before.trained.counts_N[n])
                spans.append(slice(start, start + count))
                docked.append(step.rewards_PG[p, g] - 0.2 * k_M[spans[-1]].sum())
                start, n = start + count, n + 1
            for span, reward in zip(spans, docked, strict=True):
                np.testing.assert_allclose(
                    step.gather("advantages_T", found)[span], reward - np.mean(docked), rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize(("coefficient", "discount"), [(0.0, 0.9), (0.2, 1.0), (0.2, 0.5)])
def test_reinforce_plus_plus_has_returns_of_single_tokens(coefficient: float, discount: float) -> None:
    step = Step()
    cfg = config(
        advantage={"kind": "reinforce_plus_plus", "discount": discount},
        drop_uniform_groups=False,
        kl={"coefficient": coefficient, "place": "reward", "estimator": "k1"},
    )
    after = token_level(cfg, step.attempts, step.parts, step.scored, coefficient)
    returns: list[float] = []
    for part, before in zip(step.parts, step.scored, strict=True):
        d_M = step.gather("behavior_logprobs_T", before) - step.gather("reference_logprobs_T", before)
        start = 0
        for reward, count in zip(step.attempts_of(part), before.trained.counts_N, strict=True):
            later = 0.0
            own: list[float] = []
            for t in reversed(range(start, start + int(count))):
                r = (reward if t == start + count - 1 else 0.0) - coefficient * d_M[t]
                later = r + discount * later
                own.append(later)
            returns += own[::-1]
            start += int(count)
    whitened = (np.array(returns) - np.mean(returns)) / np.sqrt(np.var(returns, ddof=1) + 1e-8)
    found = np.concatenate([step.gather("advantages_T", s) for s in after])
    np.testing.assert_allclose(found, whitened, rtol=1e-4, atol=1e-5)


def test_reinforce_plus_plus_without_discount_and_divergence_is_one_number_an_attempt() -> None:
    step = Step()
    cfg = config(advantage={"kind": "reinforce_plus_plus"}, drop_uniform_groups=False)
    assert [s.packed for s in token_level(cfg, step.attempts, step.parts, step.scored, 0.0)] == [
        s.packed for s in step.scored
    ]
    counts_N = np.concatenate([t.num_sampled * np.ones(1) for group in step.groups for t in group])
    rewards_N = step.rewards_PG.reshape(-1)
    tokens = np.repeat(rewards_N, counts_N.astype(int))
    tokens = tokens[~np.isnan(tokens)]
    expected = (step.rewards_PG - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    expected[(counts_N == 0).reshape(expected.shape)] = 0.0
    np.testing.assert_allclose(attempt_advantages(cfg.advantage, step.attempts), expected, rtol=1e-6)


def test_the_optimal_token_baseline_sees_each_update_s_groups() -> None:
    step = Step(missing=False)
    cfg = config(advantage={"kind": "optimal_token_baseline"})
    after = token_level(cfg, step.attempts, step.parts, step.scored, 0.0)
    for part, before, found in zip(step.parts, step.scored, after, strict=True):
        assert before.outputs is not None
        p_M = np.exp(before.trained.gather([o.logprobs_T for o in before.outputs]))
        s_M = before.trained.gather([o.square_sums_T for o in before.outputs if o.square_sums_T is not None])
        w_M = 1 - 2 * p_M + s_M
        counts = before.trained.counts_N.reshape(len(part), G)
        offsets = np.append(0, np.cumsum(before.trained.counts_N))
        for i, p in enumerate(part):
            energy = [np.cumsum(w_M[offsets[i * G + g] : offsets[i * G + g + 1]]) + 1e-8 for g in range(G)]
            for g in range(G):
                for t in range(counts[i, g]):
                    there = [h for h in range(G) if counts[i, h] > t]
                    total = sum(energy[h][t] for h in there)
                    base = sum(step.rewards_PG[p, h] * energy[h][t] for h in there) / total if len(there) > 1 else 0.0
                    got = step.gather("advantages_T", found)[offsets[i * G + g] + t]
                    assert got == pytest.approx(step.rewards_PG[p, g] - base, rel=1e-3, abs=1e-4)


def test_rewards_stand_at_the_ends() -> None:
    step = Step()
    trained = step.scored[0].trained
    rewards_M = rewards_at_ends(trained, np.arange(1.0, len(trained.counts_N) + 1))
    ends = np.cumsum(trained.counts_N)[trained.counts_N > 0] - 1
    assert np.flatnonzero(rewards_M).tolist() == ends.tolist()
    assert rewards_M[ends].tolist() == [n + 1.0 for n, count in enumerate(trained.counts_N) if count]


def test_nothing_is_done_where_nothing_is_asked_for() -> None:
    step = Step()
    unscored = Scored(packed=step.scored[0].packed, outputs=None)
    packed, metrics = settle(config(), unscored, horizon=8, rng=np.random.default_rng(0))
    assert packed is unscored.packed and metrics == {}


def test_corrections_and_rejections_multiply() -> None:
    """Rejected tokens that stay counted keep their place in the denominators and have weight 0 in the loss."""
    step = Step()
    cfg = config(
        ratio_to="trainer",
        correction={"level": "token", "high": 1.5},
        reject={"divergence": "ratio", "low": 0.7, "high": 1.4},
    )
    for scored in step.scored:
        packed, metrics = settle(cfg, scored, horizon=8, rng=np.random.default_rng(0))
        assert scored.outputs is not None
        trained = scored.trained
        ratio_M = np.exp(
            trained.gather([o.logprobs_T for o in scored.outputs]) - step.gather("behavior_logprobs_T", scored)
        )
        kept_M = (ratio_M >= 0.7) & (ratio_M <= 1.4)
        found_M = trained.gather([b.inputs.correction_T for b in packed.batches if b.inputs.correction_T is not None])
        np.testing.assert_allclose(found_M, np.minimum(ratio_M, 1.5) * kept_M, rtol=1e-5)
        assert packed.trained.counts_N.tolist() == trained.counts_N.tolist()
        assert metrics["correction/rejected_fraction"].result == pytest.approx(1 - kept_M.mean())
        weights = [batch.weights_T for batch in packed.batches]
        assert all(torch.equal(w, b.weights_T) for w, b in zip(weights, scored.packed.batches, strict=True))


def test_rejected_tokens_can_leave_the_denominators() -> None:
    step = Step()
    cfg = config(reject={"divergence": "k2", "high": 0.1, "stay_counted": False})
    (scored, _) = step.scored
    packed, _ = settle(cfg, scored, horizon=8, rng=np.random.default_rng(0))
    assert scored.outputs is not None
    x_M = scored.trained.gather([o.logprobs_T for o in scored.outputs]) - step.gather("behavior_logprobs_T", scored)
    kept_M = x_M**2 / 2 <= 0.1
    assert 0 < kept_M.sum() < len(kept_M)
    np.testing.assert_array_equal(scored.trained.gather([b.mask_T for b in packed.batches]), kept_M)
    assert sum(float(b.weights_T.sum()) for b in packed.batches) == pytest.approx(1.0)
    assert all(b.inputs.correction_T is None for b in packed.batches)


def test_only_uncertain_tokens_are_trained() -> None:
    step = Step()
    (scored, _) = step.scored
    packed, _ = settle(config(top_entropy=0.25), scored, horizon=8, rng=np.random.default_rng(0))
    assert scored.outputs is not None
    entropy_M = scored.trained.gather([o.entropy_T for o in scored.outputs if o.entropy_T is not None])
    kept_M = scored.trained.gather([b.mask_T for b in packed.batches]) > 0
    assert kept_M.sum() == int(0.25 * len(entropy_M))
    assert entropy_M[kept_M].min() > entropy_M[~kept_M].max()


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_covariances_are_of_the_whole_update(kind: str) -> None:
    step = Step(seed=4)
    (scored, _) = step.scored
    rng = np.random.default_rng(1)
    advantages_M = rng.normal(size=len(scored.trained))
    batches = with_inputs(scored.packed.batches, advantages=scored.trained.scatter(advantages_M))
    scored = replace(scored, packed=replace(scored.packed, batches=batches))
    bounds = {"covariance_low": -1e9, "covariance_high": 1e9} if kind == "clip_cov" else {}
    cfg = config(loss={"kind": kind, "fraction": 0.3} | bounds)
    packed, _ = settle(cfg, scored, horizon=8, rng=rng)
    chosen_M = scored.trained.gather([b.inputs.selected_T for b in packed.batches if b.inputs.selected_T is not None])
    assert chosen_M.sum() == int(0.3 * len(chosen_M))
    if kind == "kl_cov":
        assert scored.outputs is not None
        logprobs_M = scored.trained.gather([o.logprobs_T for o in scored.outputs])
        a_M = step.gather("advantages_T", scored)
        cov_M = (a_M - a_M.mean()) * (logprobs_M - logprobs_M.mean())
        assert cov_M[chosen_M > 0].min() >= cov_M[chosen_M == 0].max()
