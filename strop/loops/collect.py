"""A step's attempts: tasks in, groups with their rewards out, played again where a group had nothing to say.

take P tasks -> play G attempts each -> drop groups that scored alike, and refill -> rewards, docked for length
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from strop.algos import filters
from strop.algos.filters import Float64s
from strop.config.policy import PolicyLoopConfig
from strop.data.attempts import Attempts, docked, rewards_of
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.rollout.groups import Failures, Player, describe
from strop.types import Group, Metric, Reduction, SamplingParams, merge_metrics


async def collect(
    cfg: PolicyLoopConfig,
    tasks: TaskStream,
    player: Player,
    params: SamplingParams,
    *,
    step: int,
    drop_uniform: bool = False,
    refills: int = 0,
    greedy: bool = False,
) -> Attempts:
    """Play one step's tasks.

    With `drop_uniform`, groups whose attempts all scored alike are left out, and new tasks are played in their place:
    `refills` * P at the most. `greedy` plays one attempt more at each task, at temperature 0. Raises RolloutError when
    more than `cfg.max_failures` episodes of the step failed.
    """
    params = replace(params, routes=cfg.router_replay == "rollout")
    failures = Failures(step, cfg.max_failures)
    taken: list[Task] = []
    played: list[Group] = []
    kept = np.zeros(0, np.int64)
    most = (1 + refills) * cfg.tasks_per_step
    while len(kept) < cfg.tasks_per_step and len(taken) < most:
        wanted = tasks.take(min(cfg.tasks_per_step - len(kept), most - len(taken)))
        played += await player.play(wanted, cfg.group_size, params, step=step, failures=failures, first=len(taken))
        taken += wanted
        kept = np.flatnonzero(
            filters.informative(rewards_of(played)) if drop_uniform else np.ones(len(played), np.bool_)
        )
    greedy_P = None
    if greedy:
        greedy_P = await greedy_rewards(player, [taken[p] for p in kept], params, step)
    return attempts_of(cfg, player, params, played=played, kept=[played[p] for p in kept], greedy_P=greedy_P)


async def greedy_rewards(player: Player, tasks: list[Task], params: SamplingParams, step: int) -> Float64s:
    """The reward of an attempt at temperature 0 at each task, [P]; none may fail."""
    params = replace(params, temperature=0.0, routes=False)
    groups = await player.play(tasks, 1, params, step=step)
    return rewards_of(groups)[:, 0]


def attempts_of(
    cfg: PolicyLoopConfig,
    player: Player,
    params: SamplingParams,
    *,
    played: Sequence[Group],
    kept: list[Group],
    greedy_P: Float64s | None,
) -> Attempts:
    """What a step played, and those groups of it that are learned from, with their rewards."""
    dropped = {"data/dropped_groups": Metric(Reduction.SUM, float(len(played) - len(kept)))}
    return Attempts(
        groups=kept,
        rewards_PG=docked(kept, cfg.length, player.max_sampled(params)).reshape(len(kept), cfg.group_size),
        greedy_P=greedy_P,
        metrics=merge_metrics([describe(played), dropped]),
    )
