"""A step's attempts: tasks in, groups with their rewards out, played again where a group had nothing to say.

take P tasks -> play G attempts each -> drop groups that scored alike, and refill -> rewards, docked for length
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strop.algos import filters
from strop.config.policy import PolicyLoopConfig
from strop.data.attempts import Attempts, docked, rewards_of
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.rollout.groups import Player, describe
from strop.types import Ending, Group, Metric, Reduction, SamplingParams, merge_metrics


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

    With `drop_uniform`, groups whose attempts all scored alike are left out, and up to `refills` times as many new
    tasks are played as groups are missing. `greedy` plays one attempt more at each task, at temperature 0. Raises
    RolloutError when more than `cfg.max_failures` episodes of the step failed.
    """
    params = replace(params, routes=cfg.router_replay == "rollout")
    taken: list[Task] = []
    played: list[Group] = []
    kept = np.zeros(0, np.int64)
    for _ in range(1 + refills):
        wanted = tasks.take(cfg.tasks_per_step - len(kept))
        failed = sum(t.ending is Ending.FAILED for group in played for t in group)
        played += await player.play(
            wanted, cfg.group_size, params, step=step, max_failures=cfg.max_failures - failed, first=len(taken)
        )
        taken += wanted
        kept = np.flatnonzero(
            filters.informative(rewards_of(played)) if drop_uniform else np.ones(len(played), np.bool_)
        )
        if len(kept) >= cfg.tasks_per_step:
            break
    groups = [played[p] for p in kept]
    greedy_P = None
    if greedy:
        asked = [taken[p] for p in kept]
        best = await player.play(asked, 1, replace(params, temperature=0.0, routes=False), step=step, max_failures=0)
        greedy_P = rewards_of(best)[:, 0]
    dropped = {"data/dropped_groups": Metric(Reduction.SUM, float(len(played) - len(groups)))}
    return Attempts(
        groups=groups,
        rewards_PG=docked(groups, cfg.length, player.max_sampled(params)).reshape(len(groups), cfg.group_size),
        greedy_P=greedy_P,
        metrics=merge_metrics([describe(played), dropped]),
    )
