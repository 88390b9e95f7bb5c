"""On-policy distillation, complete. One step, left to right:

    tasks -> the student's attempts -> packed batches -> what the teachers say there -> gradients -> weights -> sampler

The student learns where it goes itself, not where a teacher would have gone (GKD, arXiv 2306.13649). A teacher is
another Engine, frozen; what several of them say of one token is summed with their weights. Student and teachers are
compared at the temperature at which the attempts were drawn.

    P tasks per step   G attempts per task   N attempts   T packed tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strop.algos.distill_losses import Distillation, Divergence, Tail
from strop.algos.losses import ImportanceSampling, PolicyInputs
from strop.config.imitation import DistillConfig, ObjectiveConfig
from strop.config.recipe import EngineConfig, TooLong
from strop.data.packing import Packed, pack_policy
from strop.data.stream import TaskStream
from strop.data.teaching import Float64s, spread_weights, teacher_weights
from strop.engines.base import Engine
from strop.loops.evaluate import Evaluator
from strop.loops.gap import check_gap
from strop.loops.schedule import optim_params
from strop.loops.teach import compared, rewarded
from strop.rollout.base import Sampler
from strop.rollout.groups import Failures, Player, describe
from strop.track.run import Run
from strop.types import Ending, Metric, Metrics, Reduction, SamplingParams, merge_metrics
from strop.weights.publish import publish


async def train(
    cfg: DistillConfig,
    *,
    tasks: TaskStream,
    player: Player,
    params: SamplingParams,
    engine: Engine,
    teachers: Sequence[Engine],
    vocab_size: int,
    sampler: Sampler,
    evaluator: Evaluator,
    run: Run,
    packing: EngineConfig,
    too_long: TooLong,
    max_gap: float,
) -> None:
    """Train `engine`, a model of `vocab_size` tokens, on its own attempts at `tasks`, from where `run` stands.

    `teachers` are those of `cfg.teachers`, in order. Rewards are recorded and never learned from. Raises RolloutError
    when more episodes of a step fail than `cfg.max_failures`, or when sampler and trainer give the same tokens logprobs
    more than `max_gap` apart; EngineError after `packing.max_skipped_steps` skipped optimizer steps.
    """
    await publish(engine, sampler, version=run.step)
    if run.step == 0 and evaluator.tasks:
        run.record_evaluation(await evaluator.measure("distill", 0))

    for step in range(run.step, cfg.steps):
        # 1. The student plays G attempts at each of P tasks.
        asked = tasks.take(cfg.tasks_per_step)
        with run.span("sample"):
            failures = Failures(step, allowed=cfg.max_failures)
            groups_P = await player.play(asked, cfg.group_size, params, step=step, failures=failures)
        metrics = describe(groups_P)

        # 2. Pack every attempt that did not fail. What each teacher counts for in it depends on its task.
        with run.span("pack"):
            played_PG = np.array([[t.ending is not Ending.FAILED for t in group] for group in groups_P])
            weights_NM = np.repeat(teacher_weights(cfg.teachers, asked), cfg.group_size, axis=0)[played_PG.ravel()]
            packed = pack_policy(
                groups_P,
                np.where(played_PG, 0.0, np.nan),  # there are no advantages yet
                max_tokens=packing.pack_tokens,
                weighting=cfg.weighting,
                horizon=params.max_tokens,
                temperature=params.temperature,
                share_prefixes=packing.share_prefixes,
                data_parallel=engine.data_parallel,
                too_long=too_long,
            )
        metrics = merge_metrics([metrics, {"data/dropped": Metric(Reduction.SUM, packed.dropped)}])

        # 3. Let the teachers speak, and learn.
        if packed.batches:
            if cfg.objective.kind == "reward":
                learned = await _by_reward(cfg.objective, packed, weights_NM, teachers, engine, run)
            else:
                learned = await _by_divergence(
                    cfg.objective, packed, weights_NM, teachers, engine, run, vocab_size=vocab_size
                )
            metrics = merge_metrics([metrics, learned]) | check_gap(learned, max_gap)
            run.count_outcome(await engine.optim_step(optim_params(cfg.schedule, run.updates, cfg.steps)))

        # 4. Publish the new weights; the next step samples from them. Then measure, record, save.
        with run.span("publish"):
            await publish(engine, sampler, version=step + 1)
        last = step + 1 == cfg.steps
        if evaluator.due(step + 1, last=last):
            with run.span("evaluate"):
                run.record_evaluation(await evaluator.measure("distill", step + 1))
        run.samples(step + 1, groups_P)
        await run.end_step(step + 1, metrics, engine, tasks, last=last)


async def _by_reward(
    cfg: ObjectiveConfig,
    packed: Packed[PolicyInputs],
    weights_NM: Float64s,
    teachers: Sequence[Engine],
    engine: Engine,
    run: Run,
) -> Metrics:
    """Policy gradient of minus the reverse KL at each sampled token."""
    with run.span("teach"):
        lessons, rewards = await rewarded(packed, weights_NM, teachers, discount=cfg.discount or 0.0)
    with run.span("learn"):
        learned = await engine.forward_backward(lessons, ImportanceSampling())
    return learned.metrics | rewards


async def _by_divergence(
    cfg: ObjectiveConfig,
    packed: Packed[PolicyInputs],
    weights_NM: Float64s,
    teachers: Sequence[Engine],
    engine: Engine,
    run: Run,
    *,
    vocab_size: int,
) -> Metrics:
    """The gradient of a divergence of whole distributions. Those are large: one pack of each rank at a time."""
    tail = Tail(cfg.tail) if cfg.top_k and cfg.tail else Tail.DROPPED  # the whole vocabulary has none
    loss = Distillation(divergence=Divergence(cfg.kind), tail=tail, beta=cfg.beta or 0.5)
    weights = spread_weights(weights_NM, packed.trained)
    learned: list[Metrics] = []
    for lo in range(0, len(packed.batches), engine.data_parallel):
        few = slice(lo, lo + engine.data_parallel)
        with run.span("teach"):
            lessons = await compared(
                packed.batches[few], weights[few], teachers, top_k=cfg.top_k or vocab_size, vocab_size=vocab_size
            )
        with run.span("learn"):
            learned.append((await engine.forward_backward(lessons, loss)).metrics)
    return merge_metrics(learned)
