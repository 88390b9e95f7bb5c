"""Tasks in, groups of attempts out: every episode of a step at once, failures counted, and the step's numbers.

P tasks -> P * G episodes, each with a seed of its own -> P groups of G trajectories -> metrics
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isnan

import numpy as np
from numpy.typing import NDArray

from strop.config.recipe import DrawConfig
from strop.data.tasks import Task
from strop.envs.base import Env
from strop.errors import RolloutError
from strop.rollout.base import Sampler, play
from strop.rollout.router import NoSampler
from strop.rollout.seeds import attempt_seeds
from strop.tokens.base import Renderer
from strop.types import Ending, Group, Metric, Metrics, Reduction, SamplingParams, Trajectory

NAMED_FAILURES = 3  # errors that the RolloutError of a failed step quotes

log = logging.getLogger(__name__)


class Failures:
    """The episodes of one step that failed, and how many may. Several calls of `Player.play` may share it."""

    def __init__(self, step: int, allowed: int) -> None:
        self._step, self._allowed = step, allowed
        self._errors: list[str] = []
        self._episodes = 0

    def add(self, error: str) -> None:
        self._errors.append(error)

    def check(self, episodes: int) -> None:
        """Raise RolloutError, with the first errors, when more failed than may; `episodes` more were played."""
        self._episodes += episodes
        count = len(self._errors)
        if count > self._allowed:
            more = f"; and {count - NAMED_FAILURES} more" if count > NAMED_FAILURES else ""
            raise RolloutError(
                f"{count} of {self._episodes} episodes of step {self._step} failed, max_failures={self._allowed}: "
                f"{'; '.join(self._errors[:NAMED_FAILURES])}{more}"
            )


class Player:
    """Plays tasks with one sampler. Attempt g at task p of a step draws from a seed made of (seed, step, p, g).

    So a step's attempts depend on the run's seed, on its tasks and on the weights, and a resumed run draws the same.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        new_env: Callable[[Task], Env],
        *,
        seed: int,
        max_turns: int = 1,
        timeout_s: float | None = None,  # for the episodes of one call; those that have not ended then failed
    ) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._new_env = new_env
        self._seed = seed
        self._max_turns = max_turns
        self._timeout_s = timeout_s

    async def play(
        self,
        tasks: list[Task],
        group_size: int,
        params: SamplingParams,
        *,
        step: int,
        failures: Failures | None = None,
        first: int = 0,
    ) -> list[Group]:
        """G attempts at each task, all at once; one Group for each task, in order. The seed in `params` is not used.

        `first` is how many tasks of this step were played before these, so that no two attempts draw alike.

        An episode that raises, or does not end in time, becomes a trajectory that ended with FAILED and has reward NaN.
        Raises RolloutError when there are more of them than `failures` allows; None allows none. NoSampler is no
        episode's failure: it ends all of them.
        """
        failures = failures or Failures(step, allowed=0)
        seeds_PG = attempt_seeds(self._seed, step, range(first, first + len(tasks)), group_size).tolist()
        playing = [
            asyncio.ensure_future(self._attempt(task, replace(params, seed=seed), failures))
            for task, seeds_G in zip(tasks, seeds_PG, strict=True)
            for seed in seeds_G
        ]
        ended: set[asyncio.Task[Trajectory]] = set()
        late: set[asyncio.Task[Trajectory]] = set()
        try:
            if playing:
                ended, late = await asyncio.wait(playing, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for attempt in playing:
                attempt.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        for attempt in ended:
            attempt.result()  # raises NoSampler
        for index, attempt in enumerate(playing):
            if attempt in late:
                failures.add(f"task {tasks[index // group_size].id}: no end within {self._timeout_s:g} s")
        failures.check(len(playing))
        trajectories = [failed() if attempt in late else attempt.result() for attempt in playing]
        return [
            Group(task.id, trajectories[index * group_size : (index + 1) * group_size])
            for index, task in enumerate(tasks)
        ]

    def max_sampled(self, params: SamplingParams) -> int:
        """Tokens that one attempt can sample, over all its turns."""
        return self._max_turns * params.max_tokens

    async def _attempt(self, task: Task, params: SamplingParams, failures: Failures) -> Trajectory:
        try:
            env = self._new_env(task)
            return await play(env, self._sampler, self._renderer, params, max_turns=self._max_turns)
        except NoSampler:
            raise
        except Exception as error:  # one broken episode must not end the run: it is counted, and there is a limit
            log.warning("an episode of task %s failed", task.id, exc_info=error)
            failures.add(f"task {task.id}: {type(error).__name__}: {error}")
            return failed()


def failed() -> Trajectory:
    """What stands for an episode that failed."""
    return Trajectory(reward=float("nan"), ending=Ending.FAILED)


def sampling_params(draw: DrawConfig, renderer: Renderer) -> SamplingParams:
    """How a recipe's attempts are drawn: its settings, and the renderer's stop tokens."""
    return SamplingParams(
        max_tokens=draw.max_tokens,
        temperature=draw.temperature,
        top_k=draw.top_k,
        top_p=draw.top_p,
        min_p=draw.min_p,
        stop_tokens=renderer.stop_tokens,
        stop_strings=draw.stop,
    )


def describe(groups: Iterable[Group]) -> Metrics:
    """A step's attempts as numbers. Failed episodes are counted and left out of every mean.

    `reward/<part>` are means over the episodes that ended, where one that does not name the part counts as 0;
    `rollout/uniform_groups` is the fraction of groups whose rewards are all alike. A mean of nothing has count 0.
    """
    groups = list(groups)
    played = [t for group in groups for t in group]
    ended = [t for t in played if t.ending is not Ending.FAILED]
    rewards = np.array([t.reward for t in ended if not isnan(t.reward)])
    sampled = np.array([t.num_sampled for t in ended])
    prompts = np.array([sum(len(s) for s in t.segments) for t in ended]) - sampled
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": Metric(Reduction.MEAN, float(rewards.std()) if len(rewards) else 0.0, min(len(rewards), 1)),
        "rollout/tokens_mean": _mean(sampled),
        "rollout/tokens_max": Metric(Reduction.MAX, float(sampled.max()) if len(sampled) else 0.0, len(sampled)),
        "rollout/prompt_tokens": _mean(prompts),
        "rollout/truncated": _mean(np.array([t.ending is Ending.LENGTH for t in ended])),
        "rollout/failed": Metric(Reduction.SUM, float(len(played) - len(ended)), len(played)),
        "rollout/uniform_groups": _mean(np.array([_is_uniform(group) for group in groups])),
    }
    for part in sorted({name for t in ended for name in t.rewards}):
        metrics[f"reward/{part}"] = _mean(np.array([t.rewards.get(part, 0.0) for t in ended]))
    return metrics


def _is_uniform(group: Group) -> bool:
    return len({t.reward for t in group if not isnan(t.reward)}) < 2


def _mean(values: NDArray[np.generic]) -> Metric:
    return Metric(Reduction.MEAN, float(values.astype(np.float64).sum()), len(values))
