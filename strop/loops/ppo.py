"""PPO, complete. One step, left to right:

    tasks -> attempts -> rewards -> values -> advantages and returns of tokens -> gradients of critic and policy
          -> weights -> sampler

The critic is another Engine, over a value model. It says what could be expected of an attempt from each token on, so
that one attempt at a task is enough (arXiv 1707.06347; for language models arXiv 1909.08593).

    P tasks per step   G attempts per task   T packed tokens
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strop.algos.choice import policy_loss
from strop.algos.kl import Coefficient
from strop.algos.value_losses import ClippedValue
from strop.checkpoint.beside import Beside
from strop.config.ppo import PPOConfig
from strop.config.recipe import EngineConfig, TooLong
from strop.data.packing import pack_policy, unrouted
from strop.data.scored import settle
from strop.data.stream import TaskStream
from strop.data.valued import describe_values, value_tokens, whitened
from strop.engines.base import Engine
from strop.loops.collect import collect
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
    cfg: PPOConfig,
    *,
    tasks: TaskStream,
    player: Player,
    params: SamplingParams,
    policy: Engine,
    critic: Engine,
    sampler: Sampler,
    evaluator: Evaluator,
    run: Run,
    packing: EngineConfig,
    too_long: TooLong,
    max_gap: float,
    reference: Engine | None = None,
) -> None:
    """Train `policy` and `critic` on `tasks` for `cfg.steps` steps, from where `run` stands.

    `params` says how attempts are drawn, `packing` how they are packed; `reference` is needed when cfg.needs_reference.
    RolloutError when more episodes of a step fail than `cfg.max_failures`, or sampler and trainer give the same tokens
    logprobs more than `max_gap` apart; EngineError after `packing.max_skipped_steps` skipped steps of one engine.
    """
    value_loss = ClippedValue(clip=cfg.critic.clip)
    total = cfg.steps * cfg.updates_each_step
    learning = total - cfg.critic.warmup_steps * cfg.updates_each_step  # updates of the policy
    kl_cost = Coefficient(value=cfg.kl.coefficient, target=cfg.kl.target, horizon=cfg.kl.horizon)
    await publish(policy, sampler, version=run.step)
    if run.step == 0 and evaluator.tasks:
        run.record_evaluation(await evaluator.measure("ppo", 0))

    for step in range(run.step, cfg.steps):
        # 1. Play G attempts at each of P tasks, all at once, and pack them, once for each update's part of the groups.
        with run.span("sample"):
            attempts = await collect(cfg, tasks, player, params, step=step)
        with run.span("pack"):
            parts = np.array_split(np.arange(len(attempts.groups)), cfg.updates_per_step)
            updates = [
                pack_policy(
                    [attempts.groups[p] for p in part],
                    np.where(np.isnan(attempts.rewards_PG[part]), np.nan, 0.0),  # NaN is left out; the others: below
                    max_tokens=packing.pack_tokens,
                    weighting=cfg.weighting,
                    horizon=params.max_tokens,
                    temperature=params.temperature,
                    share_prefixes=packing.share_prefixes,
                    data_parallel=policy.data_parallel,
                    too_long=too_long,
                )
                for part in parts
            ]
        dropped = Metric(Reduction.SUM, sum(update.dropped for update in updates))
        metrics = attempts.metrics | {"data/dropped": dropped}

        # 2. Models that stand still score the tokens, and the critic says what it expected: that gives advantages.
        kl_cost = replace(kl_cost, value=run.carried.get("kl_coefficient", cfg.kl.coefficient))
        with run.span("score"):
            scored = await score(cfg, updates, engine=policy, reference=reference, run=run)
        with run.span("value"):
            expected = [await critic.forward(unrouted(s.packed.batches), Want(values=True)) for s in scored]
            valued = value_tokens(cfg, attempts, parts, scored, expected, kl_coefficient=kl_cost.value)
            metrics |= describe_values(valued)
            valued = whitened(valued) if cfg.whiten else valued
            rng = np.random.default_rng([run.recipe.seed, step])
            settled = [settle(cfg, v.scored, horizon=params.max_tokens, rng=rng) for v in valued]
        metrics = merge_metrics([metrics, *(measured for _, measured in settled)])

        # 3. Learn, `epochs` times from each update: the critic, and once it is warm the policy.
        loss = policy_loss(cfg, kl_cost.value)
        unmoved = True  # nothing was learned since these tokens were drawn: sampler and trainer have the same weights
        rounds = list(zip(valued, settled, strict=True)) * cfg.epochs
        for number, (value, (update, _)) in enumerate(rounds, step * cfg.updates_each_step):
            if not update.batches:
                continue
            with run.span("critic"):
                taught = await critic.forward_backward(value.critic_batches(), value_loss)
                outcome = await critic.optim_step(optim_params(cfg.critic.schedule, number, total))
                run.count_outcome(outcome, "critic")
            metrics = merge_metrics([metrics, taught.metrics])
            if step < cfg.critic.warmup_steps:
                continue
            with run.span("learn"):
                learned = await policy.forward_backward(update.batches, loss, Want(entropy=True))
                if unmoved:
                    metrics |= check_gap(learned.metrics, max_gap)
                run.count_outcome(await policy.optim_step(optim_params(cfg.schedule, run.updates, learning)))
            metrics, unmoved = merge_metrics([metrics, learned.metrics]), False
        if reference is not None and "kl/reference" in metrics:
            metrics["kl/coefficient"] = Metric(Reduction.MEAN, kl_cost.value)
            next_cost = kl_cost.after(metrics["kl/reference"].result, attempts.rewards_PG.size)
            run.carried["kl_coefficient"] = next_cost.value

        # 4. Publish the new weights; the next step samples from them. Then measure, record, save both engines.
        with run.span("publish"):
            await publish(policy, sampler, version=step + 1)
        last = step + 1 == cfg.steps
        if evaluator.due(step + 1, last=last):
            with run.span("evaluate"):
                run.record_evaluation(await evaluator.measure("ppo", step + 1))
        run.samples(step + 1, attempts.groups)
        await run.end_step(step + 1, metrics, Beside(policy, {"critic": critic}), tasks, last=last)
