"""GRPO, complete. One step, left to right:

    tasks -> attempts -> rewards -> advantages -> packed batches -> gradients -> weights -> sampler

Everything an algorithm person would change is in this file. What is below it is reached through three protocols:
Env (what is attempted), Sampler (who attempts it), Engine (who learns from it).

    P tasks per step   G attempts per task   T packed tokens
"""

from __future__ import annotations

import numpy as np

from strop.algos import advantages, filters, losses
from strop.config.loops import GRPOConfig
from strop.config.recipe import EngineConfig, TooLong
from strop.data.packing import pack_policy, with_inputs
from strop.data.stream import TaskStream
from strop.engines.base import Engine
from strop.errors import RolloutError
from strop.loops.evaluate import Evaluator
from strop.loops.schedule import optim_params
from strop.rollout.base import Sampler
from strop.rollout.groups import Player, describe
from strop.track.run import Run
from strop.types import Metric, Metrics, Reduction, SamplingParams, Want, merge_metrics
from strop.weights.publish import publish


async def train(
    cfg: GRPOConfig,
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
    max_gap: float,
    reference: Engine | None = None,
) -> None:
    """Train `engine` on `tasks` for `cfg.steps` steps, from where `run` stands.

    `params` says how attempts are drawn, `packing` how they are packed; `reference` is needed when cfg.kl_coefficient
    > 0. Raises RolloutError when more episodes of a step fail than `cfg.max_failures`, or when sampler and trainer
    give the same tokens logprobs more than `max_gap` apart; EngineError after `packing.max_skipped_steps` skipped
    optimizer steps.
    """
    loss = losses.ClippedSurrogate(clip_low=cfg.clip_low, clip_high=cfg.clip_high, kl_coefficient=cfg.kl_coefficient)
    total_updates = cfg.steps * cfg.updates_per_step
    await publish(engine, sampler, version=run.step)
    if run.step == 0 and evaluator.tasks:
        run.record_evaluation(await evaluator.measure("grpo", 0))

    for step in range(run.step, cfg.steps):
        # 1. Play G attempts at each of P tasks, all at once.
        with run.span("sample"):
            groups_P = await player.play(
                tasks.take(cfg.tasks_per_step), cfg.group_size, params, step=step, max_failures=cfg.max_failures
            )
        metrics = describe(groups_P)

        # 2. Each group's rewards become advantages. A group that scored alike has none to give.
        rewards_PG = np.array([[t.reward for t in group] for group in groups_P])  # NaN: the episode failed
        advantages_PG = advantages.grpo(rewards_PG, scale_by_std=cfg.scale_by_std)
        kept_P = filters.informative(rewards_PG) if cfg.drop_uniform_groups else np.ones(len(groups_P), bool)

        # 3. Learn: pack, accumulate gradients, step; once for each part of the groups.
        for part, chosen in enumerate(np.array_split(np.flatnonzero(kept_P), cfg.updates_per_step)):
            with run.span("pack"):
                packed = pack_policy(
                    [groups_P[p] for p in chosen],
                    advantages_PG[chosen],
                    max_tokens=packing.pack_tokens,
                    weighting=cfg.weighting,
                    horizon=params.max_tokens,
                    temperature=params.temperature,
                    share_prefixes=packing.share_prefixes,
                    data_parallel=engine.data_parallel,
                    too_long=too_long,
                )
            metrics = merge_metrics([metrics, {"data/dropped": Metric(Reduction.SUM, packed.dropped)}])
            batches = packed.batches
            if not batches:
                continue  # every group of this part scored alike: nothing to learn, and the step still ends below
            if reference is not None:
                with run.span("reference"):
                    batches = with_inputs(
                        batches, reference_logprobs=[o.logprobs_T for o in await reference.forward(batches)]
                    )
            with run.span("learn"):
                learned = await engine.forward_backward(batches, loss, Want(entropy=True))
                if (
                    part == 0
                ):  # nothing has been learned since these tokens were drawn: both sides have the same weights
                    metrics |= check_gap(learned.metrics, max_gap)
                schedule = optim_params(cfg.schedule, run.updates, total_updates)
                run.count_outcome(await engine.optim_step(schedule))
            metrics = merge_metrics([metrics, learned.metrics])

        # 4. Publish the new weights; the next step samples from them. Then measure, record, save.
        with run.span("publish"):
            await publish(engine, sampler, version=step + 1)
        last = step + 1 == cfg.steps
        if evaluator.due(step + 1, last=last):
            with run.span("evaluate"):
                run.record_evaluation(await evaluator.measure("grpo", step + 1))
        run.samples(step + 1, groups_P)
        await run.end_step(step + 1, metrics, engine, tasks, last=last)


def check_gap(metrics: Metrics, max_gap: float) -> Metrics:
    """The largest difference between the sampler's logprobs and the trainer's, for the same tokens and weights."""
    gap = metrics["policy/gap_max"]
    if not gap.result <= max_gap:  # NaN is a gap too
        raise RolloutError(
            f"the sampler's and the trainer's logprobs of the same tokens differ by up to {gap.result:.2e} "
            f"(sampler.max_gap={max_gap:g}): they no longer run the same model; see `strop doctor`, or raise "
            "sampler.max_gap if the sampler's number format is coarser than the trainer's"
        )
    return {"sampler/gap_max": gap}
