"""Best-of-n fine-tuning (rejection sampling), complete. One step, left to right:

    tasks -> n attempts each -> the best ones that are good enough -> packed batches -> gradients -> weights -> sampler

The tokens that were sampled are the tokens that are imitated. RAFT (arXiv 2304.06767) with keep 1 and no bound; ReST
(2308.08998) and rejection-sampling fine-tuning (2308.01825) with a bound on the reward.

    P tasks per step   G attempts per task   T packed tokens
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from strop.algos import filters
from strop.algos.losses import CrossEntropy
from strop.config.imitation import BestOfNConfig
from strop.config.recipe import EngineConfig, TooLong
from strop.data.packing import Batch, pack_policy
from strop.data.stream import TaskStream
from strop.engines.base import Engine
from strop.loops.evaluate import Evaluator
from strop.loops.schedule import optim_params
from strop.rollout.base import Sampler
from strop.rollout.groups import Failures, Player, describe
from strop.track.run import Run
from strop.types import Metric, Reduction, SamplingParams, merge_metrics
from strop.weights.publish import publish


async def train(
    cfg: BestOfNConfig,
    *,
    tasks: TaskStream,
    player: Player,
    params: SamplingParams,
    engine: Engine,
    sampler: Sampler,
    evaluator: Evaluator,
    run: Run,
    packing: EngineConfig,
    too_long: TooLong,
) -> None:
    """Train `engine` to repeat its own best attempts at `tasks`, for `cfg.steps` steps from where `run` stands.

    Attempts are drawn by `params`; likelihood is raised at temperature 1, as for any text to imitate. Raises
    RolloutError when more episodes of a step fail than `cfg.max_failures`, EngineError after
    `packing.max_skipped_steps` skipped optimizer steps.
    """
    await publish(engine, sampler, version=run.step)
    if run.step == 0 and evaluator.tasks:
        run.record_evaluation(await evaluator.measure("best_of_n", 0))

    for step in range(run.step, cfg.steps):
        # 1. Play n attempts at each of P tasks, and choose.
        with run.span("sample"):
            asked = tasks.take(cfg.tasks_per_step)
            failures = Failures(step, allowed=cfg.max_failures)
            groups_P = await player.play(asked, cfg.group_size, params, step=step, failures=failures)
        rewards_PG = np.array([[t.reward for t in group] for group in groups_P])  # NaN: the episode failed
        chosen_PG = filters.best(rewards_PG, keep=cfg.keep, at_least=cfg.min_reward)
        metrics = describe(groups_P) | {
            "best_of_n/kept": Metric(Reduction.MEAN, float(chosen_PG.sum()), chosen_PG.size),
            "best_of_n/solved_tasks": Metric(Reduction.MEAN, float(chosen_PG.any(1).sum()), len(groups_P)),
        }

        # 2. Pack the chosen ones alone.
        with run.span("pack"):
            packed = pack_policy(
                groups_P,
                np.where(chosen_PG, 1.0, np.nan),
                max_tokens=packing.pack_tokens,
                weighting=cfg.weighting,
                horizon=params.max_tokens,
                temperature=1.0,
                share_prefixes=packing.share_prefixes,
                data_parallel=engine.data_parallel,
                too_long=too_long,
            )
        batches = [cast("Batch[None]", replace(batch, inputs=None)) for batch in packed.batches]
        metrics = merge_metrics([metrics, {"data/dropped": Metric(Reduction.SUM, packed.dropped)}])

        # 3. Learn. A step in which no attempt was good enough has nothing to learn, and still ends below.
        if batches:
            with run.span("learn"):
                learned = await engine.forward_backward(batches, CrossEntropy())
                run.count_outcome(await engine.optim_step(optim_params(cfg.schedule, run.updates, cfg.steps)))
            metrics = merge_metrics([metrics, learned.metrics])

        # 4. Publish the new weights; the next step samples from them. Then measure, record, save.
        with run.span("publish"):
            await publish(engine, sampler, version=step + 1)
        last = step + 1 == cfg.steps
        if evaluator.due(step + 1, last=last):
            with run.span("evaluate"):
                run.record_evaluation(await evaluator.measure("best_of_n", step + 1))
        run.samples(step + 1, groups_P)
        await run.end_step(step + 1, metrics, engine, tasks, last=last)
