"""GRPO with attempts drawn ahead: while a step is learned from, those of the next `max_lag` steps are being drawn.

    step s        P groups -> learn -> publish version s + 1
    meanwhile     attempts of later steps go on, over each new version: every token carries its own

Slots bound the lag: (max_lag + 1) P tasks are in the making at the most, and one holds its slot until weights that
learned from it are published. So no token is older than max_lag versions when it is learned from, and with max_lag 0
this is `grpo.py`, metric for metric. Ratios are taken to whoever drew a token; see also `correction`.

    P tasks per step   G attempts per task   T packed tokens
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strop.algos.choice import policy_loss
from strop.algos.kl import Coefficient
from strop.config.policy import AsyncGRPOConfig
from strop.config.recipe import EngineConfig, TooLong
from strop.data.attempts import attempt_advantages
from strop.data.packing import pack_policy
from strop.data.scored import settle, token_level
from strop.data.stream import TaskStream
from strop.engines.base import Engine
from strop.loops.ahead import Ahead, oldest_lag
from strop.loops.evaluate import Evaluator
from strop.loops.gap import check_gap
from strop.loops.schedule import optim_params
from strop.loops.score import score
from strop.rollout.base import Sampler
from strop.rollout.groups import Player
from strop.track.run import Run
from strop.types import Metric, Reduction, SamplingParams, Want, merge_metrics
from strop.weights.publish import publish


async def train(
    cfg: AsyncGRPOConfig,
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

    `params` says how attempts are drawn, `packing` how they are packed; `reference` is needed when
    cfg.needs_reference. Raises RolloutError when more episodes of a step fail than `cfg.max_failures`, or when sampler
    and trainer give the same tokens logprobs more than `max_gap` apart; EngineError after `packing.max_skipped_steps`
    skipped optimizer steps.
    """
    total_updates = cfg.steps * cfg.updates_each_step
    kl_cost = Coefficient(value=cfg.kl.coefficient, target=cfg.kl.target, horizon=cfg.kl.horizon)
    await publish(engine, sampler, version=run.step)
    if run.step == 0 and evaluator.tasks:
        run.record_evaluation(await evaluator.measure("async_grpo", 0))

    ahead = Ahead(cfg, tasks, player, params)
    for step in range(run.step, cfg.steps):
        # 1. Begin new tasks in the slots that are free, and wait for P that may be taken. Most had ended before.
        with run.span("sample"):
            attempts = await ahead.take(step)
        metrics = attempts.metrics

        # 2. Rewards become advantages; then pack, once for each optimizer step's part of the groups.
        with run.span("pack"):
            advantages_PG = attempt_advantages(cfg.advantage, attempts)  # NaN: the episode failed
            parts = np.array_split(np.arange(len(attempts.groups)), cfg.updates_per_step)
            updates = [
                pack_policy(
                    [attempts.groups[p] for p in part],
                    advantages_PG[part],
                    max_tokens=packing.pack_tokens,
                    weighting=cfg.weighting,
                    horizon=params.max_tokens,
                    temperature=params.temperature,
                    share_prefixes=packing.share_prefixes,
                    data_parallel=engine.data_parallel,
                    too_long=too_long,
                )
                for part in parts
            ]
        dropped = sum(update.dropped for update in updates)
        metrics = merge_metrics([metrics, {"data/dropped": Metric(Reduction.SUM, dropped)}])

        # 3. Models that stand still during the step score its tokens, where something needs that: a divergence from
        #    the start, corrections for what the sampler drew, choices of tokens. Their results are constants.
        kl_cost = replace(kl_cost, value=run.carried.get("kl_coefficient", cfg.kl.coefficient))
        with run.span("score"):
            scored = await score(cfg, updates, engine=engine, reference=reference, run=run)
            scored = token_level(cfg, attempts, parts, scored, kl_cost.value)
            rng = np.random.default_rng([run.recipe.seed, step])
            settled = [settle(cfg, s, horizon=params.max_tokens, rng=rng) for s in scored]
        metrics = merge_metrics([metrics, *(measured for _, measured in settled)])

        # 4. Learn: accumulate gradients, step. An update whose groups all scored alike has no batches, and no step.
        loss = policy_loss(cfg, kl_cost.value)
        unmoved = True  # nothing was learned since these tokens were drawn: sampler and trainer have the same weights
        for update, _ in settled * cfg.epochs:
            if not update.batches:
                continue
            with run.span("learn"):
                learned = await engine.forward_backward(update.batches, loss, Want(entropy=True))
                if unmoved and oldest_lag(attempts.groups, step) == 0:
                    metrics |= check_gap(learned.metrics, max_gap)
                run.count_outcome(await engine.optim_step(optim_params(cfg.schedule, run.updates, total_updates)))
            metrics, unmoved = merge_metrics([metrics, learned.metrics]), False
        if reference is not None and "kl/reference" in metrics:
            metrics["kl/coefficient"] = Metric(Reduction.MEAN, kl_cost.value)
            next_cost = kl_cost.after(metrics["kl/reference"].result, attempts.rewards_PG.size)
            run.carried["kl_coefficient"] = next_cost.value

        # 5. Publish the new weights; the next step samples from them. Then measure, record, save.
        with run.span("publish"):
            await publish(engine, sampler, version=step + 1)
        last = step + 1 == cfg.steps
        if evaluator.due(step + 1, last=last):
            with run.span("evaluate"):
                run.record_evaluation(await evaluator.measure("async_grpo", step + 1))
        run.samples(step + 1, attempts.groups)
        await run.end_step(step + 1, metrics, engine, ahead, last=last)
