"""Values to advantages and returns, against plain recursions over each attempt alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from strop.config.ppo import PPOConfig
from strop.data.attempts import Attempts
from strop.data.packing import with_inputs
from strop.data.scored import Scored
from strop.data.valued import Valued, describe_values, value_tokens, whitened
from strop.types import Ending, Group, Outputs, Trajectory
from tests.unit.data.groups import attempt, completion, pack

PROMPT = [7, 8]


def conversation() -> Trajectory:
    """Two replies with a tool's result of two tokens between them."""
    made = attempt(PROMPT, [20, 21])
    made.segments[0].observe(np.array([90, 91], np.int32))
    made.segments[0].act(completion([22, 23, 24]))
    return made


def attempts(*endings: Ending) -> Attempts:
    """One group: a reply of three tokens, a conversation, a failure, a reply of one token; rewards 1, 0.5, NaN, -1."""
    played = [attempt(PROMPT, [10, 11, 12]), conversation(), Trajectory(ending=Ending.FAILED), attempt(PROMPT, [13])]
    for trajectory, ending in zip((played[0], played[1], played[3]), endings, strict=False):
        trajectory.ending = ending
    rewards = np.array([[1.0, 0.5, np.nan, -1.0]])
    return Attempts(groups=[Group("t", played)], rewards_PG=rewards, greedy_P=None, metrics={})


def scored(of: Attempts, *, max_tokens: int = 9, share_prefixes: bool = False) -> Scored:
    zeros = np.where(np.isnan(of.rewards_PG), np.nan, 0.0)
    packed = pack(of.groups, zeros.tolist(), max_tokens=max_tokens, share_prefixes=share_prefixes)
    return Scored(packed=packed, outputs=None)


def critic(of: Scored) -> list[Outputs]:
    """A value for each row that tells where it stands: token / 100 + position / 7."""
    found = []
    for batch in of.packed.batches:
        values_T = batch.tokens_T / 100 + torch.from_numpy(batch.layout.positions_T) / 7
        found.append(Outputs(logprobs_T=torch.zeros(len(values_T)), values_T=values_T.float()))
    return found


def v(token: int, position: int) -> float:
    return token / 100 + position / 7


# The rows before each trained token, and the row at the end of each attempt that did not fail.
BEFORE = [
    [v(8, 1), v(10, 2), v(11, 3)],
    [v(8, 1), v(20, 2), v(91, 5), v(22, 6), v(23, 7)],
    [v(8, 1)],
]
AFTER = [v(12, 4), v(24, 8), v(13, 2)]
REWARDS = [1.0, 0.5, -1.0]


def plain(
    discount: float, trace: float, ends: list[float], costs: list[list[float]] | None = None
) -> tuple[list[float], list[float]]:
    advantages, returns = [], []
    for n, values in enumerate(BEFORE):
        rewards = [0.0] * (len(values) - 1) + [REWARDS[n]]
        if costs is not None:
            rewards = [r - c for r, c in zip(rewards, costs[n], strict=True)]
        following, advantage, own = ends[n], 0.0, []
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            advantage = reward + discount * following - value + discount * trace * advantage
            following = value
            own.append(advantage)
        advantages += own[::-1]
        returns += [a + value for a, value in zip(own[::-1], values, strict=True)]
    return advantages, returns


def valued(of: Attempts, update: Scored, kl_coefficient: float = 0.0, **knobs: Any) -> Valued:
    cfg = PPOConfig.model_validate(knobs)
    (found,) = value_tokens(cfg, of, [np.array([0])], [update], [critic(update)], kl_coefficient=kl_coefficient)
    return found


@pytest.mark.parametrize(("max_tokens", "share"), [(9, False), (64, False), (64, True)])
def test_advantages_follow_each_attempt_over_its_own_tokens(max_tokens: int, share: bool) -> None:
    """A21: a tool's result neither discounts nor lends its value, however the step is packed; failures are left out."""
    of = attempts()
    found = valued(of, scored(of, max_tokens=max_tokens, share_prefixes=share), discount=0.9, trace=0.8)
    advantages, returns = plain(0.9, 0.8, [0.0, 0.0, 0.0])
    np.testing.assert_allclose(found.advantages_M, advantages, rtol=1e-6)
    np.testing.assert_allclose(found.returns_M, returns, rtol=1e-6)
    np.testing.assert_allclose(found.values_M, np.concatenate(BEFORE), rtol=1e-6)
    batches = found.scored.packed.batches
    learned = found.scored.trained.gather([batch.inputs.advantages_T for batch in batches])
    np.testing.assert_allclose(learned, advantages, rtol=1e-6)
    critics = found.critic_batches()
    np.testing.assert_allclose(
        found.scored.trained.gather([batch.inputs.returns_T for batch in critics]), returns, rtol=1e-6
    )
    for a, b in zip(batches, critics, strict=True):
        assert a.tokens_T is b.tokens_T and torch.equal(a.mask_T, b.mask_T) and torch.equal(a.weights_T, b.weights_T)


def test_only_what_was_cut_short_is_worth_what_the_critic_expects_of_the_rest() -> None:
    of = attempts(Ending.LENGTH, Ending.DONE, Ending.MAX_TURNS)
    found = valued(of, scored(of, max_tokens=9), bootstrap_truncated=True)
    expected, _ = plain(1.0, 0.95, [AFTER[0], 0.0, AFTER[2]])
    np.testing.assert_allclose(found.advantages_M, expected, rtol=1e-6)
    without = valued(of, scored(of, max_tokens=9))
    np.testing.assert_allclose(without.advantages_M, plain(1.0, 0.95, [0.0, 0.0, 0.0])[0], rtol=1e-6)


def test_a_divergence_in_the_reward_costs_at_every_token() -> None:
    """k1 is old - reference logprob; the old ones are -1 everywhere, the reference's are made to differ by token."""
    of = attempts()
    update = scored(of, max_tokens=64)
    reference = [-1.0 - 0.01 * batch.targets_T.clamp(min=0) for batch in update.packed.batches]
    batches = with_inputs(update.packed.batches, reference_logprobs=reference)
    update = replace(update, packed=replace(update.packed, batches=batches))
    kl = {"coefficient": 0.5, "place": "reward", "estimator": "k1"}
    found = valued(of, update, 0.3, kl=kl)
    targets = [[10, 11, 12], [20, 21, 22, 23, 24], [13]]
    costs = [[0.3 * 0.01 * token for token in row] for row in targets]
    np.testing.assert_allclose(found.advantages_M, plain(1.0, 0.95, [0.0] * 3, costs)[0], rtol=1e-5, atol=1e-7)
    in_loss = valued(of, update, 0.3, kl=kl | {"place": "loss"})
    np.testing.assert_allclose(in_loss.advantages_M, plain(1.0, 0.95, [0.0] * 3)[0], rtol=1e-6)


def test_whitening_is_over_all_updates_together() -> None:
    of = attempts()
    parts = [valued(of, scored(of)), valued(of, scored(of), discount=0.5)]
    white = whitened(parts)
    both = np.concatenate([part.advantages_M for part in parts])
    expected = (both - both.mean()) / both.std(ddof=1)
    np.testing.assert_allclose(np.concatenate([part.advantages_M for part in white]), expected, rtol=1e-6)
    for before, after in zip(parts, white, strict=True):
        np.testing.assert_array_equal(before.returns_M, after.returns_M)
        batches = after.scored.packed.batches
        learned = after.scored.trained.gather([batch.inputs.advantages_T for batch in batches])
        np.testing.assert_allclose(learned, after.advantages_M, rtol=1e-5)


def test_explained_variance_is_one_for_a_perfect_critic_and_is_left_out_without_variance() -> None:
    of = attempts()
    found = valued(of, scored(of))
    metrics = describe_values([found])
    rest = found.returns_M - found.values_M
    assert metrics["value/explained_variance"].result == pytest.approx(1 - rest.var() / found.returns_M.var())
    perfect = replace(found, returns_M=found.values_M)
    assert describe_values([perfect])["value/explained_variance"].result == 1.0
    assert "value/explained_variance" not in describe_values([replace(found, returns_M=0 * found.returns_M)])


def test_a_step_in_which_everything_failed_has_nothing_to_value() -> None:
    failed = [Trajectory(ending=Ending.FAILED), Trajectory(ending=Ending.FAILED)]
    of = Attempts(groups=[Group("t", failed)], rewards_PG=np.array([[np.nan] * 2]), greedy_P=None, metrics={})
    found = valued(of, scored(of), bootstrap_truncated=True)
    assert len(found.advantages_M) == 0 and describe_values(whitened([found])) == {}


def test_outputs_without_values_are_refused() -> None:
    of = attempts()
    update = scored(of)
    silent = [Outputs(logprobs_T=torch.zeros(len(batch))) for batch in update.packed.batches]
    with pytest.raises(ValueError, match="0 batches have values"):
        value_tokens(PPOConfig(), of, [np.array([0])], [update], [silent], kl_coefficient=0.0)
